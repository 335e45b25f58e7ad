"""The number of threads of an engine on a CPU: torch's products, attention and the rest share one pool.

Hardware threads of one core help a step that waits for memory and hurt one that computes, and a container may have
fewer processors than it sees. So the candidates are timed once, and the answer is kept in the cache folder by processor
and number of cores. What the user gives wins: the option ``devices.cpu.threads``, then OMP_NUM_THREADS, then a number
that the program has set. `docs/decisions/cpu-threads.md` has the reasons.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import psutil
from attrs import asdict, field, frozen

from slotline.registry import hookimpl
from slotline.registry.cache_folder import cache_folder, write_first
from slotline.registry.config.validators import AtLeast
from slotline.registry.processor import processor

FOLDER = "cpu-threads"
"""In the cache folder."""
MANY_CORES = 8
"""Cores from which half of them are a candidate: fewer may read memory as fast."""
MARGIN = 0.03
"""Share by which another number must be faster than a thread for each core, so that noise seldom decides."""
ROUNDS = 5
PARTS = ("1 row", "16 rows", "128 rows", "attention")
IMPORTANCE = (3, 2, 2, 1)
"""What is timed, products of so many rows among it, and its weight in the mean."""
WEIGHTS, SIZE = 12, 1024
"""Number and size of the square float32 weights: 48 MiB, so that most caches do not hold them."""
_SYSTEM = Path("/")


@frozen(kw_only=True)
class CpuOptions:
    """Options of the CPU.

    Attributes:
        threads: of an engine. ``auto`` is OMP_NUM_THREADS where that is set, else the fastest number (timed once, then
            kept in the cache folder).
    """

    threads: int | Literal["auto"] = field(default="auto", validator=AtLeast(1, auto=True))


@frozen
class Cores:
    """Processors that this process may use.

    Attributes:
        usable: hardware threads, by affinity and the limits of the control groups.
        physical: cores that they belong to, at most `usable`.
        seen: hardware threads by affinity alone.
    """

    usable: int
    physical: int
    seen: int

    def candidates(self) -> list[int]:
        """Return the numbers of threads that may be fastest, a thread for each core first."""
        half = [self.physical // 2] if self.physical >= MANY_CORES else []
        return list(dict.fromkeys([self.physical, self.usable, *half]))


@frozen
class Choice:
    """A number of threads.

    Attributes:
        threads: the number.
        because: in words.
        left: True if torch has it already, by the user.
        milliseconds: of each candidate, for each of `PARTS`.
    """

    threads: int
    because: str
    left: bool = False
    milliseconds: Mapping[str, Sequence[float]] = field(factory=dict)

    def describe(self) -> str:
        """Return a line for a report."""
        times = "; ".join(
            f"{name} {' '.join(f'{ms:.2f}' for ms in found)}" for name, found in self.milliseconds.items()
        )
        return f"threads: {self.threads}, {self.because}" + (f"; ms of {', '.join(PARTS)}: {times}" if times else "")


def cores(system: Path = _SYSTEM) -> Cores:
    """Return the processors that this process may use.

    Args:
        system: the folder that has ``proc`` and ``sys``.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    seen = sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))
    return count_cores(seen, system)


def count_cores(seen: Sequence[int], system: Path) -> Cores:
    """Return the same for the hardware threads of these numbers."""
    usable = max(1, min([len(seen), *(math.ceil(limit) for limit in _limits(system))]))
    siblings = set()
    for number in seen:
        topology = system / "sys/devices/system/cpu" / f"cpu{number}" / "topology"
        with suppress(OSError):
            siblings.add((topology / "thread_siblings_list").read_text())
    physical = len(siblings) or psutil.cpu_count(logical=False) or len(seen)
    return Cores(usable, min(physical, usable), len(seen))


def _limits(system: Path) -> Iterator[float]:
    """Yield the processors that each control group of this process may use, of version 2 or 1."""
    with suppress(OSError):
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            number, _, rest = line.partition(":")
            kinds, _, path = rest.partition(":")
            if number == "0" or "cpu" in kinds.split(","):
                base = system / "sys/fs/cgroup" / kinds
                group = base / path.lstrip("/")
                for folder in (group, *group.parents):
                    yield from _limit(folder)
                    if folder == base:
                        break


def _limit(folder: Path) -> Iterator[float]:
    with suppress(OSError, ValueError, ZeroDivisionError):
        file = folder / "cpu.max"
        if file.is_file():
            quota, period = file.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if quota != "max" and float(quota) > 0:
            yield float(quota) / float(period)


