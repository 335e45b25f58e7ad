"""A layer's products on Hopper, and a head's, with the kernel in CUDA C++ and without it.

    python benchmarks/products_gpu.py [--rows 64 128 192 256] [--hidden 4096 --inner 14336 --qkv 6144 --vocab 128256]
        [--json FILE]

The layer is one without its attention: the output projection, the norm behind it, gate and up with their activation,
down, its norm, queries, keys and values, as the passes call them; eight layers of random bfloat16 weights in a graph,
so that no weight is in a cache. The head gives float32 logits. Both forms are replayed in turn for some tenths of a
second each, as an engine keeps the card busy, and the medians of three turns are printed, microseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from command_line import positive, require_gpus
from result_file import write_result

from slotline.kernels.nvrtc import has_cuda_sources
from slotline.plugins.model_families.passes.fused_kernels import TritonKernels, triton_kernels_for
from slotline.plugins.model_families.passes.kernels import NormWeight

SHORT = "--rows 64 --hidden 1024 --inner 1024 --qkv 1024 --vocab 1024"
LAYERS, TURNS, SECONDS = 8, 3, 0.2


class Weights(NamedTuple):
    """Of a layer without attention."""

    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv: torch.Tensor


def random_weight(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, device="cuda", dtype=torch.bfloat16).mul_(k**-0.5)


def layer(kernels: TritonKernels, weights: Weights, norm: NormWeight, attended: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values of the next layer."""
    parts = kernels.linear_parts(attended, weights.out, None)
    residual, states = kernels.add_rms_norm(parts, attended, None, norm)
    parts = kernels.linear_parts(kernels.gated_linear(states, weights.gate_up, None, "silu"), weights.down, None)
    return kernels.linear(kernels.add_rms_norm(parts, residual, None, norm)[1], weights.qkv, None)


def graph_of(calls: list[Callable[[], torch.Tensor]]) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def in_turn(forms: dict[str, list[Callable[[], torch.Tensor]]]) -> dict[str, float]:
    """Microseconds of one of a form's calls."""
    graphs = {name: graph_of(calls) for name, calls in forms.items()}
    found = {name: list[float]() for name in forms}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            one = sustained(graph, 3)
            found[name].append(sustained(graph, max(3, int(SECONDS * 1000 / one))) * 1000 / len(forms[name]))
    return {name: median(times) for name, times in found.items()}


def sustained(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Milliseconds of a replay."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) / replays)


def report(name: str, rows: int, found: dict[str, float]) -> list[str]:
    """Print one line. Return it as the row of a result file."""
    without, with_it = found["without"], found["with"]
    print(f"{name:6} {rows:4} rows: {without:7.1f} without, {with_it:7.1f} with it ({with_it / without - 1:+.1%})")
    return [f"{name}, {rows} rows", f"{without:.1f}", f"{with_it:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=positive, nargs="+", default=[40, 64, 128, 144, 176, 192, 224, 256])
    for name, size in {"hidden": 4096, "inner": 14336, "qkv": 6144, "vocab": 128256}.items():
        parser.add_argument(f"--{name}", type=positive, default=size)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a result file")
    given = parser.parse_args()
    require_gpus()
    kernels = {"without": triton_kernels_for("cuda:0"), "with": triton_kernels_for("cuda:0")}
    if kernels["with"]._cluster is None or not has_cuda_sources():
        raise SystemExit("this is no Hopper GPU, or CUDA C++ cannot be compiled for it (a warning says why)")
    kernels["without"]._cluster = None
    both = kernels.items()
    norm = NormWeight(torch.ones(given.hidden, device="cuda", dtype=torch.bfloat16), 1e-5, 0.0)
    shapes = ((given.hidden,) * 2, (2 * given.inner, given.hidden), (given.hidden, given.inner))
    weights = [
        Weights(*(random_weight(*shape) for shape in (*shapes, (given.qkv, given.hidden)))) for _ in range(LAYERS)
    ]
    heads = [random_weight(given.vocab, given.hidden) for _ in range(2)]
    print(torch.cuda.get_device_name())
    lines = []
    for rows in given.rows:
        x = torch.randn(rows, given.hidden, device="cuda", dtype=torch.bfloat16)
        times = in_turn({name: [partial(layer, k, w, norm, x) for w in weights] for name, k in both})
        lines.append(report("layer", rows, times))
        times = in_turn({name: [partial(k.project, x, w) for w in heads] for name, k in both})
        lines.append(report("head", rows, times))
    if given.json:
        columns = ["products", "without the kernel, us", "with it, us"]
        write_result(given.json, "products_gpu", columns, lines, note=f"Medians of {TURNS} turns, bfloat16.")


if __name__ == "__main__":
    main()
