"""What structured output costs on a GPU, and with a vocabulary of the usual size.

    python benchmarks/structured_gpu.py benchmarks/models/qwen3-0.6b --tokenizer FOLDER [--requests 64] [--tokens 96]
        [--constraint json regex choice grammar structural_tag] [--temperature 0]

The model has the form of the folder's configuration and random weights: its texts mean nothing and follow the schema.
Requests with a constraint and without one run in turn on one engine, with other prompts in each run; the figure is the
time from one step to the next while all of them decode, median and mean of all steps of three runs each, and the host's
time in the step's parts from a run more, of which `wait` is what the device is waited for. Sampled texts
(`--temperature 1`) walk through more states than greedy ones. Masks and compiling are those of
benchmarks/structured_cpu.py with this tokenizer. `--train` first makes a tokenizer of 128,000 tokens from the Python
files that this interpreter finds, for where there is none at hand.
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

from command_line import at_least, positive, require_gpus
from step_gpu import random_llm
from structured_cpu import ORDER, PLUGINS, compiling, masks, step_seconds

from slotline.core import SamplingParams, StructuredOutputsParams
from slotline.registry.contracts import StructuredOutputContext
from slotline.testing.subject import subject_of
from slotline.text.tokenizer import Tokenizer

WORDS = ["as", "it", "was", "here", "there,", "but", "somewhere", "else", "by", "now;", "we", "look", "for", "others"]
CONSTRAINTS: dict[str, Any] = {
    "json": ORDER,
    "regex": r"(\[[A-C]\d{3}\] (ok|late);)+",
    "choice": [f"item {number}: {' '.join(Random(number).choices(WORDS, k=160))}" for number in range(24)],
    "grammar": 'root ::= item ("," item)*\nitem ::= name ":" (list | [0-9]{1,9} | "-")\n'
    'list ::= "[" item ("," item)* "]"\nname ::= [a-z]{1,20}',
    "structural_tag": {"structures": [{"begin": "<call>", "schema": ORDER, "end": "</call>"}], "triggers": ["<call>"]},
}
SHORT = "benchmarks/models/llama-tiny --tokenizer core/slotline/core/small_model --requests 2 --tokens 8"
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
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        max_token_length=128,  # llguidance takes none of more than 256 bytes
        show_progress=False,
    )
    raw.train_from_iterator(texts(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|endoftext|>").save_pretrained(folder)


def decode(name: str, arguments: argparse.Namespace) -> None:
    """Decode steps without a constraint, and with one of each kind."""
    folder, tokenizer, requests = arguments.model, arguments.tokenizer, arguments.requests
    settings = {"structured_output.backend": name, "tokenizer": str(tokenizer), "observability.progress": False}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name_of_copy:  # its end-of-sequence token must be one of the tokenizer's
        config["eos_token_id"] = Tokenizer(tokenizer).transformers.eos_token_id
        (Path(name_of_copy) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        overrides = [f"graphs.sizes=[{requests}]", *arguments.settings]  # the one that is measured
        folder = Path(name_of_copy)
        llm = random_llm(folder, max_model_len=1024, max_num_seqs=requests, overrides=overrides, **settings)
    common: dict[str, Any] = {"max_tokens": arguments.tokens, "ignore_eos": True, "detokenize": False}
    common["temperature"] = arguments.temperature
    free = [SamplingParams(**common)] * requests
    for kind in arguments.constraint:
        wanted = StructuredOutputsParams(**{kind: CONSTRAINTS[kind]})
        compare(llm, kind, free, [SamplingParams(**common, structured_outputs=wanted)] * requests)


def compare(llm: Any, kind: str, free: list[SamplingParams], bound: list[SamplingParams]) -> None:
    """Time both in turn, and print the host's parts of each."""
    found: dict[str, list[float]] = {"free": [], "bound": []}
    for run in range(4):
        for what, params in (("free", free), ("bound", bound)):
            times = step_seconds(llm, params, Random(run))
            found[what] += times if run else []  # the first run warms up
    if not found["bound"]:
        print(f"  {len(free)} requests, {kind}: all texts ended at once", flush=True)
        return
    print(f"  {len(free)} requests, {kind}: a decode step", end="")
    for name, average in (("median", statistics.median), ("mean", statistics.mean)):
        plain, bound_us = (1e6 * average(found[what]) for what in ("free", "bound"))
        more = 100 * (bound_us / plain - 1)
        print(f" {plain:.0f} us without, {bound_us:.0f} us with, {more:+.1f} % ({name});", end="")
    print(f" {len(found['bound'])} steps", flush=True)
    profiler = llm.engine.profiler
    for what, params in (("without", free), ("with", bound)):
        profiler.reset()
        profiler.enable()
        step_seconds(llm, params, Random(0))
        profiler.disable()
        steps = profiler.counts["wait"]  # once a step
        parts = ", ".join(f"{part} {1e6 * spent / steps:.0f}" for part, spent in profiler.seconds.items())
        print(f"  host, us a step {what}: {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--train", action="store_true", help="make the tokenizer first")
    parser.add_argument("--requests", type=positive, default=64)
    parser.add_argument("--tokens", type=at_least(8), default=96)
    parser.add_argument("--plugins", nargs="+", default=PLUGINS)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--constraint", nargs="+", choices=CONSTRAINTS, default=["json"])
    parser.add_argument("--decode-only", action="store_true", help="no masks and no compiling alone")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    require_gpus()
    if arguments.train:
        train(arguments.tokenizer)
    tokenizer = Tokenizer(arguments.tokenizer).transformers
    for name in arguments.plugins:
        start = perf_counter()
        print(f"{name}:", flush=True)
        if not arguments.decode_only:
            backend = subject_of(f"structured_output:{name}").build(
                StructuredOutputContext(
                    contract=1,
                    tokenizer=tokenizer,
                    vocab_size=len(tokenizer),
                    eos_token_ids=(tokenizer.eos_token_id,),
                    max_requests=arguments.requests,
                )
            )
            print(f"  built for {len(tokenizer)} tokens in {perf_counter() - start:.2f} s", flush=True)
            masks(backend, tokenizer, arguments.requests)
            compiling(backend, tokenizer)
        decode(name, arguments)
        print(f"  {perf_counter() - start:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
