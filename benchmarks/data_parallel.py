"""Throughput of replicas behind one front, beside one engine of one device.

    python benchmarks/data_parallel.py benchmarks/models/qwen3-0.6b [--replicas 2] [--requests 1024] [--runs 3]
        [--set scheduler.max_requests=256] [--json FILE]

The requests are those of nano-vllm's bench: 100 to 1024 tokens in and as many out, end-of-sequence ignored,
temperature 0.6. Each replica has as many as the one engine. All arrive at once, by `LLM.generate` and then as streams
of deltas by `AsyncLLM.generate`. Every number of replicas runs in a process of its own, which runs a quarter of the
requests first to warm up. The median counts, and all runs are printed. Weights are random, made on each device.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from command_line import positive, require_gpus
from result_file import write_result

from slotline.core import LLM, AsyncLLM, SamplingParams

SHORT = "benchmarks/models/llama-tiny --requests 8 --runs 1 --replicas 1"
_MARK = "measured: "


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and parameters, the same in each call."""
    rng = Random(0)
    prompts = [[rng.randint(0, 4_000) for _ in range(rng.randint(100, 1024))] for _ in range(count)]
    return prompts, [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(100, 1024)) for _ in prompts
    ]


def generated(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> float:
    """Return output tokens a second of `LLM.generate`."""
    start = perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (perf_counter() - start)


async def streamed(llm: AsyncLLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> float:
    """Return output tokens a second of streams that are read as they come."""

    async def read(prompt: list[int], one: SamplingParams) -> int:
        found = 0
        async for output in llm.generate({"prompt_token_ids": prompt}, one, output_kind="delta"):
            found += len(output.outputs[0].token_ids)
        return found

    start = perf_counter()
    tokens = await asyncio.gather(*(read(*each) for each in zip(prompts, params, strict=True)))
    return sum(tokens) / (perf_counter() - start)


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return the rates of all runs of an engine with so many replicas, by the way in which requests come."""
    prompts, params = requests(arguments.requests * arguments.measure)
    few = max(1, len(prompts) // 4)
    values: dict[str, Any] = {
        "load.format": "dummy",
        "parallel.data": arguments.measure,
        "cache.prefix_caching": False,  # every run has the same prompts
    }
    given = {"model": arguments.folder, "dtype": "bfloat16", "max_model_len": 2048, "overrides": arguments.settings}
    llm = LLM(**given, **values)
    print(llm.plan.summary(), file=sys.stderr)
    generated(llm, prompts[:few], params[:few])
    found = {"generate": [generated(llm, prompts, params) for _ in range(arguments.runs)]}
    llm.close()
    del llm
    gc.collect()

    async def streams() -> list[float]:
        async with AsyncLLM(**given, **values) as served:
            await streamed(served, prompts[:few], params[:few])
            return [await streamed(served, prompts, params) for _ in range(arguments.runs)]

    return {**found, "streams": asyncio.run(streams())}


def measured(replicas: int) -> dict[str, list[float]]:
    """Return what a process of its own measures."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", str(replicas)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = (each for each in done.stdout.splitlines() if each.startswith(_MARK))
    found: dict[str, list[float]] = json.loads(line.removeprefix(_MARK))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=positive, default=2)
    parser.add_argument("--requests", type=positive, default=1024, help="for each replica")
    parser.add_argument("--runs", type=positive, default=3)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a result file")
    parser.add_argument("--measure", type=positive, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(_MARK + json.dumps(measure(arguments)))
        return
    require_gpus(arguments.replicas)
    one, all_replicas = measured(1), measured(arguments.replicas)
    rows = []
    for way, alone in one.items():
        together = all_replicas[way]
        factor = median(together) / median(alone)
        rows.append([way, f"{median(alone):,.0f}", f"{median(together):,.0f}", f"{factor:.3f}"])
        print(f"{way}: {rows[-1][1]} tok/s with one, {rows[-1][2]} with {arguments.replicas}: {factor:.3f} times")
        for runs in (alone, together):
            print("   " + ", ".join(f"{rate:,.0f}" for rate in runs))
    if arguments.json:
        columns = ["requests by", "one engine, tok/s", f"{arguments.replicas} replicas, tok/s", "factor"]
        each = f"{arguments.folder.name}, {arguments.requests} requests for each replica"
        note = f"{each}, random bfloat16 weights, after a warm-up."
        write_result(arguments.json, "data_parallel", columns, rows, note=note)


if __name__ == "__main__":
    main()
