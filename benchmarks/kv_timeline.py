"""A slow load beside a running request: what each step takes, as a picture.

    python benchmarks/kv_timeline.py [--delay 0.02] [--length 400] [--svg docs/kv-load.svg]

The model that ships runs on the CPU, with the connector `disk`, which is made to get a block each `--delay` seconds.
One request decodes. Then a prompt comes whose blocks are on the disk. Printed are the median and the longest step of
the first request before the load, while it lasts, and while the prompt's end is computed. The picture has the steps,
and the time at which each block was read.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from command_line import positive

from slotline.core import LLM, SamplingParams

SHORT = "--delay 0.002 --length 40 --quiet 4"
WIDTH, LEFT, ROW, TOP = 860, 150, 46, 34
"""Of the picture: its width, that of the labels, the height of a row, and of what is above the first."""
COLOURS = {"decodes": "#4c78a8", "computes": "#f58518", "waits": "#d8d8dc", "block": "#54a24b"}


class Step(NamedTuple):
    """A step.

    Attributes:
        start, end: in seconds.
        kind: ``before`` the load, ``beside`` it, or ``behind``, once the prompt computes.
    """

    start: float
    end: float
    kind: str


class Timeline(NamedTuple):
    """What happened.

    Attributes:
        steps: of the request that decodes.
        asked: when the prompt came.
        reads: when each of its blocks was read.
        first: when it gave its first token.
    """

    steps: list[Step]
    asked: float
    reads: list[float]
    first: float


def measure(delay: float, length: int, quiet: int, folder: str) -> Timeline:
    """Run the two requests."""
    llm = LLM(
        device="cpu",
        max_model_len=max(512, length + 200),
        overrides=[
            "cache.memory=512MiB", "kv_connector.name=disk", f"kv_connector.disk.folder={folder}",
            "kv_connector.leave_out_slow=false", "observability.progress=false",
        ],
    )  # fmt: skip
    engine, transfers = llm.engine, llm.engine.extension("kv_transfer").transfers
    rng = np.random.default_rng(0)
    prompt = rng.integers(100, 4000, length).tolist()
    llm.generate([prompt], params_of(1))
    transfers.connector.flush(60.0)
    engine.scheduler.cache.pool.reset()
    reads = list[float]()
    slow(transfers.connector, delay, lambda: reads.append(perf_counter()))
    engine.add("decodes", rng.integers(100, 4000, 16).tolist(), params_of(150))
    for _ in range(6):
        engine.step()
    steps = [timed(engine.step, "before") for _ in range(quiet)]
    asked = perf_counter()
    request = engine.add("waits", prompt, params_of(1))
    while True:
        steps.append(timed(engine.step, "beside"))
        if not transfers.coming:
            steps[-1] = steps[-1]._replace(kind="behind")
            break
    while not request.finished:
        steps.append(timed(engine.step, "behind"))
    first = perf_counter()
    steps += [timed(engine.step, "before") for _ in range(quiet // 2)]
    return Timeline(steps, asked, reads, first)


def params_of(tokens: int) -> SamplingParams:
    """Parameters of a request that gives so many tokens."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def slow(connector: Any, delay: float, done: Callable[[], None]) -> None:
    """Have a connector's readers tell of one block in so many seconds."""
    poll, read, latest = connector._readers.poll, deque[Any](), [0.0]

    def slowly() -> list[Any]:
        read.extend(poll())
        if not read or perf_counter() < latest[0] + delay:
            return []
        latest[0] = perf_counter()
        done()
        return [read.popleft()]

    connector._readers.poll = slowly


def timed(step: Callable[[], Any], kind: str) -> Step:
    """Run a step."""
    start = perf_counter()
    step()
    return Step(start, perf_counter(), kind)


def picture(found: Timeline) -> str:
    """Return a timeline as SVG."""
    begin, end = found.steps[0].start, found.steps[-1].end
    scale = (WIDTH - LEFT - 20) / (end - begin)

    def bar(row: int, start: float, stop: float, colour: str, height: int = 22) -> str:
        x, width = LEFT + (start - begin) * scale, max((stop - start) * scale - 0.8, 0.6)
        y = TOP + row * ROW + (22 - height) / 2
        return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"/>'

    def text(x: float, y: float, words: str, anchor: str = "start") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'

    height = TOP + 3 * ROW + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="12" fill="#333">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        text(8, TOP + 15, "a request decodes"),
        text(8, TOP + ROW + 15, "another waits"),
        text(8, TOP + 2 * ROW + 15, "its blocks are read"),
        bar(1, found.asked, found.first, COLOURS["waits"]),
    ]
    lines += [bar(0, one.start, one.end, COLOURS["decodes"]) for one in found.steps]
    lines += [bar(1, one.start, one.end, COLOURS["computes"]) for one in found.steps if one.kind == "behind"]
    lines += [bar(2, at, at + 2 / scale, COLOURS["block"]) for at in found.reads]
    length = end - begin
    tick = next(one for one in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60) if length / one <= 12)
    for number in range(int(length / tick) + 1):
        x = LEFT + number * tick * scale
        lines.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{height - 26}" stroke="#ddd"/>')
        lines.append(text(x, height - 10, f"{1e3 * number * tick:.0f} ms", "middle"))
    lines.append(text(LEFT, 16, "each bar of the first row is a step; orange: steps that compute the prompt's end"))
    return "\n".join([*lines, "</svg>", ""])


def say(steps: Sequence[Step]) -> None:
    """Print the steps of each kind."""
    for kind, words in (("before", "alone"), ("beside", "beside the load"), ("behind", "with the prompt's end")):
        own = [1e3 * (one.end - one.start) for one in steps if one.kind == kind]
        if own:
            print(f"{words}: {len(own)} steps, median {median(own):.2f} ms, longest {max(own):.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.02, help="seconds between two blocks")
    parser.add_argument("--length", type=positive, default=400, help="tokens of the prompt that comes")
    parser.add_argument("--quiet", type=positive, default=16, help="steps before it comes")
    parser.add_argument("--svg", type=Path, help="file of the picture")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        found = measure(arguments.delay, arguments.length, arguments.quiet, folder)
    say(found.steps)
    print(f"the prompt waited {1e3 * (found.first - found.asked):.0f} ms for its first token")
    if arguments.svg is not None:
        arguments.svg.write_text(picture(found), encoding="utf-8")


if __name__ == "__main__":
    main()
