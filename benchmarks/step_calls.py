"""Python calls of a plain decode step: how many functions of core it enters, and how often it changes file.

    python benchmarks/step_calls.py [--requests 2] [--steps 20] [--show]

Greedy requests on the small model that ships, on a CPU, with no feature on. `sys.setprofile` counts the calls of
functions below slotline.core in each steady step; a change of file is a call from one file of core to another. The
median step is printed. `--show` lists the calls in order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from command_line import at_least

import slotline.core
from slotline.core import LLM, SamplingParams

SHORT = "--steps 3"
CORE = str(Path(slotline.core.__file__).parent)


def calls_of(work: Callable[[], Any]) -> list[tuple[str, str]]:
    """Return file and function of each call below core that `work` makes, in order."""
    found: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(CORE):
            found.append((code.co_filename[len(CORE) + 1 :], code.co_name))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def changes(calls: list[tuple[str, str]]) -> int:
    """Return how often a call lies in another file than the call before it."""
    return sum(before[0] != after[0] for before, after in pairwise(calls))


def main() -> None:
    """Print the median step's calls, functions, files and changes of file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=at_least(1), default=2)
    parser.add_argument("--steps", type=at_least(1), default=20)
    parser.add_argument("--show", action="store_true")
    arguments = parser.parse_args()
    llm = LLM(device="cpu", memory="64MiB", max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=arguments.steps + 40, ignore_eos=True)
    for index in range(arguments.requests):
        llm.engine.add(f"r{index}", list(range(5 + index, 15 + index)), params)
    for _ in range(8):
        llm.engine.step()
    steps = [calls_of(llm.engine.step) for _ in range(arguments.steps)]
    middle = sorted(steps, key=len)[len(steps) // 2]
    print(
        f"{arguments.requests} requests, median of {len(steps)} steps: {median(map(len, steps)):.0f} calls in core, "
        f"{len(set(middle))} functions, {len({file for file, _ in middle})} files, "
        f"{median(map(changes, steps)):.0f} changes of file"
    )
    if arguments.show:
        print("\n".join(f"{file}: {name}" for file, name in middle))


if __name__ == "__main__":
    main()