def set_threads(options: CpuOptions | None) -> Choice:
    """Give torch the number of threads of an engine on the CPU, and return it with the reason."""
    import torch

    choice = choose(options or CpuOptions())
    if not choice.left:
        torch.set_num_threads(choice.threads)
        _SET.add(choice.threads)
    return choice


_SET: set[int] = set()
"""Numbers that `set_threads` has set: where torch has one of these, no program has chosen it."""


def choose(options: CpuOptions) -> Choice:
    """Return the number of threads of an engine on the CPU. Times the candidates if that was not done before."""
    if options.threads != "auto":
        return Choice(options.threads, "as devices.cpu.threads says")
    import torch

    now = torch.get_num_threads()
    if os.environ.get("OMP_NUM_THREADS"):
        return Choice(now, "as OMP_NUM_THREADS says", left=True)
    found = cores()
    # Without a choice of the program, torch begins with a thread for each core or for each hardware thread.
    if now not in {found.seen, count_cores(range(os.cpu_count() or 1), _SYSTEM).physical, found.physical, *_SET}:
        return Choice(now, "as the program has set", left=True)
    among = f"{found.usable} usable processors on {found.physical} cores"
    if len(found.candidates()) == 1:
        return Choice(found.physical, f"one for each of {among}")
    return _kept(found, lambda: times(found.candidates())) or Choice(
        found.physical, f"one for each core of {among}: the cache folder keeps no times"
    )


def _kept(found: Cores, timed: Callable[[], Mapping[int, Sequence[float]]]) -> Choice | None:
    """Return the kept choice for such cores, made now if there is none. None if it cannot be kept."""
    facts = {"processor": processor(), "torch": version("torch"), "parts": PARTS, **asdict(found)}
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
    try:
        file = cache_folder() / FOLDER / f"{name}.json"
        if (choice := _read(file)) is None:
            write_first(file, json.dumps(asdict(judge(found, timed())), indent=1).encode())
            choice = _read(file)
    except OSError:
        return None  # a start that cannot keep its answer must not compute otherwise than the next one
    return choice


def _read(file: Path) -> Choice | None:
    with suppress(OSError, ValueError, TypeError):
        choice = Choice(**json.loads(file.read_text(encoding="utf-8")))
        return choice if choice.threads >= 1 else None
    return None


def judge(found: Cores, seconds: Mapping[int, Sequence[float]]) -> Choice:
    """Return the fastest number of threads, by the mean of the logarithms. A thread for each core wins if it is close.

    Args:
        seconds: of each candidate, for each of `PARTS`.
    """
    mean = {
        threads: sum(math.log(time) * share for time, share in zip(each, IMPORTANCE, strict=True)) / sum(IMPORTANCE)
        for threads, each in seconds.items()
    }
    best = min(mean, key=lambda threads: mean[threads])
    if mean[found.physical] - mean[best] <= MARGIN:
        best = found.physical
    because = f"the fastest for {found.usable} usable processors on {found.physical} cores"
    return Choice(best, because, False, {str(n): [round(s * 1e3, 3) for s in each] for n, each in seconds.items()})


def times(candidates: Sequence[int]) -> dict[int, list[float]]:
    """Return the least seconds of each part with each number of threads, in turn. Torch's number stays what it was."""
    import torch
    from torch.nn import functional

    before = torch.get_num_threads()
    weights = [torch.full((SIZE, SIZE), 0.01) for _ in range(WEIGHTS)]
    query, keys = torch.ones(8, 8, 1, 64), torch.ones(8, 8, 512, 64)
    inputs = [torch.ones(rows, SIZE) for rows in (1, 16, 128)]

    def products(x: torch.Tensor) -> None:
        for weight in weights if len(x) < 128 else weights[:2]:
            functional.linear(x, weight)

    found = {threads: [math.inf] * len(PARTS) for threads in candidates}
    try:
        with torch.inference_mode():
            for _ in range(ROUNDS + 1):
                for threads, best in found.items():
                    torch.set_num_threads(threads)
                    products(inputs[0])  # the pool has its size from now on
                    for part in range(len(PARTS)):
                        start = perf_counter()
                        if part < len(inputs):
                            products(inputs[part])
                        else:
                            functional.scaled_dot_product_attention(query, keys, keys)
                        best[part] = min(best[part], perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return found


@hookimpl
def slotline_report_header(config: Any) -> str | None:
    """Return the number of threads with the reason, for a report of a run on a CPU."""
    if config.device not in ("cpu", "auto"):
        return None
    import torch

    if config.device == "auto" and torch.cuda.is_available():
        return None
    asked = config.devices.get("cpu", {}).get("threads", "auto")
    return choose(CpuOptions(threads=asked)).describe()
