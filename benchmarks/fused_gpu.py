"""Our kernels over rows on a GPU, beside what Inductor makes of the same torch code, FlashInfer's and plain torch.

    python benchmarks/fused_gpu.py [--only add_rms_norm ...]

Each operation is called as the passes call it, and written once more as transformers' modules write it; that function
runs as it is (eager) and under `torch.compile(mode="max-autotune-no-cudagraphs", dynamic=False)`. FlashInfer's function
runs where it is installed and has one. bfloat16, float32 inside. Rotary embedding of queries and keys, with and without
their norms, returns both and stores keys and values in a cache of pages of 16 tokens, at slots in no order. Parts are
the four float32 parts of a product, as the norm behind it gets them.

Times are medians of replays of a graph of 20 calls, over as many different inputs, up to 20, as exceed the L2 cache ten
times; all outputs of a graph stay. Rows that are few are in the L2 cache, as they are in a step. The number in brackets
is our time over theirs: below 1 ours is faster. The share is that of a copy of 2 GiB, for the bytes that have to be
read and written once. What differs from plain torch by 1 % of the norm or fails is refused instead of timed, and the
line in front says why.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from card_rates import measured_rates
from command_line import require_gpus
from state_gpu import captured
from torch.nn import functional

from slotline.plugins.model_families.passes.kernels import FusedKernels, GatedNorm, NormWeight
from slotline.plugins.model_families.passes.target import target_of
from slotline.registry.contracts.attention import CacheSlots, KVCache

SHORT = "--only add_rms_norm"
ROWS = (1, 64, 256, 8192)
HIDDEN = (1024, 4096)
INTERMEDIATE = (3072, 14336)
HEADS = ((16, 8), (32, 8))
"""Of queries and of keys."""
VALUE_HEADS = 32
"""Qwen3-Next's, whose gated norm goes over each head."""
SIZE, PAGE, PARTS = 128, 16, 4
EPS = 1e-6
CALLS = 20
AT_LEAST = 5 * 10**8
"""Bytes that the calls of a graph go through before the first ones come again, ten times the L2 cache."""
FURTHEST = 1e-2
Tensors = tuple[torch.Tensor, ...]
Call = Callable[..., Any]


class Case(NamedTuple):
    """One operation in one shape.

    Attributes:
        shape: as it is printed.
        make: makes the arguments of one call, those of a step anew and those that a step's layers share.
        ours, plain: by our kernels, and as transformers' modules do it; a tensor or several in the same order.
        nbytes: what has to be read and written, each tensor once.
        flashinfer: by FlashInfer's function, None where it has none.
        written: which arguments an operation changes that says so, besides what it returns.
    """

    shape: str
    make: Callable[[], Tensors]
    ours: Call
    plain: Call
    nbytes: int
    flashinfer: Call | None = None
    written: tuple[int, ...] = ()


