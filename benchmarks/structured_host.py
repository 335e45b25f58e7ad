"""Host time of structured output in a decode step, with and without kept masks, in turn in one run.

    OMP_NUM_THREADS=1 python benchmarks/structured_host.py [--requests 64] [--vocabulary 151936] [--json FILE]

As many requests as asked for write texts of their own. The figures are those of `StructuredOutputs`: the masks of a
step until they lie in the memory that the device copies, and the tokens that follow. What the device does with the
masks is not in them. The figures are medians and means over all steps of `--runs` runs with texts of their own, after
a first run, when nothing is kept yet: it has a column of its own. The tokenizer is trained on the Python files that
this interpreter finds, if none is given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from attrs import frozen
from command_line import at_least, positive
from result_file import print_rows, write_result
from structured_cpu import ORDER, PERSON, PLUGINS, document, person
from structured_gpu import train

from slotline.core import SamplingParams, StructuredOutputsParams
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.core.device.cpu import CpuDevice
from slotline.core.model_runner.step_profiler import StepProfiler
from slotline.plugins.structured_output.extension import StructuredOutputs
from slotline.plugins.structured_output.grammar_compiler import GrammarCompiler
from slotline.plugins.structured_output.mask_cache import MaskCache
from slotline.plugins.structured_output.mask_table import StepMasks
from slotline.registry.attribution import BuiltPlugins
from slotline.registry.contracts import StructuredOutputContext
from slotline.testing.subject import subject_of
from slotline.text.tokenizer import Tokenizer

SHORT = "--requests 2 --runs 1 --tokenizer core/slotline/core/small_model"
NESTED: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "place": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
            "level": {"type": "integer", "minimum": 0, "maximum": 100},
            "made": {"type": "string", "format": "date"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["place", "level", "made", "note"],
        "additionalProperties": False,
    },
}


def nested(rng: Random) -> str:
    """A document of nested arrays and objects."""
    items = [
        {
            "place": [round(rng.uniform(-90, 90), 4), round(rng.uniform(-90, 90), 4)],
            "level": rng.randint(0, 100),
            "made": f"20{rng.randint(10, 26)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
            "note": None if rng.random() < 0.3 else "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(9, 30))),
        }
        for _ in range(3)
    ]
    return json.dumps(items)


def record(rng: Random) -> str:
    """A text of an expression."""
    return "".join(f"[{rng.choice('ABC')}{rng.randint(100, 999)}] {rng.choice(('ok', 'late'))};" for _ in range(8))


@frozen
class Workload:
    """Texts under a constraint."""

    wanted: dict[str, Any]
    text: Callable[[Random], str]


WORKLOADS = {
    "objects: strings, numbers, an enum": Workload({"json": ORDER}, document),
    "arrays of objects: bounds, dates, numbers": Workload({"json": NESTED}, nested),
    "strings of at most 12 characters": Workload({"json": PERSON}, person),
    "any JSON object": Workload({"json_object": True}, document),
    "an expression": Workload({"regex": r"(\[[A-C]\d{3}\] (ok|late);)+"}, record),
}


class CountingDevice(CpuDevice):
    """CPU whose memory for copies is counted, as `num_bytes`."""

    num_bytes = 0

    def host_empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ordinary memory."""
        self.num_bytes += count * dtype.itemsize
        return super().host_empty(count, dtype)


@frozen
class Inputs:
    """What `StructuredOutputs` reads of a step's inputs."""

    sampling: Any
    spec_positions: None = None


@frozen
class Rows:
    """The rows of a step's logits."""

    rows: Any


def built(name: str, tokenizer: Any, requests: int) -> Any:
    """Build a plugin."""
    return subject_of(f"structured_output:{name}").build(
        StructuredOutputContext(
            contract=1,
            tokenizer=tokenizer,
            vocab_size=len(tokenizer),
            eos_token_ids=(tokenizer.eos_token_id,),
            max_requests=requests,
        )
    )


