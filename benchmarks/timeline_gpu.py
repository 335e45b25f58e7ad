"""What host and device do at the same time, from a trace: some steps of the workload nano with 256 requests decoding.

    python benchmarks/timeline_gpu.py benchmarks/models/qwen3-0.6b [--first 60] [--steps 2] [--svg docs/timeline.svg]
        [--set scheduler.async=false]

torch's profiler records the named parts of a step on the host (`StepProfiler`) and every kernel on the device, on one
clock. Printed are the parts in order with their times, how much of each the device was busy, and every pause of the
device; the profiler's own cost, which makes the host's parts longer than they are, is in them. Before that, steps
without it: how long one takes, and how much of that the host works, that is all but its waits for the device. The
picture needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from command_line import at_least, positive, require_gpus
from step_gpu import kind_of, random_llm
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from slotline.cli.workloads import workload
from slotline.core import LLM, SamplingParams

SHORT = "benchmarks/models/llama-tiny --first 2 --steps 1"
PREFIX = "slotline."
PAUSE = 5.0
"""Microseconds without a kernel from which on the device counts as pausing."""
UNTRACED = 40
"""Steps in front of the trace whose host's part is timed."""
COLOURS = {"forward": "#4c78a8", "sampling": "#f58518", "copies": "#9d9da1"}


class Span(NamedTuple):
    """What ran from `start` to `end`, in microseconds since the first part of the trace."""

    name: str
    start: float
    end: float


def trace(llm: LLM, first: int, steps: int) -> tuple[list[Span], list[Span]]:
    """The host's parts and the device's work in `steps` steps, behind `first` others of nano."""
    engine, work = llm.engine, workload("nano")
    engine.forget_prefixes()
    requests = [
        engine.add(
            f"timeline-{index}",
            prompt,
            SamplingParams(max_tokens=out, temperature=work.temperature, ignore_eos=True, detokenize=False),
        )
        for index, (prompt, out) in enumerate(zip(work.waves[0], work.max_tokens[0], strict=True))
    ]
    while any(request.metrics.time_to_first_token is None for request in requests):
        engine.step()
    untraced = min(first, UNTRACED)
    for _ in range(first - untraced):
        engine.step()
    if untraced:
        say_host_cost(llm, untraced)
    engine.profiler.enable()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps + 1):  # the first one under a profiler is longer than the others
            engine.step()
        torch.cuda.synchronize()
    engine.profiler.disable()
    for request in list(engine.requests):
        engine.abort(request)
    return spans(profiler.events(), steps)


