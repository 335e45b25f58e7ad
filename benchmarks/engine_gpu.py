"""The workloads of `slotline bench`, end to end, on a model of random weights, beside what the card could do at best.

    python benchmarks/engine_gpu.py benchmarks/models/qwen3-0.6b [--workload nano latency prefill] [--runs 2]
        [--profile 40] [--phases] [--by-requests] [--set scheduler.async=false] [--json FILE]

Each workload runs once to warm up, then so many times; the best counts, as in the figures it is compared with, and all
are printed. Model length 8192; everything else as slotline chooses it. `--profile N` then runs each workload once
more under torch's profiler, N steps from its middle (prefill: all), and prints the kernels' time by kind and the share
of the time in which the device is busy; `--phases` prints the host's time in each part of a step, and `--by-requests`
the median step of decoding by how many requests are running. Weights are made on the device: what reading them costs is
in benchmarks/startup.py.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from card_rates import measured_rates
from command_line import at_least, positive, require_gpus
from result_file import write_result
from step_gpu import kind_of, random_llm
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from slotline.cli import bench_run
from slotline.cli.bench_run import Run, timed_runs
from slotline.cli.workloads import Workload, workload
from slotline.core import LLM

SHORT = "benchmarks/models/llama-tiny --workload latency --runs 1"


def build(folder: Path, settings: list[str]) -> tuple[LLM, float]:
    """An LLM over the folder's configuration and the seconds that building it took."""
    start = perf_counter()
    llm = random_llm(folder, max_model_len=8192, overrides=settings)
    return llm, perf_counter() - start


def least_seconds(llm: LLM, work: Workload) -> float:
    """At best: a step reads the weights and each key once or does the operations, whichever is longer."""
    model: Any = llm.engine.runner.model
    config, layers = model.hf_model.config, model.facts.layers
    head = config.vocab_size * config.hidden_size
    body = sum(p.numel() for name, p in model.hf_model.named_parameters() if p.dim() == 2 and "embed" not in name)
    body -= 0 if config.tie_word_embeddings else head
    per_token = sum(4 * layer.num_kv_heads * layer.head_size for layer in layers)  # bytes of bfloat16 keys and values
    pairs = sum(4 * layer.num_heads * layer.head_size for layer in layers)  # operations of a query and a key
    lengths = [(len(prompt), out) for prompt, out in zip(work.waves[-1], work.max_tokens[-1], strict=True)]
    prompt_tokens = sum(prompt for prompt, _ in lengths)
    operations = 2 * body * prompt_tokens + 2 * head * len(lengths) + pairs * sum(p * p / 2 for p, _ in lengths)
    bandwidth, matrix_rate = measured_rates()
    total = max(operations / matrix_rate, 2 * (body + head) / bandwidth)
    for step in range(1, max(out for _, out in lengths)):
        running = [prompt + step for prompt, out in lengths if out > step]
        read = 2 * (body + head) + per_token * sum(running)
        total += max(read / bandwidth, (2 * (body + head) * len(running) + pairs * sum(running)) / matrix_rate)
    return float(total)


def figure(work: Workload, seconds: float) -> str:
    """The workload's figure of merit: output tokens per second, or seconds where one token each is wanted."""
    outputs = sum(work.max_tokens[-1])
    return f"{seconds:.4f} s" if work.name == "prefill" else f"{outputs / seconds:,.0f} tok/s"


def describe(llm: LLM, work: Workload, runs: list[Run]) -> dict[str, str]:
    """Print one line for a workload. Return what it says, as text."""
    best = min(run.seconds for run in runs)
    wave = min(runs, key=lambda run: run.seconds).waves[-1]
    least = least_seconds(llm, work)
    each = ", ".join(figure(work, run.seconds) for run in runs)
    print(
        f"{work.name}: {figure(work, best)} ({each}); limit {figure(work, least)}, {100 * least / best:.0f} % of it",
        end="",
    )
    later = sorted(step[1] for step in wave.later_steps)
    prompt = wave.prompt_seconds
    print(f"; {wave.prompt_steps} steps with prompts {prompt:.3f} s, then {len(later)} steps", end="")
    print(f", median {1e3 * later[len(later) // 2]:.2f} ms" if later else "")
    return {"workload": work.name, "best": figure(work, best), "all": each, "limit": figure(work, least)}


