"""Host cost of a decode step: everything but the model's and the sampler's arithmetic, and where the time goes.

    python benchmarks/host_step.py [--requests 256] [--steps 300] [--json FILE]

The engine is the real one: scheduler, block pool with prefix caching, rows, gather, hand-out. Only the arithmetic is
left out: the model returns zeros, and logits of one token, whose largest is found at once. So what is timed is the
host's work alone; a second run with the engine's profiler, which costs time of its own, says where it goes.
Detokenisation is off, as in the throughput workloads; `--detokenize` streams every request's text as well.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from command_line import positive
from result_file import write_result

from slotline.core import SamplingParams
from slotline.core.batch.request_table import RequestTable
from slotline.core.device.cpu_ops import CpuOps
from slotline.core.device.transfer_buffer import CpuTransferBuffer
from slotline.core.engine.engine import Engine
from slotline.core.kv_cache.block_pool import BlockPool
from slotline.core.kv_cache.block_table import HostTables
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.core.kv_cache.kv_cache_manager import KVCacheManager
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher, AttentionGroup
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.core.model_runner.step_profiler import StepProfiler
from slotline.core.sampling.logits_processors import ProcessorPipeline
from slotline.core.scheduler.admission import EngineLimits
from slotline.core.scheduler.scheduler import Scheduler

SHORT = "--requests 2 --steps 5"
VOCAB_SIZE, HIDDEN_SIZE, BLOCK_SIZE, MAX_MODEL_LEN, LONGEST_PROMPT = 32_000, 8, 16, 4096, 300


class Blocks:
    """A cache spec that stores nothing: one block per 16 tokens."""

    def blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // BLOCK_SIZE)

    def max_blocks_held(self) -> int:
        return self.blocks_needed(MAX_MODEL_LEN)

    def blocks_freeable(self, num_computed_tokens: int) -> int:
        return 0

    def prefix_hit(self, hashes: Any, lookup: Any) -> list[int]:
        return []


class NoModel:
    """Returns zeros."""

    facts: Any = None
    notes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._logits = torch.zeros(1, 1)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Any, wanted: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids) if wanted is None else len(wanted), HIDDEN_SIZE)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._logits.expand(hidden_states.shape[0], -1)

    def reload_weights(self, path: Path | None = None) -> None:
        """No weights."""


class NoAttention:
    """Plans nothing."""

    def plan(self, batch: Any) -> None:
        return None

    def write(self, *_: Any) -> None:
        return None

    def forward(self, *_: Any) -> None:
        return None


def build(num_requests: int, steps: int, engine_class: type[Engine] = Engine) -> Engine:
    """A real engine around no arithmetic, with room for requests that `measure` makes for so many steps."""
    rows = RequestTable(num_requests, MAX_MODEL_LEN)
    group = CacheGroup(0, Blocks(), BLOCK_SIZE, BLOCK_SIZE, num_requests, MAX_MODEL_LEN)  # type: ignore[arg-type]
    each = group.spec.blocks_needed(LONGEST_PROMPT + tokens_given(steps)) + 1
    cache = KVCacheManager(BlockPool(1 + num_requests * each), [group], prefix_caching=True)
    staging, profiler = CpuTransferBuffer(), StepProfiler(enabled=False)
    pipeline = ProcessorPipeline([], rows, frozenset())
    router = AttentionDispatcher(
        [AttentionGroup(name="full", backend=NoAttention(), writes_cache=True, batch=0, layers=())], {}
    )
    gatherer = InputPreparer(rows, [group], [BLOCK_SIZE], staging, HostTables([group], [BLOCK_SIZE]), 8192)
    return engine_class(
        plan=None,  # type: ignore[arg-type]
        rows=rows,
        scheduler=Scheduler(rows, cache, max_batched_tokens=8192),
        gatherer=gatherer,
        runner=ModelRunner(
            NoModel(),  # type: ignore[arg-type]
            router,
            rows,
            pipeline,
            staging,
            profiler,
            mark=gatherer.assembler.mark,
            ops=CpuOps(),
        ),
        pipeline=pipeline,
        profiler=profiler,
        limits=EngineLimits(
            max_model_len=MAX_MODEL_LEN,
            max_batched_tokens=8192,
            max_logprobs=0,
            vocab_size=VOCAB_SIZE,
            chunked_prefill=True,
            priorities=False,
        ),
        eos_token_ids=(2,),
        tokenizer=_tokenizer(),
    )


def _tokenizer() -> Any:
    """The shipped model's tokenizer, for `--detokenize`."""
    from slotline.text.tokenizer import Tokenizer

    return Tokenizer(Path(__file__).parent.parent / "core" / "slotline" / "core" / "small_model")


def tokens_given(steps: int) -> int:
    """To each request: those of the timed steps, of as many that are profiled, and of some before them."""
    return 2 * steps + 50


def measure(
    engine: Engine, num_requests: int, steps: int, *, detokenize: bool, tokens: int | None = None
) -> list[float]:
    """Seconds of each decode step; as many again are profiled. Each request gets `tokens`, by default as many."""
    rng = np.random.default_rng(0)
    params = SamplingParams(
        temperature=0, max_tokens=tokens or tokens_given(steps), ignore_eos=True, detokenize=detokenize
    )
    for i in range(num_requests):
        prompt = rng.integers(3, 4000, int(rng.integers(20, LONGEST_PROMPT))).tolist()
        engine.add(str(i), prompt, params, stream=detokenize)
    while engine.scheduler.num_waiting or any(r.row < 0 for r in engine.scheduler.running):
        engine.step()
    for _ in range(20):
        engine.step()
    times = []
    for _ in range(steps):
        start = perf_counter()
        engine.step()
        times.append(perf_counter() - start)
    engine.profiler.enable()
    for _ in range(steps):
        engine.step()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=positive, default=256)
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--detokenize", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a result file")
    arguments = parser.parse_args()
    engine = build(arguments.requests, arguments.steps)
    times = measure(engine, arguments.requests, arguments.steps, detokenize=arguments.detokenize)
    print(f"{arguments.requests} decoding requests, {arguments.steps} steps, {torch.get_num_threads()} threads")
    print(
        f"host cost of a step: median {statistics.median(times) * 1e3:.3f} ms,"
        f" p90 {np.quantile(times, 0.9) * 1e3:.3f} ms"
    )
    if arguments.json:
        figures = {"median": statistics.median(times), "90th percentile": float(np.quantile(times, 0.9))}
        rows = [[f"host cost of a step, {name}", f"{1e3 * seconds:.3f}"] for name, seconds in figures.items()]
        columns = [f"{arguments.requests} decoding requests", "ms a step"]
        write_result(arguments.json, "host_step", columns, rows, note=f"{arguments.steps} steps.")
    print(f"{'part':<12}{'mean ms':>10}  (profiled)")
    for name, seconds in sorted(engine.profiler.seconds.items(), key=lambda item: -item[1]):
        print(f"{name:<12}{seconds / arguments.steps * 1e3:>10.3f}")


if __name__ == "__main__":
    main()
