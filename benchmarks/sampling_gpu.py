"""Sampling alone on a GPU: our kernels, the same arithmetic in torch, and FlashInfer's sampler where it is installed.

    python benchmarks/sampling_gpu.py [--vocab-size 128256] [--rows 256 64 1] [--logits peaked flat]
        [--cases "top-p 0.9" ...] [--ours] [--json out.json]

Logits are float32 and given. `peaked` rows are like a language model's: weights fall with the square of the rank, ranks
shuffled over the vocabulary; `flat` rows are normal with a standard deviation of 1, where a nucleus is half the
vocabulary. Times are medians of calls one after another, by events on the device, over two sets of logits in turn.
FlashInfer's softmax is part of its time and shown apart too; the upload of our parameters, 32 bytes a row, is not.

`penalties` is everything that a step does to logits: the processor of the three penalties on histories of 1,024 prompt
and 512 output tokens, each a token longer in each call, the check of what it made, top-k, top-p and the draw;
FlashInfer beside it penalises nothing. `host` is the time that the host needs for such a call.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch
from command_line import positive, require_gpus

from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.sampling_metadata import SamplingMetadata
from slotline.core.device import TorchOps
from slotline.core.sampling.logits_processors import ProcessorPipeline, ProcessorSlot
from slotline.core.sampling.sampler import sample_checked
from slotline.registry import PluginRegistry
from slotline.registry.contracts import DeviceOps, LogitsProcessorContext
from slotline.registry.devices import Devices
from slotline.testing.subject import subject_of

SHORT = "--vocab-size 4096 --rows 4 --ours"
BOTH = "top-k 50, top-p 0.9"
PENALTIES = f"{BOTH}, penalties"
CASES: dict[str, dict[str, float]] = {
    BOTH: {"top_k": 50, "top_p": 0.9},
    PENALTIES: {"top_k": 50, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
}
PROMPT, OUTPUT = 1024, 512
ROUNDS = 30


def batch(n: int, *, temperature: float = 0.8, top_k: float = 0, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    return SamplingMetadata(
        rows=np.arange(n),
        positions=np.arange(n),
        temperature=np.full(n, temperature, np.float32),
        top_k=np.full(n, int(top_k), np.int64),
        top_p=np.full(n, top_p, np.float32),
        log_floor=np.full(n, np.log(min_p) if min_p else -np.inf, np.float32),
        seed=np.arange(n, dtype=np.uint64),
    )


def logits_of(kind: str, n: int, vocab_size: int) -> torch.Tensor:
    if kind == "flat":
        return torch.randn(n, vocab_size, device="cuda")
    ranks = torch.stack([torch.randperm(vocab_size, device="cuda") for _ in range(n)])
    return -2 * torch.log1p(ranks.float()) + 0.3 * torch.randn(n, vocab_size, device="cuda")


class Penalised:
    """The part of a step behind the logits, for requests with all three penalties."""

    def __init__(self, n: int, vocab_size: int, rows: Any, params: torch.Tensor | None, ops: DeviceOps) -> None:
        self._ops = ops
        self._rows, self._batch, self._params = RequestTable(n, PROMPT + OUTPUT + 1024), rows, params
        self._rows.token_ids[:] = np.random.default_rng(0).zipf(1.2, self._rows.token_ids.shape) % vocab_size
        self._rows.num_prompt_tokens[:], self._rows.num_tokens[:] = PROMPT, PROMPT + OUTPUT
        subject = subject_of("logits_processor:penalties")
        context = LogitsProcessorContext(
            contract=1,
            vocab_size=vocab_size,
            eos_token_ids=(),
            max_requests=n,
            max_model_len=self._rows.max_model_len,
            device="cuda",
        )
        processor, capabilities = subject.build(context), subject.descriptor.capabilities
        slot = ProcessorSlot(name="penalties", processor=processor, capabilities=capabilities, active=np.zeros(n, bool))
        self._pipeline = ProcessorPipeline([slot], self._rows, frozenset())
        wanted = {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
        for row in range(n):
            slot.set_active(row, processor.admit(row, wanted, self._rows.token_ids[row, :PROMPT].tolist()))

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        self._rows.num_tokens += 1
        processed = self._pipeline.apply(logits, self._batch.rows, all_greedy=False, keep_raw=False)
        drawn = sample_checked(processed.logits, self._batch, self._params, self._ops)
        return processed.mark(drawn.tokens, self._ops)


def median(work: Callable[[int], Any], rounds: int = ROUNDS) -> float:
    """Median microseconds of a call, from the start of one to the start of the next on the device."""
    for index in range(3):
        work(index)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # so that the device never waits for the host
    for index in range(rounds):
        events[index].record()
        work(index)
    events[rounds].record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    return float(1e3 * times[rounds // 2])


def on_host(work: Callable[[int], Any]) -> float:
    """Median microseconds until a call returns, the device having nothing else to do."""
    times = []
    for index in range(ROUNDS):
        torch.cuda.synchronize()
        start = perf_counter()
        work(index)
        times.append(perf_counter() - start)
    return 1e6 * sorted(times)[ROUNDS // 2]


def flashinfer_calls(n: int) -> dict[str, Callable[[torch.Tensor], Any]]:
    """FlashInfer's calls for the same parameters, chained as in its documentation; `softmax` is that alone."""
    if importlib.util.find_spec("flashinfer") is None:
        return {}
    from flashinfer import sampling

    temperature = torch.full((n,), 0.8, device="cuda")

    def both(x: torch.Tensor) -> Any:
        return sampling.top_k_top_p_sampling_from_probs(sampling.softmax(x, temperature), 50, 0.9)

    return {
        "softmax": lambda x: sampling.softmax(x, temperature),
        BOTH: both,
        PENALTIES: both,
        "temperature": lambda x: sampling.sampling_from_probs(sampling.softmax(x, temperature)),
        "top-p 0.9": lambda x: sampling.top_p_sampling_from_probs(sampling.softmax(x, temperature), 0.9),
        "min-p 0.05": lambda x: sampling.min_p_sampling_from_probs(sampling.softmax(x, temperature), 0.05),
    }


