"""Surroundings of a communicator: a real group of ranks in processes of their own, and what it must give.

The processes start once and serve all checks. Each check joins them anew, by a process group over gloo and a file.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, NotApplicable, Run
from slotline.testing.environments import communicator_rank
from slotline.testing.environments.communicator_rank import Joined, Raised, Task
from slotline.testing.subject import Subject

DTYPES = ("float32", "bfloat16", "float16")
SIZES = (2, 3)
TIMEOUT = 20.0
"""Seconds after which a collective that a rank does not join is an error, unless a check says otherwise."""
PATIENCE = 60.0
"""Seconds that ranks have for a check. Then they count as hanging."""
_ATTEMPTS = 3
_START = 180.0
_SETTLE = 3.0
"""Seconds that the other ranks have once one has raised an error."""


@define(eq=False)
class _Process:
    """Process of one rank."""

    process: subprocess.Popen[bytes]
    connection: Connection


@define(eq=False)
class _Processes:
    """Processes that are started when they are first needed, and anew after one hung."""

    ranks: list[_Process] = field(factory=list)
    folder: tempfile.TemporaryDirectory[str] | None = None
    numbers: Any = field(factory=lambda: count())

    def need(self, size: int) -> list[_Process]:
        """Return this many processes."""
        if any(rank.process.poll() is not None for rank in self.ranks):
            self.end()
        new = [_started() for _ in range(size - len(self.ranks))]
        self.ranks += new
        for rank in new:
            if not rank.connection.poll(_START) or rank.connection.recv_bytes() != communicator_rank.READY:
                raise RuntimeError(f"a process of a rank did not start within {_START:g} s")
        return self.ranks[:size]

    def file(self) -> str:
        """Return the name of a new file."""
        if self.folder is None:
            self.folder = tempfile.TemporaryDirectory(prefix="slotline-ranks-")
        return str(Path(self.folder.name) / str(next(self.numbers)))

    def end(self) -> None:
        """End the processes."""
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait()
            rank.connection.close()
        self.ranks.clear()


def _started() -> _Process:
    own, other = Pipe()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", f"from {communicator_rank.__name__} import main; main()", str(other.fileno())]
    process = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment)
    other.close()
    return _Process(process, own)


_PROCESSES = _Processes()
atexit.register(_PROCESSES.end)


class GroupUnderTest:
    """A group of ranks.

    Args:
        run: of the check.
        size: number of ranks.
        groups: members of each group that is made. One of all ranks if left out.
        timeout: seconds after which a collective that a rank does not join raises an error.
        patience: seconds that the ranks have.
        batch_invariant: True if each number of a sum must not hang on the others.

    Raises:
        NotApplicable: if the machine has fewer devices, or the plugin joins fewer ranks.
    """

    def __init__(
        self,
        run: Run,
        size: int = 2,
        *,
        groups: Sequence[tuple[int, ...]] | None = None,
        timeout: float = TIMEOUT,
        patience: float = PATIENCE,
        batch_invariant: bool = False,
    ) -> None:
        refuse_size(run.subject, size)
        self.run, self.size = run, size
        self.groups = tuple(groups or (tuple(range(size)),))
        self.timeout, self.patience = timeout, patience
        self.batch_invariant = batch_invariant

    def perform(self, body: Callable[..., Any], *given: Sequence[Any]) -> list[Any]:
        """Return what a function of a module returns on each rank.

        Args:
            body: called on each rank with its `Joined`, and with its item of each of the lists.
            given: lists with an item for each rank.

        Raises:
            Failed: if a rank raises an error, ends, or does not return in time.
        """
        for _ in range(_ATTEMPTS):
            answers = self._answers(body, given)
            if len(answers) == self.size and all(not isinstance(one, Raised) for one in answers.values()):
                return [answers[number][0] for number in range(self.size)]
            if all(not isinstance(one, Raised) or one.joined for one in answers.values()):
                break
        for number, answer in answers.items():  # in order of time: the first error is the cause of others
            if isinstance(answer, Raised):
                raise Failed(f"rank {number} of {self.size}: {answer.text}\n{answer.trace}")
        missing = sorted(set(range(self.size)) - answers.keys())
        raise Failed(f"ranks {missing} of {self.size} did not return within {self.patience:g} s")

    def _answers(self, body: Callable[..., Any], given: Sequence[Sequence[Any]]) -> dict[int, Any]:
        ranks, file = _PROCESSES.need(self.size), _PROCESSES.file()
        for number, rank in enumerate(ranks):
            task = self._task(number, file, body, tuple(items[number] for items in given))
            rank.connection.send_bytes(pickle.dumps(task))
        answers = _answers(ranks, self.patience)
        if len(answers) < self.size:
            _PROCESSES.end()
        return answers

    def _task(self, rank: int, file: str, body: Callable[..., Any], given: tuple[Any, ...]) -> Task:
        subject = self.run.subject
        return Task(
            plugin=_sent(subject),
            body=body,
            given=given,
            file=file,
            rank=rank,
            size=self.size,
            device=device_of(subject, rank),
            groups=tuple((f"group {number}", ranks) for number, ranks in enumerate(self.groups)),
            timeout=self.timeout,
            batch_invariant=self.batch_invariant,
        )


def _answers(ranks: Sequence[_Process], patience: float) -> dict[int, Any]:
    """Return the ranks' answers, each in a tuple or as `Raised`, in the order in which they came."""
    answers: dict[int, Any] = {}
    waited: dict[Any, int] = {rank.connection: number for number, rank in enumerate(ranks)}
    until = time.monotonic() + patience
    while waited and (left := until - time.monotonic()) > 0:
        for connection in wait(list(waited), left):
            number = waited.pop(connection)
            try:
                found = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, OSError):
                found = Raised(f"the process ended with exit code {ranks[number].process.wait(5)}", "")
            answers[number] = found if isinstance(found, Raised) else (found,)
            if isinstance(found, Raised):
                until = min(until, time.monotonic() + _SETTLE)
    return answers