def structured_outputs(name: str, backend: Any, tokenizer: Any, requests: int, *, keep: bool) -> StructuredOutputs:
    """Return the extension without an engine."""
    ends, capabilities = (tokenizer.eos_token_id,), subject_of(f"structured_output:{name}").descriptor.capabilities
    forces = not capabilities.every_tokenization
    compiler = GrammarCompiler(
        lambda: backend,
        threads=1,
        capacity=8,
        cache_of=(lambda plugin: MaskCache(plugin.token_text, ends, forces=forces)) if keep else None,
    )
    return StructuredOutputs(
        name,
        capabilities,
        compiler,
        RequestTable(requests, 8),
        vocab_size=len(tokenizer),
        eos_token_ids=ends,
        device=CountingDevice(),
        profiler=StepProfiler(enabled=False),
        ahead=False,
        count_nans=False,
        source="",
        plugins=BuiltPlugins(),
        decode=tokenizer.decode,
    )


def run(grammars: StructuredOutputs, workload: Workload, texts: Sequence[Sequence[int]]) -> tuple[list[float], float]:
    """Return the seconds of each step of a run, and the bytes that a step's masks have on their way to the device."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**workload.wanted))
    for row in range(len(texts)):
        request = Request(request_id=f"r{row}", prompt_token_ids=[1], token_array=np.ones(1, np.int64), params=params)
        grammars.defer(request)
        grammars.collect_ready(idle=True, gives_way=lambda: False)
        request.row = row
        grammars.admit(request)
    rows, seconds = np.arange(len(texts)), list[float]()
    device = grammars.device
    assert isinstance(device, CountingDevice)
    before = device.num_bytes
    for tokens in zip(*(text[:-1] for text in texts), strict=False):
        token_ids = np.array(tokens, np.int32)
        start = time.perf_counter()
        masks = grammars.begin(Inputs(Rows(rows)))  # type: ignore[arg-type]
        assert masks is not None
        if isinstance(masks, StepMasks):
            masks.table.gather(masks.masks, rows, torch.device("cpu"))
        else:
            assert not masks.wait(grammars.compiler.backend, grammars.name, BuiltPlugins())
        ended = grammars.advance(rows, token_ids, {})
        seconds.append(time.perf_counter() - start)
        assert not ended
    for row in range(len(texts)):
        grammars.release(row)
    return seconds, (device.num_bytes - before) / len(seconds)


def measure(name: str, tokenizer: Any, requests: int, runs: int) -> list[list[str]]:
    """Return the rows of a plugin."""
    backend, rows = built(name, tokenizer, requests), []
    for what, workload in WORKLOADS.items():
        both = {keep: structured_outputs(name, backend, tokenizer, requests, keep=keep) for keep in (False, True)}
        found: dict[bool, list[float]] = {False: [], True: []}
        first, sent = 0.0, {False: 0.0, True: 0.0}
        for number in range(runs + 1):
            texts = [
                tokenizer.encode(workload.text(Random(number * requests + i)), add_special_tokens=False)
                for i in range(requests)
            ]
            for keep, grammars in both.items():
                seconds, sent[keep] = run(grammars, workload, texts)
                found[keep] += seconds if number else []
                first = statistics.mean(seconds) if keep and not number else first
        cells = [what, name]
        for keep in (False, True):
            cells += [f"{1e3 * statistics.median(found[keep]):.2f}", f"{1e3 * statistics.mean(found[keep]):.2f}"]
        cells += [f"{1e3 * first:.2f}", f"{sent[False] / 1e3:,.0f}", f"{sent[True] / 1e3:,.0f}"]
        rows.append(cells)
        print(" | ".join(cells), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=positive, default=64)
    parser.add_argument("--runs", type=at_least(1), default=4)
    parser.add_argument("--vocabulary", type=at_least(1000), default=151_936, help="tokens of the trained tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer's folder, to train none")
    parser.add_argument("--plugins", nargs="+", default=PLUGINS)
    parser.add_argument("--json", type=Path, help="write a result file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.tokenizer is None:
            train(Path(folder), arguments.vocabulary)
        tokenizer = Tokenizer(arguments.tokenizer or Path(folder)).transformers
    print(f"{arguments.requests} requests, {len(tokenizer):,} tokens")
    rows = [row for name in arguments.plugins for row in measure(name, tokenizer, arguments.requests, arguments.runs)]
    columns = ["host ms a step", "plugin", "none kept: median", "none kept: mean", "kept: median", "kept: mean"]
    columns += ["kept: mean of the first run", "kB sent, none kept", "kB sent, kept"]
    print_rows(columns, rows)
    if arguments.json is not None:
        note = f"{arguments.requests} requests, {len(tokenizer):,} tokens, {arguments.runs} runs of each, in turn."
        write_result(arguments.json, "structured_host", columns, rows, note=note)


if __name__ == "__main__":
    main()
