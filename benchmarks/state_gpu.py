"""State layers alone on a GPU: time of one layer's call by kind, and the share of the card's limits it reaches.

    python benchmarks/state_gpu.py [--backend triton] [--kind mamba2] [--only decode] [--json FILE]

Sizes are those of Mamba-2.8B (mamba1), Mamba-2 2.7B (mamba2), Qwen3-Next 80B (gated_delta) and its convolution
(short_conv); activations bfloat16, states float32. Decode: one token of each request in shuffled slots, layers in turn
so that no state is found in the L2 cache, medians of replays of a captured graph; bytes are the states, read and
written, and the inputs and outputs. Their share of copying is given three times: of a copy of 2 GiB; and of copies that
move as many bytes as the layer does, in a graph like its own, by a kernel of ours in the best of its sizes, which reads
before the copy in front has ended (programmatic dependent launch), and by torch. Prefill: prompts without a state,
medians of eager calls; the limit is the time of the bytes, of the chunked forms' products at chunks of 64 or of the
selective scan's exponentials, whichever is the longest, at rates measured in the same run. Where FlashInfer, mamba-ssm
or flash-linear-attention are installed, their kernels run on the same inputs in the same process, after their results
were compared with ours.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from card_rates import measured_rates
from command_line import require_gpus
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from slotline.registry.contracts.state import STATE_KINDS, StateBatch, StateContext, StateLayer, StateTensorSpec
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.loading import resolve_factory

SHORT = "--kind short_conv --only decode"
FACTS: dict[str, dict[str, Any]] = {
    "short_conv": {"channels": 8192, "width": 4, "activation": "silu"},
    "mamba1": {"channels": 5120, "state_size": 16, "dt_softplus": True},
    "mamba2": {"num_heads": 80, "head_size": 64, "num_groups": 1, "state_size": 128, "dt_softplus": True},
    "gated_delta": {
        "num_k_heads": 16,
        "num_v_heads": 32,
        "head_size_k": 128,
        "head_size_v": 128,
        "qk_l2norm": True,
        "scale": 128**-0.5,
    },
}
BATCHES = (64, 256, 8, 1)
PROMPTS = ((8192,), (2048,) * 4, (512,) * 16, (1024,))
ROUNDS = 30
AT_LEAST = 5 * 10**8
"""Bytes of state that a captured graph goes through, ten times the L2 cache."""
COPY_WARPS = {512: (4,), 1024: (2, 4, 8), 2048: (4, 8), 4096: (4, 8), 8192: (8, 16)}
"""Warps of a program that only copies, by its words of 32 bits."""
Tensors = Mapping[str, torch.Tensor]


def layer_of(kind: str) -> StateLayer:
    facts = FACTS[kind]
    spec = STATE_KINDS[kind]
    tensors = tuple(
        StateTensorSpec(
            name=name,
            shape=tuple(facts["width"] - 1 if size == "width - 1" else facts[size] for size in sizes),
            dtype="float32" if spec.recurrent else "bfloat16",
        )
        for name, sizes in spec.tensors.items()
    )
    return StateLayer(name=kind, index=0, state_kind=kind, tensors=tensors, facts=facts)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def inputs_of(kind: str, tokens: int) -> dict[str, torch.Tensor]:
    """Random inputs whose states stay bounded over any number of tokens."""
    f, full = FACTS[kind], torch.float32
    if kind == "short_conv":
        c = f["channels"]
        return {"x": normal(tokens, c), "weight": normal(c, f["width"]), "bias": normal(c)}
    if kind == "gated_delta":
        keys, values = (f["num_k_heads"], f["head_size_k"]), (f["num_v_heads"], f["head_size_v"])
        g, beta = -normal(tokens, values[0], dtype=full).abs() / 8, torch.sigmoid(normal(tokens, values[0]))
        return {
            "q": normal(tokens, *keys),
            "k": normal(tokens, *keys),
            "v": normal(tokens, *values),
            "g": g,
            "beta": beta,
        }
    if kind == "mamba1":
        d, n = f["channels"], f["state_size"]
        rate = -torch.arange(1, n + 1, device="cuda", dtype=full).expand(d, n).contiguous()
        token = {"x": normal(tokens, d), "dt": normal(tokens, d), "B": normal(tokens, n), "C": normal(tokens, n)}
        token["z"] = normal(tokens, d)
    else:
        d, n = f["num_heads"], f["state_size"]
        rate = -1 - 15 * torch.rand(d, device="cuda")
        x = normal(tokens, d, f["head_size"])
        b, c = (normal(tokens, f["num_groups"], n) for _ in range(2))
        token = {"x": x, "dt": normal(tokens, d), "B": b, "C": c}
    return token | {"A": rate, "D": normal(d, dtype=full), "dt_bias": normal(d, dtype=full) - 4}


def batch_of(lengths: tuple[int, ...], slots: torch.Tensor, *, known: bool) -> StateBatch:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return StateBatch(
        num_requests=len(lengths),
        num_tokens=int(starts[-1]),
        max_query_len=max(lengths),
        query_start_loc=torch.from_numpy(starts).cuda(),
        slots=slots,
        has_initial_state=torch.full((len(lengths),), known, device="cuda"),
        num_accepted=torch.ones(len(lengths), dtype=torch.int32, device="cuda"),
        query_start_loc_cpu=starts,
        num_decodes=len(lengths) if max(lengths) == 1 else 0,
    )


def state_of(layer: StateLayer, slots: int) -> dict[str, torch.Tensor]:
    return {spec.name: normal(slots, *spec.shape, dtype=getattr(torch, spec.dtype)) for spec in layer.tensors}


def backend_of(name: str, layer: StateLayer) -> Any:
    descriptor = PluginRegistry.discover(tolerant=True).load(Kind.STATE, name)
    context = StateContext(
        contract=1,
        layers=(layer,),
        device="cuda",
        dtype="bfloat16",
        max_query_len=8192,
        max_requests=256,
        max_tokens=8192,
    )
    return resolve_factory(descriptor)(context)


def median(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Median microseconds of a call on the device, which never waits for the host."""
    for _ in range(3):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(40_000_000)
    for event in events[:-1]:
        event.record()
        work()
    events[-1].record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    return float(1e3 * times[rounds // 2])


def captured(work: Callable[[], Any], calls: int) -> float:
    """Median microseconds of one of the `calls` that `work` makes, in replays of a graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return median(graph.replay) / calls


class Limits(NamedTuple):
    """What the card reaches in this run, each in millions a second: bytes a microsecond and so on.

    Attributes:
        copying: bytes read and written by a large copy.
        products: operations of a large bfloat16 matrix product.
        exponentials: of base 2 in float32, of numbers in registers.
    """

    copying: float
    products: float
    exponentials: float

    @classmethod
    def measured(cls) -> Limits:
        rates = measured_rates()
        numbers = torch.zeros(2**22, device="cuda")

        def exponentials() -> None:
            repeat_exp2[(numbers.numel() // 1024,)](numbers, times=256, block=1024)

        exponents = 256 * numbers.numel() / median(exponentials, 10)
        return cls(rates.bandwidth / 1e6, rates.operations / 1e6, exponents)


@triton.jit  # type: ignore[untyped-decorator]
def repeat_exp2(numbers, times: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(numbers + place)
    for _ in range(times):
        value = tl.exp2(-value)
    tl.store(numbers + place, value)


@triton.jit  # type: ignore[untyped-decorator]
def copy_words(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reads as soon as it starts, for no source is ever written, and writes when the kernel in front has ended."""
    gdc_launch_dependents()
    place = tl.program_id(0) * block + tl.arange(0, block)
    words = tl.load(source + place, mask=place < count)
    gdc_wait()
    tl.store(target + place, words, mask=place < count)


def copying(nbytes: int, count: int) -> tuple[float, float]:
    """Microseconds of a copy that moves `nbytes`, reads and writes together, one of `count` in a captured graph.

    By the best of our kernel's sizes, and by torch.
    """
    words = nbytes // 8
    pairs = [[torch.zeros(words, dtype=torch.int32, device="cuda") for _ in range(2)] for _ in range(count)]

    def ours(block: int, warps: int) -> None:
        for source, target in pairs:
            copy_words[(triton.cdiv(words, block),)](
                source, target, words, block=block, num_warps=warps, launch_pdl=True
            )

    torchs = captured(lambda: [target.copy_(source) for source, target in pairs], count)
    sizes = [(block, warps) for block, several in COPY_WARPS.items() for warps in several]
    return min(captured(partial(ours, *size), count) for size in sizes), torchs


def decode_bytes(layer: StateLayer, inputs: Tensors, batch: int) -> int:
    kept = sum(spec.num_elements * (4 if spec.dtype == "float32" else 2) for spec in layer.tensors)
    like = inputs["v" if "v" in inputs else "x"]
    return 2 * kept * batch + sum(value.nbytes for value in inputs.values()) + like.nbytes


def prefill_operations(kind: str, tokens: int) -> float:
    """Of the products of the chunked form; 0 where there are none."""
    f, chunk = FACTS[kind], 64
    if kind == "mamba2":
        p, n = f["head_size"], f["state_size"]
        return float(2.0 * tokens * f["num_heads"] * (2 * p * n + chunk * (n + p) / 2))
    if kind == "gated_delta":
        k, v = f["head_size_k"], f["head_size_v"]
        return float(2.0 * tokens * f["num_v_heads"] * (3 * k * v + chunk * (3 * k + 2 * v) / 2))
    return 0.0


def prefill_exponentials(kind: str, tokens: int) -> float:
    """Of the selective scan, one for each token, channel and number of its state; elsewhere they are few."""
    f = FACTS[kind]
    return float(tokens * f["channels"] * f["state_size"]) if kind == "mamba1" else 0.0


def library_decodes(kind: str, inputs: Tensors, state: Tensors, slots: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The public kernels of one decode step with these inputs, by library."""
    if kind in ("mamba1", "mamba2"):
        return selective_updates(kind, inputs, state["ssm"], slots)
    if kind != "gated_delta":
        return {}
    try:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    except ImportError as error:
        print(f"  {kind}: {error}")
        return {}
    step = {name: value[:, None] for name, value in inputs.items()}
    options = {"scale": FACTS[kind]["scale"], "use_qk_l2norm_in_kernel": True, "output_final_state": True}
    held = state["delta"][slots.long()]  # it knows no slots: one state behind the other, and a new tensor of them
    return {"flash-linear-attention": lambda: fused_recurrent_gated_delta_rule(**step, initial_state=held, **options)}


def selective_updates(
    kind: str, inputs: Tensors, held: torch.Tensor, slots: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    """FlashInfer's and mamba-ssm's selective_state_update, which take the same arguments."""
    wide = held.shape[1:] if kind == "mamba2" else (1, *held.shape[1:])
    batch = inputs["x"].shape[0]

    def spread(value: torch.Tensor) -> torch.Tensor:
        return value.view(batch, *wide[:2]) if kind == "mamba1" else value[..., None].expand(batch, *wide[:2])

    def rows(value: torch.Tensor) -> torch.Tensor:
        value = value.bfloat16() if value is inputs["D"] or value is inputs["dt_bias"] else value
        return value.view(wide[:2]) if kind == "mamba1" else value[:, None].expand(wide[:2])

    rate = inputs["A"].view(wide) if kind == "mamba1" else inputs["A"][:, None, None].expand(wide)
    columns = {name: inputs[name].view(batch, -1, wide[2]) for name in "BC"}
    gate = inputs["z"].view(batch, *wide[:2]) if "z" in inputs else None
    arguments = (
        held.view(held.shape[0], *wide),
        inputs["x"].view(batch, *wide[:2]),
        spread(inputs["dt"]),
        rate,
        columns["B"],
        columns["C"],
        rows(inputs["D"]),
        gate,
        rows(inputs["dt_bias"]),
        True,
        slots,
    )
    found: dict[str, Callable[[], Any]] = {}
    for library, module in (
        ("FlashInfer", "flashinfer.mamba"),
        ("mamba-ssm", "mamba_ssm.ops.triton.selective_state_update"),
    ):
        try:
            found[library] = partial(import_module(module).selective_state_update, *arguments)
        except ImportError as error:
            print(f"  {kind}: {error}")
    return found


def library_prefills(kind: str, inputs: Tensors, lengths: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    """mamba-ssm's chunk scan or flash-linear-attention's gated delta rule; prompts must have equal lengths."""
    i = {
        name: v.unflatten(0, (len(lengths), lengths[0]))
        for name, v in inputs.items()
        if name in "x dt B C q k v g beta"
    }
    try:
        if kind == "mamba2":
            from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

            options = {"D": inputs["D"], "dt_bias": inputs["dt_bias"], "dt_softplus": True, "return_final_states": True}
            args = (i["x"], i["dt"], inputs["A"], i["B"], i["C"], 256)
            return {"mamba-ssm": lambda: mamba_chunk_scan_combined(*args, **options)}
        if kind == "gated_delta":
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule

            args = tuple(i[name] for name in ("q", "k", "v", "g", "beta"))
            options = {"scale": FACTS[kind]["scale"], "output_final_state": True, "use_qk_l2norm_in_kernel": True}
            return {"flash-linear-attention": lambda: chunk_gated_delta_rule(*args, **options)}
    except ImportError as error:
        print(f"  {kind}: {error}")
    return {}


def agrees(library: str, call: Callable[[], Any], want: torch.Tensor) -> bool:
    """Whether a library runs and gives what ours does; what it says or how far it is off is printed where not."""
    try:
        got = call()
    except Exception as error:
        print(f"  {library}: {type(error).__name__}: {str(error)[:300]}")
        return False
    got = got[0] if isinstance(got, tuple) else got
    off = float((got.float().reshape(want.shape) - want).norm() / want.norm())
    if not off <= 0.02:
        print(f"  {library}: differs by {off:.3f} of the norm")
        return False
    return True


def each(calls: Sequence[Callable[[], Any]]) -> None:
    """Call one after the other."""
    for call in calls:
        call()


def said(time: float, others: Mapping[str, float]) -> str:
    """How long the libraries took, and what part of their time ours is."""
    return "".join(f"; {library} {other:.2f} us, {time / other:.2f} times" for library, other in others.items())


def decode(name: str, kind: str, limits: Limits) -> list[dict[str, Any]]:
    figures, layer = [], layer_of(kind)
    backend = backend_of(name, layer)
    for batch in BATCHES:
        inputs = inputs_of(kind, batch)
        count = max(2, min(64, AT_LEAST // (decode_bytes(layer, inputs, batch) // 2) + 1))
        states = [state_of(layer, batch + 3) for _ in range(count)]
        slots = torch.randperm(batch + 3, device="cuda")[:batch].int()
        plan = backend.plan(batch_of((1,) * batch, slots, known=True))

        def ours(state: Tensors, inputs: Tensors = inputs, plan: Any = plan) -> torch.Tensor:
            return backend.forward(layer, inputs, state, plan)  # type: ignore[no-any-return]

        def called(library: str, state: Tensors, inputs: Tensors = inputs, slots: torch.Tensor = slots) -> Any:
            return library_decodes(kind, inputs, state, slots)[library]

        def fresh(state: Tensors) -> Tensors:
            return {key: value.clone() for key, value in state.items()}

        begun = fresh(states[0])  # what is timed changes the others
        want = ours(fresh(begun)).float()
        time = captured(lambda: [ours(state) for state in states], count)  # noqa: B023
        others = {
            library: captured(partial(each, [called(library, state) for state in states]), count)
            for library in library_decodes(kind, inputs, states[0], slots)
            if agrees(library, called(library, fresh(begun)), want)
        }
        nbytes = decode_bytes(layer, inputs, batch)
        best, plain = copying(nbytes, count)
        speed, share = nbytes / time / 1e6, nbytes / time / limits.copying
        print(
            f"{kind:12} decode {batch:4}: {time:8.2f} us {speed:6.2f} TB/s {share:5.1%} of copying 2 GiB, "
            f"{best / time:5.0%} of copying {nbytes / 1e6:.1f} MB ({best:.2f} us; by torch {plain:.1f})"
            + said(time, others),
            flush=True,
        )
        figures.append(
            {
                "kind": kind,
                "decode": batch,
                "us": time,
                "tb_s": speed,
                "share": share,
                "share_of_as_many_bytes": best / time,
                "share_of_as_many_bytes_by_torch": plain / time,
                "others": others,
            }
        )
    return figures


def prefill(name: str, kind: str, limits: Limits) -> list[dict[str, Any]]:
    figures, layer = [], layer_of(kind)
    backend = backend_of(name, layer)
    for lengths in PROMPTS:
        tokens = sum(lengths)
        inputs = inputs_of(kind, tokens)
        state = state_of(layer, len(lengths))
        plan = backend.plan(batch_of(lengths, torch.arange(len(lengths), device="cuda").int(), known=False))
        ours = partial(backend.forward, layer, inputs, state, plan)
        want = ours().float()
        libraries = library_prefills(kind, inputs, lengths)
        time = median(ours)
        others = {name: median(call) for name, call in libraries.items() if agrees(name, call, want)}
        like = inputs["v" if "v" in inputs else "x"]
        operations = prefill_operations(kind, tokens)
        least = {
            "copying": (sum(value.nbytes for value in inputs.values()) + like.nbytes) / limits.copying,
            "products": operations / limits.products,
            "exponentials": prefill_exponentials(kind, tokens) / limits.exponentials,
        }
        bound = max(least, key=least.__getitem__)
        print(
            f"{kind:12} prefill {len(lengths):3} x {lengths[0]:5}: {time:8.1f} us, {least[bound] / time:4.0%} of the "
            f"limit, {least[bound]:.1f} us for {bound}; {operations / time / 1e6:5.0f} TFLOP/s" + said(time, others),
            flush=True,
        )
        figures.append(
            {"kind": kind, "prefill": lengths, "us": time, "limits": least, "share": least[bound] / time}
            | {"others": others}
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--kind", action="append", choices=sorted(FACTS))
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    require_gpus()
    torch.manual_seed(0)
    limits = Limits.measured()
    print(
        f"{torch.cuda.get_device_name()}: copying at {limits.copying / 1e6:.2f} TB/s, products at "
        f"{limits.products / 1e6:.0f} TFLOP/s, {limits.exponentials / 1e6:.2f} exponentials a picosecond"
    )
    figures: list[dict[str, Any]] = []
    for measure in (decode, prefill):
        for kind in arguments.kind or FACTS:
            if arguments.only in (None, measure.__name__):
                figures += measure(arguments.backend, kind, limits)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
