"""What structured output costs on a GPU, and with a vocabulary of the usual size.

    python benchmarks/structured_gpu.py benchmarks/models/qwen3-0.6b --tokenizer FOLDER [--requests 64] [--tokens 128]

The model has the form of the folder's configuration and random weights: its texts mean nothing and follow the schema.
Greedy requests with and without a constraint run in turn; the figure is the time from one step to the next while all of
them decode, median of all steps of three runs each, and the host's time in the step's parts from a run more. Masks and
compiling are those of benchmarks/structured_cpu.py with this tokenizer. `--train` first makes a tokenizer of 128,000
tokens from the Python files that this interpreter finds, for where there is none at hand.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from step_gpu import random_llm
from structured_cpu import ORDER, PLUGINS, compiling, masks

from slotline.core import LLM, SamplingParams, StructuredOutputsParams
from slotline.core.frontend.tokenizer import Tokenizer
from slotline.registry.contracts import StructuredOutputContext
from slotline.testing.subject import subject_of

CHARACTERS = 45_000_000


def train(folder: Path, vocab_size: int = 128_000) -> None:
    """A byte-level BPE tokenizer of Python files."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    files = sorted({file for place in sys.path if place for file in Path(place).rglob("*.py")})
    Random(0).shuffle(files)

    def texts() -> Iterator[str]:
        total = 0
        for file in files:
            text = file.read_text(encoding="utf-8", errors="ignore")[:60_000]
            total += len(text)
            yield text
            if total > CHARACTERS:
                return

    raw = Raw(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(texts(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>").save_pretrained(folder)


def step_seconds(llm: LLM, requests: int, params: SamplingParams) -> list[float]:
    """The times from one step's end to the next one's, while all requests decode."""
    generator = Random(0)
    for index in range(requests):
        llm.engine.add(f"r{index}", [generator.randrange(1000, 100_000) for _ in range(32)], params)
    ends, alive = [], []
    while llm.engine.has_work:
        llm.engine.step()
        ends.append(perf_counter())
        alive.append(len(llm.engine.scheduler.running))
    busy = [i for i in range(1, len(ends)) if alive[i] == alive[i - 1] == requests]
    return [ends[i] - ends[i - 1] for i in busy[4:]]  # the first ones still hold prompts


def decode(folder: Path, tokenizer: Path, name: str, requests: int, tokens: int) -> None:
    """Decode steps with and without a constraint."""
    settings = {"structured_output.backend": name, "tokenizer": str(tokenizer), "observability.progress": False}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name_of_copy:  # its end-of-sequence token must be one of the tokenizer's
        config["eos_token_id"] = Tokenizer(tokenizer).transformers.eos_token_id
        (Path(name_of_copy) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        llm = random_llm(Path(name_of_copy), max_model_len=1024, max_num_seqs=requests, **settings)
    common: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "min_tokens": tokens, "detokenize": False}
    free = SamplingParams(**common, ignore_eos=True)
    bound = SamplingParams(**common, structured_outputs=StructuredOutputsParams(json=ORDER))
    found: dict[str, list[float]] = {"free": [], "bound": []}
    for _ in range(4):
        for what, params in (("free", free), ("bound", bound)):
            times = step_seconds(llm, requests, params)
            found[what] = found[what] + times if found[what] else [times[0]]  # the first run warms up
    plain, with_masks = (1e6 * statistics.median(found[what][1:]) for what in ("free", "bound"))
    print(
        f"  {requests} requests: a decode step {plain:.0f} us without, {with_masks:.0f} us with a constraint, "
        f"{100 * (with_masks / plain - 1):+.1f} % ({len(found['bound']) - 1} steps)",
        flush=True,
    )
    profiler = llm.engine.profiler
    for what, params in (("without", free), ("with", bound)):
        profiler.reset()
        profiler.enabled = True
        step_seconds(llm, requests, params)
        profiler.enabled = False
        steps = max(profiler.counts.values())
        parts = ", ".join(f"{part} {1e6 * spent / steps:.0f}" for part, spent in profiler.seconds.items())
        print(f"  host, us a step {what}: {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--train", action="store_true", help="make the tokenizer first")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--plugins", nargs="+", default=PLUGINS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.tokenizer)
    tokenizer = Tokenizer(arguments.tokenizer).transformers
    for name in arguments.plugins:
        start = perf_counter()
        backend = subject_of(f"structured_output:{name}").build(
            StructuredOutputContext(
                contract=1,
                tokenizer=tokenizer,
                vocab_size=len(tokenizer),
                eos_token_ids=(tokenizer.eos_token_id,),
                max_requests=arguments.requests,
            )
        )
        print(f"{name}: built for {len(tokenizer)} tokens in {perf_counter() - start:.2f} s", flush=True)
        masks(backend, tokenizer, arguments.requests)
        compiling(backend, tokenizer)
        decode(arguments.model, arguments.tokenizer, name, arguments.requests, arguments.tokens)


if __name__ == "__main__":
    main()
