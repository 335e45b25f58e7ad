"""One sampling step on a CPU: ours against transformers' processors and multinomial, with the same parameters.

    OMP_NUM_THREADS=2 python benchmarks/sampling_cpu.py [--rows 16] [--vocab-size 32000] [--rounds 50]
    OMP_NUM_THREADS=1 python benchmarks/sampling_cpu.py --cpu-time       # on a machine that others use

Temperature, top-k, top-p, min-p, repetition and presence penalties, for rows with histories of 512 tokens, half of them
output. Ours is what the runner does from logits to tokens: the pipeline of processors, the parameters packed, the draw,
the look at unusable logits. Theirs is what `generate` does: a `LogitsProcessorList`, softmax and multinomial; it has no
presence penalty, so that one is a processor of a few lines here. Both take turns; medians, and what ours is made of.
With `--cpu-time` the seconds are those that the thread had a core, so with one thread others do not count.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import numpy as np
import torch
import transformers
from command_line import positive
from transformers.generation import logits_process as hf

from slotline.core import SamplingParams
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.sampling_metadata import SamplingMetadata
from slotline.core.device.cpu_ops import CpuOps
from slotline.core.sampling.logits_processors import ProcessorPipeline, ProcessorSlot
from slotline.core.sampling.sampler import sample_checked
from slotline.registry.contracts import LogitsProcessorContext
from slotline.registry.loading import resolve_factory

SHORT = "--rows 2 --vocab-size 500 --rounds 2"
Clock = Callable[[], float]
PROMPT, OUTPUT = 256, 256
PARAMS: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
}


class PresencePenalty(hf.LogitsProcessor):  # type: ignore[misc]
    """What transformers lacks, in its way: the scores of the tokens in the output are lowered."""

    def __init__(self, penalty: float, prompt_length: int) -> None:
        self.penalty, self.prompt_length = penalty, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = input_ids[:, self.prompt_length :]
        return scores.scatter(1, output, scores.gather(1, output) - self.penalty)


class Ours:
    """The runner's part from logits to tokens, with the processors of every run."""

    def __init__(self, history: torch.Tensor, vocab_size: int, params: SamplingParams, clock: Clock) -> None:
        self.clock, self.ops = clock, CpuOps()
        num_rows, length = history.shape
        self.rows = RequestTable(num_rows, length + 8)
        slots = []
        for point in entry_points(group="slotline.logits_processor"):
            descriptor = point.load()
            if descriptor.capabilities.default:
                context = LogitsProcessorContext(
                    contract=1,
                    vocab_size=vocab_size,
                    eos_token_ids=(2,),
                    max_requests=num_rows,
                    max_model_len=length + 8,
                    device="cpu",
                )
                slots.append(
                    ProcessorSlot(
                        name=descriptor.name,
                        processor=resolve_factory(descriptor)(context),
                        capabilities=descriptor.capabilities,
                        active=np.zeros(num_rows, bool),
                    )
                )
        self.pipeline = ProcessorPipeline(slots, self.rows, frozenset())
        for row, tokens in enumerate(history.tolist()):
            request = Request(request_id=str(row), prompt_token_ids=tokens[:PROMPT], params=params)
            self.rows.admit(request, row)
            self.pipeline.admit(request)
            for token in tokens[PROMPT:]:
                self.rows.append(np.array([row]), np.array([token], np.int32))
        self.which = np.arange(num_rows)
        self.seconds: dict[str, list[float]] = {}

    def step(self, logits: torch.Tensor) -> torch.Tensor:
        """Tokens [num_rows] of logits [num_rows, vocab_size]."""
        start = self.clock()
        batch = SamplingMetadata.gather(self.rows, self.which)
        params = torch.from_numpy(batch.packed())
        start = self._lap("parameters", start)
        processed = self.pipeline.apply(logits, self.which, all_greedy=batch.all_greedy)
        start = self._lap("processors", start)
        tokens = sample_checked(processed.logits, batch, params, self.ops).tokens
        start = self._lap("draw", start)
        marked = processed.mark(tokens, self.ops)
        self._lap("check", start)
        return marked

    def _lap(self, name: str, start: float) -> float:
        now = self.clock()
        self.seconds.setdefault(name, []).append(now - start)
        return now


def theirs(history: torch.Tensor, params: SamplingParams) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step of `generate` with do_sample=True, the processors in its order."""
    processors = hf.LogitsProcessorList(
        [
            hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
            PresencePenalty(params.presence_penalty, PROMPT),
            hf.TemperatureLogitsWarper(params.temperature),
            hf.TopKLogitsWarper(params.top_k),
            hf.TopPLogitsWarper(params.top_p),
            hf.MinPLogitsWarper(params.min_p),
        ]
    )

    def step(logits: torch.Tensor) -> torch.Tensor:
        weights = processors(history, logits).softmax(dim=-1)
        return torch.multinomial(weights, num_samples=1).squeeze(1)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=positive, default=16)
    parser.add_argument("--vocab-size", type=positive, default=32_000)
    parser.add_argument("--rounds", type=positive, default=50)
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args()
    clock = time.thread_time if given.cpu_time else time.perf_counter
    torch.manual_seed(0)
    history = torch.randint(given.vocab_size, (given.rows, PROMPT + OUTPUT))
    ranks = torch.stack([torch.randperm(given.vocab_size) for _ in range(given.rows)])
    logits = -2 * torch.log1p(ranks.float()) + 0.3 * torch.randn(given.rows, given.vocab_size)  # like a model's
    params = SamplingParams(**PARAMS)
    ours = Ours(history, given.vocab_size, params, clock)
    steps = {"slotline": ours.step, "transformers": theirs(history, params)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with torch.inference_mode():
        for _ in range(5):
            for step in steps.values():
                step(logits)
        ours.seconds.clear()
        for _ in range(given.rounds):
            for name, step in steps.items():
                start = clock()
                step(logits)
                seconds[name].append(clock() - start)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} threads; {given.rows} rows of {given.vocab_size:,} logits, {PARAMS}"
    )
    medians = {name: 1000 * statistics.median(values) for name, values in seconds.items()}
    for name, milliseconds in medians.items():
        print(f"{name:14}{milliseconds:8.2f} ms   best {1000 * min(seconds[name]):.2f} ms")
    parts = ", ".join(f"{name} {1000 * statistics.median(values):.2f}" for name, values in ours.seconds.items())
    print(f"transformers / slotline: {medians['transformers'] / medians['slotline']:.2f}; ours in ms: {parts}")


if __name__ == "__main__":
    main()
