"""What structured output costs on the host: masks, compiling, and its share of a decode step.

    OMP_NUM_THREADS=1 python benchmarks/structured_cpu.py [--requests 64] [--tokenizer FOLDER] [--masks-only]

Masks: as many requests as asked for, each somewhere in a JSON document of its own; microseconds of one call that fills
all of them, by request, median of all steps, the same for the tokens that follow, and both for all requests.
Compiling: a schema of about 1,000 lines, until its first mask.
The step: an engine on the small model that ships, runs with and without the schema in turn; the time from one step to
the next while all requests decode, quartiles of all steps, and the parts of the steps that have the schema. A tokenizer
of another model changes the first two figures alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from command_line import at_least, positive

from slotline.core import LLM, SamplingParams, StructuredOutputsParams
from slotline.core.device.cpu import CpuDevice
from slotline.planner.plan import SMALL_MODEL
from slotline.plugins.structured_output.bitmask import TokenBitmask
from slotline.registry.contracts import Constraint, StructuredOutputContext
from slotline.testing.subject import subject_of
from slotline.text.tokenizer import Tokenizer

SHORT = "--requests 2 --tokens 8"
PLUGINS = ("xgrammar", "llguidance")
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "quantity": {"type": "integer"},
        "price": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "state": {"enum": ["new", "paid", "sent", "returned"]},
    },
    "required": ["name", "quantity", "price", "tags", "state"],
    "additionalProperties": False,
}


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=positive, default=64)
    parser.add_argument("--tokens", type=at_least(8), default=48)
    parser.add_argument("--tokenizer", type=Path, default=SMALL_MODEL)
    parser.add_argument("--plugins", nargs="+", default=PLUGINS)
    parser.add_argument("--short-strings", action="store_true", help="masks of a schema with a maxLength of 12")
    parser.add_argument("--masks-only", action="store_true", help="no compiling and no engine's steps")
    arguments = parser.parse_args()
    tokenizer = Tokenizer(arguments.tokenizer).transformers
    print(f"{arguments.requests} requests, {len(tokenizer)} tokens, {torch.get_num_threads()} torch threads")
    for name in arguments.plugins:
        start = time.perf_counter()
        backend = subject_of(f"structured_output:{name}").build(
            StructuredOutputContext(
                contract=1,
                tokenizer=tokenizer,
                vocab_size=len(tokenizer),
                eos_token_ids=(tokenizer.eos_token_id,),
                max_requests=arguments.requests,
            )
        )
        print(f"{name} {version(name)}: built in {time.perf_counter() - start:.2f} s")
        masks(backend, tokenizer, arguments.requests, short=arguments.short_strings)
        if not arguments.masks_only:
            compiling(backend, tokenizer)
            step(name, arguments.requests, arguments.tokens)


def masks(backend: Any, tokenizer: Any, requests: int, *, short: bool = False) -> None:
    """Fill the masks of all requests, token by token; the first run warms up. `short`: their texts are a string with a
    `maxLength` and a number."""
    grammar = backend.compile(Constraint("json", json.dumps(PERSON if short else ORDER)))
    make = person if short else document
    texts = [tokenizer.encode(make(Random(i)), add_special_tokens=False) for i in range(requests)]
    filling, accepting, device = [], [], CpuDevice()
    for run in range(5):
        states = [backend.start(grammar) for _ in range(requests)]
        for place in range(min(map(len, texts)) - 1):
            start = time.perf_counter()
            bitmask = TokenBitmask(requests, len(tokenizer), device)
            bitmask.allow_all(requests)
            backend.fill(states, [[]] * requests, list(range(requests)), bitmask.words)
            filled = time.perf_counter()
            for state, text in zip(states, texts, strict=True):
                assert state.accept([text[place]]) == 1
                assert not state.finished
            if run:
                filling.append(filled - start)
                accepting.append(time.perf_counter() - filled)
    for what, seconds in (("a mask", filling), ("a token accepted", accepting)):
        each = [1e6 * second / requests for second in seconds]
        print(f"  {what:17} {statistics.median(each):7.1f} us, worst step {max(each):7.1f} us")
    both = [1e6 * (fill + accept) for fill, accept in zip(filling, accepting, strict=True)]
    low, middle, high = statistics.quantiles(both, n=4)
    mean = statistics.mean(both)
    print(f"  of all requests   {middle:7.0f} us a step, quartiles {low:.0f} and {high:.0f}, mean {mean:.0f} us")


def document(rng: Random) -> str:
    """A document of the schema."""
    word = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(20, 40)))
    values = {
        "name": word,
        "quantity": rng.randint(1, 999),
        "price": rng.random(),
        "tags": [word, "b"],
        "state": "paid",
    }
    return json.dumps(values)


def person(rng: Random) -> str:
    """A document of the schema with a short string."""
    name = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(3, 12)))
    return json.dumps({"name": name, "age": rng.randint(0, 99)})


def schema(rng: Random, depth: int = 1) -> dict[str, Any]:
    """A schema with nested objects; of about 1,000 lines at depth 1."""
    leaves: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 99_999},
        {"enum": [f"value {i}" for i in range(8)]},
        {"type": "array", "items": {"type": "number"}, "maxItems": 20},
        {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        {"type": "boolean"},
    ]
    properties = {f"field_{depth}_{i}": rng.choice(leaves) for i in range(9)}
    if depth < 3:
        properties |= {f"part_{depth}_{i}": schema(rng, depth + 1) for i in range(3)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def compiling(backend: Any, tokenizer: Any) -> None:
    """Check, compile and ask for the first mask."""
    text = json.dumps(schema(Random(0)), indent=1)
    times = [time.perf_counter()]
    backend.check(Constraint("json", text))
    times.append(time.perf_counter())
    state = backend.start(backend.compile(Constraint("json", text)))
    times.append(time.perf_counter())
    backend.fill([state], [[]], [0], np.full((1, -(-len(tokenizer) // 32)), -1, np.int32))
    times.append(time.perf_counter())
    checked, compiled, filled = (1e3 * second for second in np.diff(times))
    lines = len(text.splitlines())
    print(f"  {lines} lines: checked {checked:.1f} ms, compiled {compiled:.1f} ms, first mask {filled:.2f} ms")


def step_seconds(llm: LLM, params: list[SamplingParams], rng: Random) -> list[float]:
    """The times from one step's end to the next one's, while all requests decode."""
    most = min(100_000, llm.engine.limits.vocab_size - 1)
    for index, one in enumerate(params):
        llm.engine.add(f"r{index}", [rng.randrange(1000, most) for _ in range(32)], one)
    ends, alive = [], []
    while llm.engine.has_work:
        llm.engine.step()
        ends.append(time.perf_counter())
        alive.append(len(llm.engine.scheduler.running))
    busy = [i for i in range(1, len(ends)) if alive[i] == alive[i - 1] == len(params)]
    return [ends[i] - ends[i - 1] for i in busy[4:]]  # the first ones still hold prompts


def step(name: str, requests: int, tokens: int) -> None:
    """An engine's steps with and without a constraint."""
    settings: dict[str, Any] = {
        "observability.profile": True,
        "observability.progress": False,
        "max_num_seqs": requests,
        "device": "cpu",
    }
    llm = LLM(**{"structured_output.backend": name, "max_model_len": 256, **settings})
    found: dict[str, list[float]] = {"free": [], "bound": []}
    for run in range(5):
        for what, wanted in (("free", None), ("bound", StructuredOutputsParams(json=ORDER))):
            params = [
                SamplingParams(temperature=1, seed=i, max_tokens=tokens, min_tokens=tokens, structured_outputs=wanted)
                for i in range(requests)
            ]
            llm.engine.profiler.reset()
            times = step_seconds(llm, params, Random(0))
            found[what] += times if run else []  # the first run warms up
    for place, quartile in enumerate(("first quartile", "median", "third quartile")):
        free, bound = (1e6 * statistics.quantiles(found[what], n=4)[place] for what in ("free", "bound"))
        more = 100 * (bound / free - 1)
        print(f"  a step, {quartile:14} {free:6.0f} us, with a constraint {bound:6.0f} us, {more:+.1f} %")
    seconds, steps = llm.engine.profiler.seconds, max(llm.engine.profiler.counts.values())
    print("  us a step:", ", ".join(f"{part} {1e6 * value / steps:.0f}" for part, value in seconds.items()))


if __name__ == "__main__":
    main()