def _sent(subject: Subject) -> Any:
    """Return a subject in a form that another process can read."""
    if subject.target:
        return subject.target, subject.device.type, tuple(subject.settings.items())
    try:
        return pickle.dumps(subject)
    except Exception as error:
        raise NotApplicable(f"the plugin cannot be sent to another process: name it by a target ({error})") from error


def device_of(subject: Subject, rank: int) -> str:
    """Return the device of a rank. Ranks share a device in host memory."""
    kind = subject.device.type
    return kind if _in_host_memory(kind) else f"{kind}:{rank}"


def refuse_size(subject: Subject, size: int) -> None:
    """Raise `NotApplicable` if so many ranks cannot be joined here."""
    if (refusal := subject.capabilities.max_ranks.refusal(size)) is not None:
        raise NotApplicable(f"not declared: {size} ranks: {refusal}")
    kind = subject.device.type
    if not _in_host_memory(kind) and (there := _devices().count(kind)) < size:
        raise NotApplicable(f"{size} ranks need {size} devices {kind}, and there are {there}")


@cache
def _in_host_memory(kind: str) -> bool:
    from slotline.registry.discovery import PluginRegistry

    if kind == "cpu":
        return True
    descriptor = PluginRegistry.discover(tolerant=True).load(Kind.DEVICE, kind, required=True)
    return bool(descriptor.capabilities.host_memory.support)


@cache
def _devices() -> Any:
    from slotline.registry.devices import Devices
    from slotline.registry.discovery import PluginRegistry

    return Devices(PluginRegistry.discover(tolerant=True))


def by_size(subject: Subject) -> Iterable[Case]:
    """Return a case for each number of ranks that can be joined here."""
    return [{"ranks": size} for size in sizes_of(subject)]


def by_size_and_dtype(subject: Subject) -> Iterable[Case]:
    """Return a case for each number of ranks and each declared dtype."""
    return [{"ranks": size, "dtype": dtype} for size in sizes_of(subject) for dtype in dtypes_of(subject)]


def sizes_of(subject: Subject) -> list[int]:
    """Return the numbers of ranks that can be joined here.

    Raises:
        NotApplicable: if two cannot.
    """
    found: list[Any] = []
    for size in SIZES:
        try:
            refuse_size(subject, size)
        except NotApplicable:
            if not found:
                raise
        else:
            found.append(size)
    return found


def dtypes_of(subject: Subject) -> list[str]:
    """Return the declared dtypes of sums."""
    return [dtype for dtype in DTYPES if subject.capabilities.dtypes.refusal(dtype) is None]


@frozen
class Call:
    """Collective: for each rank the name of the method with its arguments, or None."""

    what: str
    given: tuple[tuple[str, tuple[Any, ...]] | None, ...]


def everywhere(name: str, tensors: Sequence[torch.Tensor], *rest: Any) -> Call:
    """Return the call of a method on all ranks, each with its own tensor and the same further arguments."""
    what = f"{name} of {tuple(tensors[0].shape)} {rest or ''}".rstrip()
    return Call(what, tuple((name, (tensor, *rest)) for tensor in tensors))


def sent(tensor: torch.Tensor, source: int, to: int, size: int) -> Call:
    """Return a tensor's way from one rank to another."""
    given: list[Any] = [None] * size
    given[source] = ("send", (tensor, to))
    given[to] = ("receive", (torch.zeros_like(tensor), source))
    return Call(f"from {source} to {to}", tuple(given))