def profiled(llm: LLM, work: Workload, count: int) -> None:
    """Some steps under torch's profiler: kernels by kind, how busy the device is, and the host's phases."""
    engine = llm.engine
    first = 0 if work.name == "prefill" else 60
    step, seen, marks = engine.step, 0, dict[str, float]()
    profiler = profile(activities=[ProfilerActivity.CUDA])

    def watched() -> Any:
        nonlocal seen
        if seen == first:
            torch.cuda.synchronize()
            profiler.start()
            marks["start"] = perf_counter()
        result = step()
        seen += 1
        if seen == first + count or (seen > first and "end" not in marks and not engine.has_work):
            torch.cuda.synchronize()
            marks["end"] = perf_counter()
            profiler.stop()
        return result

    engine.step = watched  # type: ignore[method-assign]
    bench_run._run(llm, work)
    del engine.step
    by_kind, by_name = defaultdict[str, float](float), defaultdict[str, list[float]](list)
    spans = []
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA and not event.name.startswith("Activity"):
            by_kind["copies" if event.name.startswith("Mem") else kind_of(event.name)] += event.device_time
            by_name[event.name].append(event.device_time)
            spans.append((event.time_range.start, event.time_range.end))
    busy, reach = 0.0, float("-inf")
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    wall, steps = 1e6 * (marks["end"] - marks["start"]), min(count, seen - first)
    share, launches = 100 * busy / wall, len(spans) / steps
    print(
        f"   {steps} steps: {wall / steps:.0f} us each, busy {busy / steps:.0f} ({share:.0f} %), {launches:.0f} kernels"
    )
    kinds = sorted(by_kind.items(), key=lambda item: -item[1])
    print("   us a step: " + ", ".join(f"{kind} {time / steps:.0f}" for kind, time in kinds))
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:18]:
        each = f"{len(times) / steps:6.1f} x {sum(times) / len(times):8.2f}"
        print(f"   {sum(times) / steps:9.1f} us a step, {each}  {name[:90]}")


def by_requests(runs: list[Run]) -> None:
    """Median milliseconds of a step without prompts by the requests that run, eight numbers of them together."""
    steps = defaultdict[int, list[float]](list)
    for run in runs:
        for _, seconds, requests in run.waves[-1].later_steps:
            steps[requests // 8 * 8].append(1e3 * seconds)
    print("   requests, ms: " + ", ".join(f"{first}+ {median(steps[first]):.3f}" for first in sorted(steps)))


def phases(llm: LLM, work: Workload) -> None:
    """The host's time in the parts of a step, averaged over one more run; the timing itself is in it."""
    profiler = llm.engine.profiler
    profiler.reset()
    profiler.enable()
    bench_run._run(llm, work)
    profiler.disable()
    steps = max(profiler.counts.values())
    parts = ", ".join(f"{name} {1e6 * spent / steps:.0f}" for name, spent in profiler.seconds.items())
    print(f"   host, us a step over {steps} steps: {parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workload", nargs="*", default=["nano", "latency", "prefill"])
    parser.add_argument("--runs", type=positive, default=2)
    parser.add_argument("--profile", type=at_least(0), default=0, metavar="STEPS")
    parser.add_argument("--phases", action="store_true", help="the host's time in the parts of a step, too")
    parser.add_argument("--by-requests", action="store_true", help="the median step by the number of requests, too")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as a result file")
    arguments = parser.parse_args()
    require_gpus()
    llm, seconds = build(arguments.folder, arguments.settings)
    startup = ", ".join(f"{phase} {taken:.1f}" for phase, taken in llm.engine.startup.items())
    print(llm.plan.summary(), f"built in {seconds:.1f} s: {startup}", sep="\n")
    found = []
    for name in arguments.workload:
        work = workload(name)
        runs = timed_runs(llm, work, arguments.runs)
        found.append(describe(llm, work, runs))
        if arguments.by_requests:
            by_requests(runs)
        if arguments.profile:
            profiled(llm, work, arguments.profile)
        if arguments.phases:
            phases(llm, work)
    if arguments.json:
        columns = ["model, workload", "best", "all runs", "limit"]
        rows = [
            [f"{arguments.folder.name}, {each['workload']}", each["best"], each["all"], each["limit"]] for each in found
        ]
        write_result(arguments.json, "engine_gpu", columns, rows, note="Random bfloat16 weights, after a warm-up.")


if __name__ == "__main__":
    main()