def say_host_cost(llm: LLM, steps: int) -> None:
    """Run so many steps and print the median one and its host's part; only the waits are timed inside."""
    engine, waited, figures = llm.engine, [0.0], []

    @contextmanager
    def waiting() -> Iterator[None]:
        start = perf_counter()
        yield
        waited[0] += perf_counter() - start

    def scope(name: str) -> AbstractContextManager[None]:
        return waiting() if name == "wait" else nullcontext()

    engine.profiler.scope = scope
    for _ in range(steps):
        waited[0], start = 0.0, perf_counter()
        engine.step()
        whole = perf_counter() - start
        figures.append((whole, whole - waited[0]))
    del engine.profiler.scope
    whole, host = (1e6 * median(column) for column in zip(*figures, strict=True))
    most = 1e6 * sorted(own for _, own in figures)[9 * steps // 10]
    print(
        f"{steps} steps without a profiler: {whole:.0f} us, of which the host works {host:.0f} (nine in ten {most:.0f})"
    )


def spans(events: Any, steps: int) -> tuple[list[Span], list[Span]]:
    """The last `steps` steps of a trace."""
    host, device = [], []
    for event in events:
        begin, end = event.time_range.start, event.time_range.end
        if event.device_type == DeviceType.CUDA:
            if not event.name.startswith((PREFIX, "Activity")):
                device.append(Span(_kind(event.name), begin, end))
        elif event.name.startswith(PREFIX):
            host.append(Span(event.name.removeprefix(PREFIX), begin, end))
    host.sort(key=lambda span: span.start)
    begins = [span.start for span in host if span.name == "schedule"]
    zero = begins[-steps]
    return (
        [Span(n, start - zero, end - zero) for n, start, end in host if start >= zero],
        sorted((Span(n, start - zero, end - zero) for n, start, end in device if end > zero), key=lambda s: s.start),
    )


def _kind(name: str) -> str:
    if name.startswith("Mem"):
        return "copies"
    return "forward" if kind_of(name) != "other" else "sampling"


def joined(device: list[Span], *, by_name: bool = False) -> list[Span]:
    """Spans that follow each other within `PAUSE` as one; of one name each, if so asked."""
    found: list[Span] = []
    for span in device:
        if found and span.start - found[-1].end < PAUSE and (not by_name or span.name == found[-1].name):
            found[-1] = found[-1]._replace(end=max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def overlap(span: Span, others: list[Span]) -> float:
    """Microseconds of `span` that are in one of the others, which do not overlap."""
    return sum(max(0.0, min(span.end, other.end) - max(span.start, other.start)) for other in others)


def show(host: list[Span], device: list[Span]) -> None:
    """The host's parts line by line, then the device's pauses."""
    busy = joined(device)
    end = host[-1].end
    print(f"{'host':<10} {'from':>8} {'to':>8} {'us':>7}  device busy")
    for span in host:
        length = max(span.end - span.start, 1e-9)
        share = 100 * overlap(span, busy) / length
        print(f"{span.name:<10} {span.start:8.0f} {span.end:8.0f} {length:7.0f}  {share:3.0f} %")
    whole = Span("", 0.0, end)
    hidden = sum(overlap(span, busy) for span in host if span.name != "wait")
    working = sum(span.end - span.start for span in host if span.name != "wait")
    print(f"{end:.0f} us, device busy {overlap(whole, busy):.0f} ({100 * overlap(whole, busy) / end:.1f} %)")
    print(f"host's work {working:.0f} us, {100 * hidden / working:.1f} % of it while the device is busy")
    for one, following in pairwise(busy):
        if one.end < end:
            print(f"device pauses {following.start - one.end:.0f} us at {one.end:.0f}")


def draw(host: list[Span], device: list[Span], path: Path) -> None:
    """Two lanes: the host's parts above, the device's work below."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "slotline"  # the same picture of the same trace
    from matplotlib import pyplot as plt

    end = host[-1].end
    figure, axes = plt.subplots(figsize=(10, 2.6))
    colours = plt.get_cmap("tab20").colors
    names = list(dict.fromkeys(span.name for span in host))
    for span in host:
        colour = "#eeeeee" if span.name == "wait" else colours[names.index(span.name)]
        axes.barh(1, span.end - span.start, left=span.start, color=colour, height=0.7)
    for span in joined(device, by_name=True):
        if span.start < end:
            axes.barh(0, min(span.end, end) - span.start, left=span.start, color=COLOURS[span.name], height=0.7)
    handles = [mpl.patches.Patch(color="#eeeeee" if n == "wait" else colours[names.index(n)], label=n) for n in names]
    handles += [mpl.patches.Patch(color=colour, label=f"device: {name}") for name, colour in COLOURS.items()]
    axes.legend(handles=handles, ncol=7, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.35), frameon=False)
    axes.set_yticks([0, 1], ["device", "host"])
    axes.set_xlabel("microseconds")
    axes.set_xlim(0, end)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=at_least(0), default=60, help="steps of decoding before the trace")
    parser.add_argument("--steps", type=positive, default=2)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    require_gpus()
    llm = random_llm(arguments.folder, max_model_len=8192, overrides=arguments.settings)
    print(llm.plan.summary())
    host, device = trace(llm, arguments.first, arguments.steps)
    show(host, device)
    if arguments.svg:
        draw(host, device, arguments.svg)


if __name__ == "__main__":
    main()