def exchanged(tensors: Sequence[torch.Tensor], rows: Sequence[Sequence[int]]) -> Call:
    """Return an exchange. `rows[i][j]` is the number of rows from rank i to rank j."""
    received = list(zip(*rows, strict=True))
    given = zip(tensors, rows, received, strict=True)
    return Call(f"all_to_all of {rows}", tuple(("all_to_all", (x, tuple(to), tuple(of))) for x, to, of in given))


_MAY_OVERWRITE = ("all_reduce", "broadcast", "receive")


def make_calls(joined: Joined, calls: Sequence[tuple[str, tuple[Any, ...]] | None]) -> list[Any]:
    """Make a rank's calls, and return its results with what is wrong with them apart from the values."""
    results = list[Any]()
    for call in calls:
        if call is None:
            results.append(None)
            continue
        name, (x, *rest) = call
        own = x.clone().to(joined.device)
        found = getattr(joined.communicator, name)(own, *rest)
        if name == "all_to_all":
            found = found.finish()
        joined.wait()
        if name not in _MAY_OVERWRITE and not same_bits(own.cpu(), x):
            raise AssertionError(f"{name} changed its input")
        if name == "send":
            results.append(None)
        elif not isinstance(found, torch.Tensor) or found.device != own.device:
            raise AssertionError(f"{name} returned {type(found).__name__}, expected a tensor on {own.device}")
        else:
            results.append(found)
    if any(call is None or call[0] in ("send", "receive") for call in calls):
        joined.meet()
    return results


def check_calls(group: GroupUnderTest, calls: Sequence[Call]) -> None:
    """Make calls in one group of all ranks, and compare what each rank gets.

    Raises:
        Failed: naming the call and the rank.
    """
    results = group.perform(make_calls, [[call.given[rank] for call in calls] for rank in range(group.size)])
    for number, call in enumerate(calls):
        found = [result[number] for result in results]
        compare_call(group.run, call, found)


def compare_call(run: Run, call: Call, found: Sequence[torch.Tensor | None]) -> None:
    """Compare the ranks' results of a call with what it must give."""
    from slotline.testing.oracles import communicator as oracle

    wanted = oracle.results(call.given)
    for rank, (one, right) in enumerate(zip(found, wanted, strict=True)):
        what = f"{call.what}, rank {rank} of {len(found)}"
        if right is None or one is None:
            continue
        if one.shape != right.value.shape or one.dtype != right.dtype:
            raise Failed(f"{what}: {one.dtype} {tuple(one.shape)}, expected {right.dtype} {tuple(right.value.shape)}")
        if right.allowed is None:
            if not same_bits(one, right.value):
                raise Failed(f"{what}: other values than were given")
        else:
            _compare_sum(run, one, right.value, right.allowed, what)
    if call.given[0] is not None and call.given[0][0] == "all_reduce" and found[0] is not None:
        for rank, one in enumerate(found):
            if one is not None and not same_bits(one, found[0]):
                raise Failed(f"{call.what}: rank {rank} has other bits than rank 0")


def _compare_sum(run: Run, found: torch.Tensor, wanted: torch.Tensor, allowed: torch.Tensor, what: str) -> None:
    if not found.numel():
        return
    same = torch.isnan(found) & torch.isnan(wanted) | (found.double() == wanted)
    error = torch.where(same, 0.0, (found.double() - wanted).abs())
    ratio = torch.nan_to_num(error / allowed, nan=float("inf"), posinf=float("inf")).flatten()
    ratio = torch.where(same.flatten(), 0.0, ratio)
    worst = int(ratio.argmax())
    run.measure(
        error=float(error.flatten()[worst]), allowed=float(allowed.flatten()[worst]), what=f"{what}, number {worst}"
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def random_tensors(run: Run, size: int, shape: Sequence[int], dtype: str, salt: int = 0) -> list[torch.Tensor]:
    """Return a random tensor for each rank, with numbers of several magnitudes."""
    generator = torch.Generator().manual_seed(run.seed + salt)
    kind = getattr(torch, dtype)
    found = []
    for _ in range(size):
        if kind.is_floating_point and kind.itemsize > 1:
            x = torch.randn(tuple(shape), generator=generator) * torch.exp2(
                torch.randint(-3, 4, tuple(shape), generator=generator).float()
            )
            found.append(x.to(kind))
        else:
            high = 2 if kind is torch.bool else 1 << 62  # whose low bits go through
            found.append(torch.randint(0, high, tuple(shape), generator=generator).to(kind))
    return found