def ours(case: str, sets: list[torch.Tensor], ops: DeviceOps) -> tuple[float, float, float | None]:
    """Microseconds on the device, on the host, and of the same arithmetic in torch."""
    n, vocab_size = sets[0].shape
    rows = batch(n, **CASES[case])
    params = None if rows.all_greedy else torch.from_numpy(rows.packed()).cuda()
    if case == PENALTIES:
        step = Penalised(n, vocab_size, rows, params, ops)
        return median(lambda i: step(sets[i % 2])), on_host(lambda i: step(sets[i % 2])), None

    def work(i: int) -> Any:
        return sample_checked(sets[i % 2], rows, params, ops)

    slow = None if params is None else median(lambda i: TorchOps().sample(sets[i % 2], rows, params), 3)
    return median(work), on_host(work), slow


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=positive, default=128_256)
    parser.add_argument("--rows", type=positive, nargs="+", default=[256, 64, 1])
    parser.add_argument("--logits", nargs="+", default=["peaked", "flat"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ours", action="store_true", help="without FlashInfer, whose kernels take long to compile")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    require_gpus()
    print(f"{torch.cuda.get_device_name()}, {arguments.vocab_size} tokens; microseconds", flush=True)
    ops = Devices(PluginRegistry.discover()).named("cuda").ops
    shapes = [(n, kind) for n in arguments.rows for kind in arguments.logits]
    figures: dict[tuple[int, str, str], dict[str, Any]] = {}
    for n, kind in shapes:
        torch.manual_seed(0)
        sets = [logits_of(kind, n, arguments.vocab_size) for _ in range(2)]
        for case in arguments.cases:
            device, host, slow = ours(case, sets, ops)
            figures[n, kind, case] = {"ours": device, "host": host, "torch": slow}
            print(
                f"{n:4} rows, {kind:6}  {case:30} ours {device:8.1f}, host {host:7.1f}, torch {slow or 0:8.1f}",
                flush=True,
            )
    for n, kind in [] if arguments.ours else shapes:  # behind ours: its kernels may have to be compiled first
        torch.manual_seed(0)
        sets = [logits_of(kind, n, arguments.vocab_size) for _ in range(2)]
        for case, call in flashinfer_calls(n).items():
            other = median(lambda i: call(sets[i % 2]))  # noqa: B023
            found = figures.setdefault((n, kind, case), {})
            found["flashinfer"] = other
            ratio = f", ours is {found['ours'] / other:.2f} times that" if "ours" in found else ""
            print(f"{n:4} rows, {kind:6}  {case:30} FlashInfer {other:8.1f}{ratio}", flush=True)
    if arguments.json:
        rows = [{"rows": n, "logits": kind, "case": case, **found} for (n, kind, case), found in figures.items()]
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
