"""Sampling alone on a GPU: our kernels, the same arithmetic in torch, and FlashInfer's sampler where it is installed.

    python benchmarks/sampling_gpu.py [--vocab-size 128256] [--rows 256 64 1] [--json out.json]

Logits are float32 and given (processors ran before). `peaked` rows are like a language model's: weights fall with the
square of the rank, ranks shuffled over the vocabulary; `flat` rows are normal with a standard deviation of 1, where a
nucleus is half the vocabulary. Times are medians of calls one after another, by events on the device, over two sets of
logits in turn. FlashInfer's softmax is part of its time; the upload of our parameters, 32 bytes a row, not of ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from slotline.core.sampling.sampler import SamplingBatch, sample
from slotline.core.sampling.torch_sampling import sample_torch

CASES: dict[str, dict[str, float]] = {
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
}


def batch(n: int, *, temperature: float = 0.8, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    return SamplingBatch(
        rows=np.arange(n),
        positions=np.arange(n),
        temperature=np.full(n, temperature, np.float32),
        top_k=np.full(n, int(top_k), np.int64),
        top_p=np.full(n, top_p, np.float32),
        min_p=np.full(n, min_p, np.float32),
        seed=np.arange(n, dtype=np.uint64),
    )


def logits_of(kind: str, n: int, vocab_size: int) -> torch.Tensor:
    if kind == "flat":
        return torch.randn(n, vocab_size, device="cuda")
    ranks = torch.stack([torch.randperm(vocab_size, device="cuda") for _ in range(n)])
    return -2 * torch.log1p(ranks.float()) + 0.3 * torch.randn(n, vocab_size, device="cuda")


def median(work: Callable[[int], Any], rounds: int) -> float:
    """Median microseconds of a call, from the start of one to the start of the next on the device."""
    for index in range(3):
        work(index)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # so that the device never waits for the host
    for index in range(rounds):
        events[index].record()
        work(index)
    events[rounds].record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    return 1e3 * times[rounds // 2]


def flashinfer_call(case: str, sets: list[torch.Tensor]) -> Callable[[int], Any] | None:
    """FlashInfer's calls for the same parameters, as its documentation chains them."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    from flashinfer import sampling

    n = len(sets[0])
    temperature = torch.full((n,), 0.8, device="cuda")
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "temperature": lambda x: sampling.sampling_from_probs(sampling.softmax(x, temperature)),
        "top-k 50, top-p 0.9": lambda x: sampling.top_k_top_p_sampling_from_probs(
            sampling.softmax(x, temperature), 50, 0.9
        ),
        "top-p 0.9": lambda x: sampling.top_p_sampling_from_probs(sampling.softmax(x, temperature), 0.9),
        "min-p 0.05": lambda x: sampling.min_p_sampling_from_probs(sampling.softmax(x, temperature), 0.05),
    }
    call = calls.get(case)
    return None if call is None else lambda index: call(sets[index % 2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=128_256)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 64, 1])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, {arguments.vocab_size} tokens; microseconds")
    print(f"{'':38}{'ours':>9}{'torch':>9}{'FlashInfer':>12}{'of FlashInfer':>15}")
    figures = []
    for n in arguments.rows:
        for kind in ("peaked", "flat"):
            sets = [logits_of(kind, n, arguments.vocab_size) for _ in range(2)]
            for case, values in CASES.items():
                rows = batch(n, **values)
                params = None if rows.all_greedy else torch.from_numpy(rows.packed()).cuda()
                ours = median(lambda i: sample(sets[i % 2], rows, params), 30)  # noqa: B023
                theirs = None if params is None else median(lambda i: sample_torch(sets[i % 2], rows, params), 3)  # noqa: B023
                library = flashinfer_call(case, sets)
                other = None if library is None else median(library, 30)
                figures.append(
                    {"rows": n, "logits": kind, "case": case, "ours": ours, "torch": theirs, "flashinfer": other}
                )
                ratio = f"{ours / other:15.2f}" if other else ""
                print(
                    f"{n:4} rows, {kind:6}  {case:20}{ours:9.1f}{theirs or 0:9.1f}{other or 0:12.1f}{ratio}", flush=True
                )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
