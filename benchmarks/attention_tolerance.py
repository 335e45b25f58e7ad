"""How far right attention kernels are from float64, and which rule sees that a kernel lost one key.

Prints the tables of docs/decisions/tolerance.md:

    OMP_NUM_THREADS=1 python benchmarks/attention_tolerance.py [--trials 12] [--contexts 16 512 4096 32768] [--level L3]
        [--check attention.window]

A trial is one decode step of one request (8 query heads, 2 KV heads of 128). Right kernels compute scores and softmax
in float32, round the weights to the dtype, accumulate in float32 and round the output; they go over the keys at once,
in 4 parts that are merged, or in tiles of 64 with a running maximum. The broken kernel is the first of them without
one key, the last one of the first quarter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from attrs import define
from command_line import positive

from slotline.testing import Level
from slotline.testing.oracles.attention import DEFAULT, STRICT, Answer, Tolerance, attention, tolerance

SHORT = "--trials 1 --contexts 16 --backends torch --level L1 --check attention.window"
HEADS, KV_HEADS, SIZE = 8, 2, 128
SCALE = SIZE**-0.5
DEFAULTS = {torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5), torch.float32: (1.3e-6, 1e-5)}
"""rtol and atol of torch.testing.assert_close."""
NEEDLE_SCORE, NEEDLE_VALUE = 30.0, 20.0

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def in_parts(length: int) -> Callable[[int], list[slice]]:
    """Cuts n keys into parts of about `length`; 0 for one part."""

    def cut(n: int) -> list[slice]:
        step = length or n
        return [slice(i, min(i + step, n)) for i in range(0, n, step)]

    return cut


def kernel(cut: Callable[[int], list[slice]]) -> Kernel:
    """A right kernel that merges parts with a running maximum."""

    def run(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group, dtype = HEADS // KV_HEADS, query.dtype
        q = query[0].float()  # [H, D]
        out, total = torch.zeros(HEADS, SIZE), torch.zeros(HEADS, 1)
        top = torch.full((HEADS, 1), -torch.inf)
        for part in cut(len(keys)):
            k, v = (each[part].float().repeat_interleave(group, 1).transpose(0, 1) for each in (keys, values))
            scores = torch.einsum("hd,hkd->hk", q, k) * SCALE
            higher = torch.maximum(top, scores.amax(1, keepdim=True))
            weights, old = torch.exp(scores - higher), torch.exp(top - higher)
            total = total * old + weights.sum(1, keepdim=True)
            out = out * old + torch.einsum("hk,hkd->hd", weights.to(dtype).float(), v)
            top = higher
        return (out / total).to(dtype)[None]

    return run


RIGHT = {
    "at once": kernel(in_parts(0)),
    "4 parts": kernel(lambda n: in_parts(-(-n // 4))(n)),
    "tiles of 64": kernel(in_parts(64)),
}


@define
class Row:
    """One dtype and context over all trials."""

    error: float = 0.0
    worst: float = 0.0
    strict: float = 0.0
    mean: float = 0.0
    rejected_defaults: int = 0
    rejected_fixed: int = 0
    right: int = 0
    random_defaults: int = 0
    random_fixed: int = 0
    random_rule: int = 0
    needle_rule: int = 0
    broken: int = 0


def inputs(dtype: torch.dtype, length: int, seed: int, needle: int | None) -> tuple[torch.Tensor, ...]:
    """Query [1, H, D], keys and values [L, Hkv, D] in `dtype`; with a key that decides all, where one is asked for."""
    generator = torch.Generator().manual_seed(seed)
    query, keys, values = (
        torch.randn(n, heads, SIZE, generator=generator)
        for n, heads in ((1, HEADS), (length, KV_HEADS), (length, KV_HEADS))
    )
    if needle is not None:
        direction = torch.randn(KV_HEADS, SIZE, generator=generator)
        direction *= SIZE**0.5 / direction.norm(dim=1, keepdim=True)
        query[0] = direction.repeat_interleave(HEADS // KV_HEADS, 0)
        keys[needle] = direction * NEEDLE_SCORE / (SCALE * SIZE)
        values[needle] = NEEDLE_VALUE
    return query.to(dtype), keys.to(dtype), values.to(dtype)


def ratio(out: torch.Tensor, exact: Answer, eager: Answer, values: torch.Tensor, rule: Tolerance) -> float:
    """The error as a share of what `rule` allows."""
    allowed = tolerance(exact, eager, values, out.dtype, rule)
    return float((out.double() - exact.out).abs().max()) / allowed.out


def close(out: torch.Tensor, exact: Answer, rtol: float, atol: float) -> bool:
    """What allclose says of the output, beside the exact answer rounded to its dtype."""
    return torch.allclose(out.float(), exact.out.to(out.dtype).float(), rtol=rtol, atol=atol)


def measure(dtype: torch.dtype, length: int, trials: int) -> Row:
    """All kernels at one dtype and context."""
    row = Row()
    lost = length // 4 - 1
    kept = [i for i in range(length) if i != lost]
    for seed in range(trials):
        query, keys, values = inputs(dtype, length, seed, None)
        exact = attention(query, keys, values, scale=SCALE)
        eager = attention(query, keys, values, scale=SCALE, dtype=dtype)
        for run in RIGHT.values():
            out = run(query, keys, values)
            off, own = (out.double() - exact.out).abs(), (eager.out.double() - exact.out).abs()
            row.error = max(row.error, float(off.max()))
            row.worst = max(row.worst, ratio(out, exact, eager, values, DEFAULT))
            row.strict = max(row.strict, ratio(out, exact, eager, values, STRICT))
            row.mean = max(row.mean, float(off.mean() / own.mean()))
            row.rejected_defaults += not close(out, exact, *DEFAULTS[dtype])
            row.rejected_fixed += not close(out, exact, 1e-3, 1e-3)
            row.right += 1
        out = RIGHT["at once"](query, keys[kept], values[kept])
        row.random_defaults += not close(out, exact, *DEFAULTS[dtype])
        row.random_fixed += not close(out, exact, 1e-2, 1e-2)
        row.random_rule += ratio(out, exact, eager, values, DEFAULT) > 1
        query, keys, values = inputs(dtype, length, seed, lost)
        exact = attention(query, keys, values, scale=SCALE)
        eager = attention(query, keys, values, scale=SCALE, dtype=dtype)
        out = RIGHT["at once"](query, keys[kept], values[kept])
        row.needle_rule += ratio(out, exact, eager, values, DEFAULT) > 1
        row.worst = max(row.worst, ratio(RIGHT["4 parts"](query, keys, values), exact, eager, values, DEFAULT))
        row.broken += 1
    return row


def table(dtypes: Sequence[torch.dtype], contexts: Sequence[int], trials: int) -> None:
    """Print a row for each dtype and context."""
    print(
        "| dtype, context | largest error | share of allowed, k = 3 | k = 2 | mean error / baseline's "
        "| right kernels rejected by torch's defaults / 1e-3 "
        "| lost key seen by defaults / 1e-2 / rule / rule + needle |"
    )
    print("|---|---|---|---|---|---|---|")
    for dtype in dtypes:
        for length in contexts:
            row = measure(dtype, length, trials)
            name = str(dtype).removeprefix("torch.")
            print(
                f"| {name} {length:,} | {row.error:.1e} | {row.worst:.2f} | {row.strict:.2f} | {row.mean:.2f} "
                f"| {row.rejected_defaults} / {row.rejected_fixed} of {row.right} "
                f"| {row.random_defaults} / {row.random_fixed} / {row.random_rule} / **{row.needle_rule}** "
                f"of {row.broken} |",
                flush=True,
            )


def suite(name: str, level: Level, checks: str) -> None:
    """Print the largest share of the allowed error that a backend uses in checks up to a level whose id begins so."""
    from slotline.testing import check_plugin

    records = check_plugin(
        f"attention:{name}", device="cpu", level=level, only=lambda check: check.id.startswith(checks)
    )
    measured = [record for record in records if record.mandatory and record.ratio is not None]
    if not measured:
        print(f"| {name} | 0 | - | - | - | - |", flush=True)
        return
    worst = max(measured, key=lambda record: record.ratio or 0.0)
    baselines = [record.error / record.baseline for record in measured if record.error and record.baseline]
    failed = sum(record.bad for record in records)
    figures = f"{worst.ratio:.2f} | `{worst.key}` | {max(baselines, default=0.0):.2f}"
    print(f"| {name} | {len(measured)} | {failed} | {figures} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the tolerance rule of attention checks.")
    parser.add_argument("--trials", type=positive, default=12)
    parser.add_argument("--contexts", type=positive, nargs="+", default=[16, 512, 4096, 32768])
    parser.add_argument("--backends", nargs="*", default=["torch", "cpu"])
    parser.add_argument("--level", type=Level.parse, default=Level.STATEFUL, help="of the suite")
    parser.add_argument("--check", default="", metavar="ID", help="of the suite: those that begin so")
    options = parser.parse_args()
    table([torch.float32, torch.float16, torch.bfloat16], options.contexts, options.trials)
    if options.backends:
        print("\n| backend | measured runs | failed | largest share of allowed | in | largest error / baseline's |")
        print("|---|---|---|---|---|---|")
    for name in options.backends:
        suite(name, options.level, options.check)


if __name__ == "__main__":
    main()