class Setting(NamedTuple):
    """What all cases need.

    Attributes:
        kernels: ours.
        flashinfer: the module, None where it is not installed.
    """

    kernels: FusedKernels
    flashinfer: Any = None
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    def weight(self, n: int) -> torch.Tensor:
        return 1 + self.normal(n) / 8


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As LlamaRMSNorm and Qwen3RMSNorm do it."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def gate_normed(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As MambaRMSNormGated does it in one group."""
    wide = x.to(torch.float32) * functional.silu(gate.to(torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def normed_gate(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As Qwen3NextRMSNormGated does it."""
    return (normed(x, weight) * functional.silu(gate.to(torch.float32))).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As apply_rotary_pos_emb does it: x [batch, heads, num_tokens, size], cos and sin [batch, num_tokens, size]."""
    left, right = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return x * cos.unsqueeze(1) + torch.cat((-right, left), dim=-1) * sin.unsqueeze(1)


def rms_norm(on: Setting, rows: int, n: int) -> Case:
    weight = on.weight(n)

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return on.kernels.rms_norm(x, weight, EPS, 0.0)

    def theirs(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return on.flashinfer.rmsnorm(x, weight, EPS)

    nbytes = (2 * rows + 1) * n * weight.itemsize
    return Case(f"{rows} x {n}", lambda: (on.normal(rows, n), weight), ours, normed, nbytes, theirs)


def add_rms_norm(on: Setting, rows: int, n: int) -> Case:
    weight = on.weight(n)

    def ours(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
        return on.kernels.add_rms_norm(x[None], residual, None, NormWeight(weight, EPS, 0.0))

    def plain(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
        total = residual + x
        return total, normed(total, weight)

    def theirs(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
        on.flashinfer.fused_add_rmsnorm(x, residual, weight, EPS)
        return residual, x

    def make() -> Tensors:
        return on.normal(rows, n), on.normal(rows, n), weight

    return Case(f"{rows} x {n}", make, ours, plain, (4 * rows + 1) * n * weight.itemsize, theirs)


def add_rms_norm_parts(on: Setting, rows: int, n: int) -> Case:
    weight = on.weight(n)

    def ours(parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
        return on.kernels.add_rms_norm(parts, residual, None, NormWeight(weight, EPS, 0.0))

    def plain(parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
        total = (residual + parts.sum(0)).to(residual.dtype)
        return total, normed(total, weight)

    def make() -> Tensors:
        return on.normal(PARTS, rows, n, dtype=torch.float32), on.normal(rows, n), weight

    nbytes = (3 * rows + 1) * n * weight.itemsize + 4 * PARTS * rows * n
    return Case(f"{rows} x {n}", make, ours, plain, nbytes)


def silu_and_mul(on: Setting, rows: int, n: int) -> Case:
    def ours(merged: torch.Tensor) -> torch.Tensor:
        return on.kernels.act_and_mul(merged, "silu")

    def plain(merged: torch.Tensor) -> torch.Tensor:
        gate, up = merged.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def theirs(merged: torch.Tensor) -> Any:
        return on.flashinfer.silu_and_mul(merged)

    nbytes = 3 * rows * n * on.dtype.itemsize
    return Case(f"{rows} x {n}", lambda: (on.normal(rows, 2 * n),), ours, plain, nbytes, theirs)


def gated_rms_norm(on: Setting, rows: int, n: int) -> Case:
    """Mamba-2's: the gate first."""
    weight, form = on.weight(n), GatedNorm(eps=EPS, group_size=n, gate_first=True)

    def ours(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return on.kernels.gated_rms_norm(x, gate, weight, form)

    def make() -> Tensors:
        return on.normal(rows, n), on.normal(rows, n), weight

    return Case(f"{rows} x {n}", make, ours, gate_normed, (3 * rows + 1) * n * weight.itemsize)


def gated_rms_norm_heads(on: Setting, rows: int, heads: int) -> Case:
    """Qwen3-Next's: the norm of each head first."""
    weight, form = on.weight(SIZE), GatedNorm(eps=EPS, group_size=SIZE, gate_first=False)

    def ours(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return on.kernels.gated_rms_norm(x, gate, weight, form)

    def make() -> Tensors:
        return on.normal(rows * heads, SIZE), on.normal(rows * heads, SIZE), weight

    nbytes = (3 * rows * heads + 1) * SIZE * weight.itemsize
    return Case(f"{rows} x {heads} x {SIZE}", make, ours, normed_gate, nbytes)


def angles(on: Setting, rows: int, size: int) -> Case:
    """Cosines and sines of a step's positions, once for all layers."""
    frequencies = 1.0 / 1e6 ** (torch.arange(0, size, 2, device=on.device).float() / size)

    def ours(positions: torch.Tensor, frequencies: torch.Tensor) -> Tensors:
        return on.kernels.angles(positions, frequencies, 1.0, size, on.dtype)

    def plain(positions: torch.Tensor, frequencies: torch.Tensor) -> Tensors:
        half = positions[..., None].float() * frequencies
        both = torch.cat((half, half), dim=-1)
        return both.cos().to(on.dtype), both.sin().to(on.dtype)

    def make() -> Tensors:
        return torch.randint(0, 32768, (1, rows), device=on.device), frequencies

    nbytes = 8 * rows + frequencies.nbytes + 2 * rows * size * on.dtype.itemsize
    return Case(f"{rows} x {size}", make, ours, plain, nbytes)


def rope_store(on: Setting, rows: int, heads: tuple[int, int]) -> Case:
    """Llama's."""
    return turned_and_stored(on, rows, heads, norms=False)


def norm_rope_store(on: Setting, rows: int, heads: tuple[int, int]) -> Case:
    """Qwen3's."""
    return turned_and_stored(on, rows, heads, norms=True)


def turned_and_stored(on: Setting, rows: int, heads: tuple[int, int], *, norms: bool) -> Case:
    (queries, keys), cut = heads, sum(heads)
    angle = torch.rand(1, rows, SIZE // 2, device=on.device).mul(100).repeat(1, 1, 2)
    cos, sin = angle.cos().to(on.dtype), angle.sin().to(on.dtype)
    blocks = 1 + 2 * -(-rows // PAGE)  # the first is nobody's
    slots = PAGE + torch.randperm((blocks - 1) * PAGE, device=on.device)[:rows]
    factors = (on.weight(SIZE), on.weight(SIZE)) if norms else ()

    def ours(
        states: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *weights: torch.Tensor,
    ) -> Tensors:
        query, key = [NormWeight(weight, EPS, 0.0) for weight in weights] if norms else (None, None)
        where = CacheSlots(KVCache(key_cache, value_cache), slots)
        on.kernels.rotate_and_store(states, query, key, queries, keys, cos, sin, SIZE, where)
        return states[:, :, :queries], states[:, :, queries:cut]

    def plain(
        states: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *weights: torch.Tensor,
    ) -> Tensors:
        query, key, value = states.split((queries, keys, keys), dim=2)
        if norms:
            query, key = normed(query, weights[0]), normed(key, weights[1])
        query = rotated(query.transpose(1, 2), cos, sin).transpose(1, 2)
        key = rotated(key.transpose(1, 2), cos, sin).transpose(1, 2)
        place = (slots // PAGE, slots % PAGE)
        key_cache.index_put_(place, key[0])
        value_cache.index_put_(place, value[0])
        return query, key

    def make() -> Tensors:
        states = on.normal(1, rows, cut + keys, SIZE)
        caches = [torch.zeros(blocks, PAGE, keys, SIZE, device=on.device, dtype=on.dtype) for _ in range(2)]
        return (states, *caches, slots, cos, sin, *factors)

    touched = (cut + keys) + cut + 2 * keys + 2  # heads of a row: read, turned, stored; cosines and sines
    nbytes = (touched * rows + len(factors)) * SIZE * on.dtype.itemsize + slots.nbytes
    return Case(f"{rows} x {queries}/{keys}", make, ours, plain, nbytes, written=(1, 2))


class Operation(NamedTuple):
    """How to make a case of so many rows and such a size, and which there are."""

    case: Callable[[Setting, int, Any], Case]
    sizes: Sequence[Any]
    rows: tuple[int, ...] = ROWS


OPERATIONS = {
    "rms_norm": Operation(rms_norm, HIDDEN),
    "add_rms_norm": Operation(add_rms_norm, HIDDEN),
    "add_rms_norm_parts": Operation(add_rms_norm_parts, HIDDEN, (64,)),  # of more or less there are no four
    "silu_and_mul": Operation(silu_and_mul, INTERMEDIATE),
    "rope_store": Operation(rope_store, HEADS),
    "norm_rope_store": Operation(norm_rope_store, HEADS),
    "gated_rms_norm": Operation(gated_rms_norm, HIDDEN),
    "gated_rms_norm_heads": Operation(gated_rms_norm_heads, (VALUE_HEADS,)),
    "angles": Operation(angles, (SIZE,)),
}


def compiled(plain: Call) -> Call:
    """By Inductor; earlier cases' functions are forgotten, for of one in too many shapes the next would run eagerly."""
    torch._dynamo.reset()
    return torch.compile(plain, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True)


def results(call: Call, arguments: Tensors, written: Sequence[int]) -> list[torch.Tensor]:
    """What a call with copies of these arguments returns, and the arguments that it was to change."""
    copies = [argument.clone() for argument in arguments]
    found = call(*copies)
    found = (found,) if isinstance(found, torch.Tensor) else found
    return [*found, *(copies[place] for place in written)]


def difference(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest norm of a difference, as a part of the norm of what is wanted; not a number if any is none."""
    pairs = zip(found, wanted, strict=True)
    parts = [(one.float() - other.float()).norm() / other.float().norm() for one, other in pairs]
    return float(torch.stack(parts).max())


def refusal(call: Call, arguments: Tensors, wanted: Sequence[torch.Tensor], written: Sequence[int]) -> str | None:
    """Why a call is not to be timed, None if nothing speaks against it."""
    found = results(call, arguments, written)
    if any(one.shape != other.shape or one.dtype != other.dtype for one, other in zip(found, wanted, strict=True)):
        return f"gives {[(tuple(one.shape), one.dtype) for one in found]}"
    off = difference(found, wanted)
    return None if off < FURTHEST else f"differs by {off:.3f} of the norm"


def timed(call: Call, inputs: Sequence[Tensors]) -> float:
    """Microseconds of a call; every output stays until the graph's last call, so that none takes another's place."""
    return float(captured(lambda: [call(*inputs[i % len(inputs)]) for i in range(CALLS)], CALLS))


def measure(case: Case, flashinfer: bool) -> dict[str, float | None]:
    """Microseconds by who computed it, None for who was refused; why is printed."""
    inputs = [case.make() for _ in range(max(3, min(CALLS, AT_LEAST // case.nbytes + 1)))]
    pristine = tuple(argument.clone() for argument in inputs[0])
    wanted = results(case.plain, pristine, case.written)
    contenders = {"ours": case.ours, "Inductor": compiled(case.plain)}
    if flashinfer and case.flashinfer is not None:
        contenders["FlashInfer"] = case.flashinfer
    times: dict[str, float | None] = {}
    for who, call in (contenders | {"eager": case.plain}).items():
        times[who] = None
        try:
            reason = refusal(call, pristine, wanted, case.written)
            if reason is None:
                times[who] = timed(call, inputs)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error)[:200].split())}"
        if reason is not None:
            print(f"  {who}: {reason}", flush=True)
    return times


def said(times: Mapping[str, float | None], nbytes: int, rate: float) -> str:
    """A line's times, how ours compares with each, and the share of copying."""
    mine, told = times["ours"], []
    for who in ("ours", "Inductor", "FlashInfer", "eager"):
        time = times.get(who)
        ratio = "" if time is None or mine is None or who == "ours" else f" ({mine / time:.2f})"
        told.append(f"{who} {'refused' if who in times else '-'}" if time is None else f"{who} {time:7.2f} us{ratio}")
    if mine is not None:
        told.append(f"{nbytes / mine / rate:6.1%} of copying")
    return "; ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=tuple(OPERATIONS), default=tuple(OPERATIONS))
    arguments = parser.parse_args()
    require_gpus()
    torch.manual_seed(0)
    kernels = target_of("cuda:0", torch.bfloat16).fused
    if kernels is None:
        parser.error("there are no kernels of ours for this device")
    flashinfer = None
    try:
        flashinfer = import_module("flashinfer")
    except Exception as error:  # a library beside it may be missing, too
        print(f"FlashInfer: {type(error).__name__}: {str(error)[:200]}")
    rate = measured_rates().bandwidth / 1e6
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copying at {rate / 1e6:.2f} TB/s", flush=True)
    for name in arguments.only:
        operation = OPERATIONS[name]
        for size in operation.sizes:
            for rows in operation.rows:
                torch.cuda.empty_cache()
                case = operation.case(Setting(kernels, flashinfer), rows, size)
                times = measure(case, flashinfer is not None)
                print(f"{name:20} {case.shape:>13}: {said(times, case.nbytes, rate)}", flush=True)


if __name__ == "__main__":
    main()
