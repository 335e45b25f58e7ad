"""What each optimising pass gives on a CPU: a forward and its logits, without attention, pass after pass.

    OMP_NUM_THREADS=2 python benchmarks/passes_cpu.py [--dtype float32] [--rounds 20] [--config DIR]

Attention is a stand-in that returns the query, so that the modules around it are what is measured. One model a stage,
all with random weights; the stages take turns, so that a busy machine hits all alike. Tokens per second: median, best.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from command_line import positive
from transformers import AttentionInterface

from slotline.plugins.model_families.loops import LeanLoop
from slotline.plugins.model_families.passes.pipeline import PASSES
from slotline.plugins.model_families.passes.target import target_of
from slotline.plugins.model_families.stages import parts_of

SHORT = "--config benchmarks/models/llama-tiny --rounds 1"
DEFAULT = Path(__file__).parent / "models" / "llama-100m"
BATCHES = {"b1": (1, 1), "b16": (16, 16), "prefill": (512, 1)}
"""Number of tokens in the forward, and of rows that get logits."""

Step = Callable[[int, int], Any]


def query_back(module: Any, query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    """An attention function that returns the query, [batch, num_tokens, heads, size]."""
    return query.transpose(1, 2), None


def build(config: Path, dtype: torch.dtype) -> Any:
    AttentionInterface.register("query_back", query_back)
    settings = transformers.AutoConfig.from_pretrained(config, trust_remote_code=False)
    settings._attn_implementation = "query_back"
    return (
        transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=False)
        .eval()
        .requires_grad_(False)
    )


def step_of(model: Any, *, lean: bool) -> Step:
    """A forward of num_tokens tokens with logits for the last rows."""
    loop = LeanLoop(model, parts_of(model, "cpu", ()))

    def step(num_tokens: int, rows: int) -> Any:
        ids, positions = torch.randint(0, model.config.vocab_size, (num_tokens,)), torch.arange(num_tokens)
        if lean:
            hidden = loop(ids, positions)
        else:
            hidden = model.model(input_ids=ids[None], position_ids=positions[None], use_cache=False).last_hidden_state
        return model.lm_head(hidden[:, -rows:])

    return step


def stages(config: Path, dtype: torch.dtype) -> dict[str, Step]:
    """The step after each pass, every stage with a model of its own."""
    steps = {"transformers": step_of(build(config, dtype), lean=False)}
    for count in range(len(PASSES) + 1):
        model = build(config, dtype)
        for apply in PASSES[:count]:
            apply(model, target_of("cpu", dtype))
        name = f"+ {PASSES[count - 1].__module__.rpartition('.')[2]}" if count else "lean loop"
        steps[name] = step_of(model, lean=True)
    return steps


def measure(steps: dict[str, Step], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by stage and batch, stages in turn."""
    times: dict[str, dict[str, list[float]]] = {name: {batch: [] for batch in BATCHES} for name in steps}
    for batch, (num_tokens, rows) in BATCHES.items():
        for _ in range(max(3, rounds // (8 if num_tokens > 64 else 1))):
            for name, step in steps.items():
                start = time.perf_counter()
                step(num_tokens, rows)
                times[name][batch].append(time.perf_counter() - start)
    return times


def report(dtype: str, found: dict[str, dict[str, list[float]]]) -> None:
    """Print a row for each stage: tokens per second, median and best."""
    for name, times in found.items():
        rates = (
            f"{batch} {BATCHES[batch][0] / statistics.median(t):.0f} ({BATCHES[batch][0] / min(t):.0f})"
            for batch, t in times.items()
        )
        print(f"| {dtype} | {name} | {' | '.join(rates)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--config", type=Path, default=DEFAULT)
    args = parser.parse_args()
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, tokens/s median (best)")
    for dtype in args.dtype:
        with torch.inference_mode():
            report(dtype, measure(stages(args.config, getattr(torch, dtype)), args.rounds))


if __name__ == "__main__":
    main()
