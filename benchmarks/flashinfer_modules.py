"""Compile the modules of FlashInfer that the conformance suite will need, all at once, before it runs.

    python benchmarks/flashinfer_modules.py [--level L4] [--check attention.graphs]

A module is minutes of a core's time, and there are dozens; where checks compile them as they come, most processes wait
for one another's. MAX_JOBS bounds the compilers at a time (default: as many as there are cores).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, NoReturn

import torch
from attrs import evolve
from command_line import require_gpus

from slotline.backends.flashinfer.modules import specs_of
from slotline.registry.contracts.attention import AttentionContext
from slotline.testing import Level
from slotline.testing.runner import run_case
from slotline.testing.selection import select
from slotline.testing.subject import subject_of

SHORT = "--level L0"


def contexts(level: Level, checks: Sequence[str]) -> Iterator[AttentionContext]:
    """What the suite's checks build, engines aside: each runs until it asks for a backend, and gets none."""
    asked: list[AttentionContext] = []

    def refuse(context: AttentionContext) -> NoReturn:
        asked.append(context)
        raise RuntimeError("nothing is built here")

    subject = subject_of("attention:flashinfer", device="cuda")
    subject = evolve(subject, descriptor=evolve(subject.descriptor, factory=refuse))
    for item in select(subject, min(level, Level.GRAPHS), checks):
        if item.skip is None:
            run_case(item.check, subject, item.case)
    yield from asked


def missing(level: Level, checks: Sequence[str]) -> dict[str, Any]:
    """Descriptions of modules that are not compiled yet, by name."""
    hopper = torch.cuda.get_device_capability()[0] == 9
    found = dict[str, Any]()
    for context in contexts(level, checks):
        kernels = ("fa2", "fa3") if hopper and context.dtype == context.kv_dtype else ("fa2",)
        found |= {spec.name: spec for spec in specs_of(context, kernels) if not spec.is_compiled}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", type=Level.parse, default=Level.GRAPHS, help="up to which the suite will run")
    parser.add_argument("--check", action="append", default=[], metavar="ID", help="of these checks alone; repeatable")
    arguments = parser.parse_args()
    require_gpus()
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    begun = perf_counter()
    specs = missing(arguments.level, arguments.check)
    print(f"{len(specs)} modules to compile, found in {perf_counter() - begun:.1f} s", flush=True)
    if specs:
        from flashinfer.jit import build_jit_specs

        build_jit_specs(list(specs.values()))
    print(f"compiled after {perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
