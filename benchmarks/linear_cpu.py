"""Linear layers on a CPU: torch's, transposed, MKL packed, oneDNN packed and our kernel, by shape and number of tokens.

    OMP_NUM_THREADS=2 python benchmarks/linear_cpu.py [--dtype float32] [--rounds 15]
        [--shapes 768x2048] [--tokens 1 16]

Each kernel runs over enough copies of its weight that no cache holds them, as in a decode step. The kernels take turns,
so that a busy machine hits all alike; shown is the best round, in microseconds a call, and GB/s of weight read.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence

import torch
from command_line import positive
from torch.nn import functional

from slotline.plugins.model_families.passes import dense_kernels, panel_kernels
from slotline.plugins.model_families.passes.cpu_products import has_panels
from slotline.plugins.model_families.passes.few_rows import LANES, MOST_ROWS

SHORT = "--rounds 1 --shapes 64x256 --tokens 1 64"
SHAPES = ((768, 768), (768, 256), (768, 1280), (768, 2048), (768, 4096), (2048, 768), (768, 32000))
NUM_TOKENS = (1, 4, 16, 64, 512)
WEIGHT_BYTES = 100_000_000
MAX_OUTPUT = 1 << 24

Kernel = Callable[[int], torch.Tensor]


def kernels(x: torch.Tensor, weights: list[torch.Tensor]) -> dict[str, Kernel]:
    """The ways to multiply x [num_tokens, in_features] by the i-th weight [out_features, in_features].

    oneDNN multiplies bfloat16 only on processors with AVX-512 or better.
    """
    transposed = [w.t().contiguous() for w in weights]
    ways: dict[str, Kernel] = {
        "linear": lambda i: functional.linear(x, weights[i]),
        "transposed": lambda i: torch.mm(x, transposed[i]),
    }
    if x.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = [torch.ops.mkldnn._reorder_linear_weight(w, 16) for w in weights]
        onednn = torch.ops.mkldnn._linear_pointwise.default
        ways["onednn"] = lambda i: onednn(x, packed[i], None, "none", [], "")
        if x.shape[0] <= MOST_ROWS and has_panels(x.dtype, x.shape[1]):
            at = [panel_kernels.address_of(weight) for weight in packed]
            ways["panels"] = lambda i: panel_kernels.few_rows(x, at[i], len(weights[i]), None)
    if x.dtype == torch.float32 and torch._C.has_mkl:
        tokens = x.shape[0]
        mkl_packed = [torch.ops.mkl._mkl_reorder_linear_weight(w, tokens) for w in weights]
        ways["mkl"] = lambda i: torch.ops.mkl._mkl_linear(x, mkl_packed[i], weights[i], None, tokens)
    if x.shape[0] <= MOST_ROWS and x.shape[1] % LANES == 0 and dense_kernels.runs():
        ways["numba"] = lambda i: dense_kernels.few_rows(x, weights[i], None)
    return ways


def best_times(ways: dict[str, Kernel], copies: int, rounds: int) -> dict[str, float]:
    """Seconds a call of each kernel, its best round."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, call in ways.items():
            call(0)
            start = time.perf_counter()
            for i in range(copies):
                call(i)
            best[name] = min(best[name], (time.perf_counter() - start) / copies)
    return best


def shape(text: str) -> tuple[int, int]:
    """Read a weight's shape from INxOUT."""
    sizes = text.split("x")
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not INxOUT")
    return positive(sizes[0]), positive(sizes[1])


def measure(dtype: torch.dtype, in_features: int, out_features: int, tokens: Sequence[int], rounds: int) -> None:
    """Print the rows of one shape."""
    size = in_features * out_features * dtype.itemsize
    copies = max(2, min(30, WEIGHT_BYTES // size))
    weights = [(torch.randn(out_features, in_features) * 0.02).to(dtype) for _ in range(copies)]
    for num_tokens in tokens:
        if num_tokens * out_features >= MAX_OUTPUT:
            continue
        x = torch.randn(num_tokens, in_features).to(dtype)
        found = best_times(kernels(x, weights), copies if num_tokens < 64 else min(copies, 3), rounds)
        cells = " | ".join(f"{name} {t * 1e6:.0f} ({size / t / 1e9:.1f})" for name, t in found.items())
        print(f"| {str(dtype)[6:]} | {in_features}x{out_features} | {num_tokens} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--shapes", type=shape, nargs="+", default=SHAPES, metavar="INxOUT", help="of the weights")
    parser.add_argument("--tokens", type=positive, nargs="+", default=NUM_TOKENS)
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    with torch.inference_mode():
        for name in args.dtype:
            for in_features, out_features in args.shapes:
                measure(getattr(torch, name), in_features, out_features, args.tokens, args.rounds)


if __name__ == "__main__":
    main()
