"""Process of one rank under test.

Its argument is the file descriptor of a connection, which brings tasks and takes answers. The process ends with it.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
from attrs import frozen
from torch import distributed

from slotline.registry.contracts import Communicator, CommunicatorContext
from slotline.testing.subject import Subject, subject_of

READY = b"ready"
_JOIN_TIMEOUT = timedelta(seconds=30)


@frozen(kw_only=True)
class Task:
    """Work of one rank.

    Attributes:
        plugin: the pickled subject, or its target, device type and settings.
        body: function of a module, called with `Joined` and `given`.
        file: of the store that joins the ranks, which is new.
        rank, size: place in the default process group.
        device: torch device of the rank.
        groups: name and ranks of each group that is made.
        timeout, batch_invariant: of the context.
    """

    plugin: bytes | tuple[str, str, tuple[tuple[str, Any], ...]]
    body: Callable[..., Any]
    given: tuple[Any, ...]
    file: str
    rank: int
    size: int
    device: str
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    timeout: float
    batch_invariant: bool


@frozen(kw_only=True)
class Joined:
    """One rank with its communicators.

    Attributes:
        rank: place in the default process group.
        device: torch device.
        groups: by the number of the group; None where this rank is no member.
        again: makes a group anew.
    """

    rank: int
    device: torch.device
    groups: tuple[Communicator | None, ...]
    again: Callable[[int], Communicator]

    @property
    def communicator(self) -> Communicator:
        """First group of this rank."""
        return next(group for group in self.groups if group is not None)

    def say(self, what: str) -> None:
        """Let the other ranks know of something."""
        distributed.distributed_c10d._get_default_store().set(what, "")

    def hear(self, what: str) -> None:
        """Wait until a rank has said something."""
        distributed.distributed_c10d._get_default_store().wait([what], _JOIN_TIMEOUT)

    def meet(self) -> None:
        """Wait for the other ranks: one that leaves early ends what others still receive of it."""
        with suppress(RuntimeError):  # of a rank that failed and is gone
            distributed.barrier()

    def wait(self) -> None:
        """Wait until the device has done its work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


@frozen
class Raised:
    """An error of a rank.

    Attributes:
        joined: False if the ranks did not find each other, which is no fault of the plugin.
    """

    text: str
    trace: str
    joined: bool = True


class NotJoined(Exception):  # noqa: N818  the ranks are joined anew
    """The ranks did not find each other."""


@cache
def _subject(plugin: bytes | tuple[str, str, tuple[tuple[str, Any], ...]]) -> Subject:
    if isinstance(plugin, bytes):
        subject: Subject = pickle.loads(plugin)
        return subject
    target, device, settings = plugin
    return subject_of(target, device=device, options=dict(settings))


def perform(task: Task) -> Any:
    """Join the ranks, make the groups and return what the body returns, with tensors on the CPU."""
    device = torch.device(task.device)
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    store = distributed.FileStore(task.file, task.size)  # type: ignore[attr-defined]
    try:
        distributed.init_process_group("gloo", store=store, rank=task.rank, world_size=task.size, timeout=_JOIN_TIMEOUT)
        distributed.barrier()  # a rank that leaves early would end the joining of the others
    except RuntimeError as error:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        distributed.distributed_c10d._world.group_count = 0  # as the other ranks count
        raise NotJoined(str(error)) from error
    made: list[Communicator] = []

    def make(number: int) -> Communicator:
        name, ranks = task.groups[number]
        context = CommunicatorContext(
            contract=1,
            name=name,
            ranks=ranks,
            rank=ranks.index(task.rank),
            device=task.device,
            timeout=task.timeout,
            batch_invariant=task.batch_invariant,
        )
        communicator: Communicator = _subject(task.plugin).build(context)
        made.append(communicator)
        return communicator

    try:
        groups = tuple(make(number) if task.rank in ranks else None for number, (_, ranks) in enumerate(task.groups))
        joined = Joined(rank=task.rank, device=device, groups=groups, again=make)
        found = _on_host(task.body(joined, *task.given))
        joined.wait()
        return found
    finally:
        for communicator in made:
            with suppress(Exception):  # a check of its own looks at it
                communicator.close()
        distributed.destroy_process_group()


def _on_host(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return found.cpu()
    if isinstance(found, (list, tuple)):
        return type(found)(_on_host(item) for item in found)
    return found


def main() -> None:
    """Do tasks until the connection is closed."""
    torch.set_num_threads(1)
    connection = Connection(int(sys.argv[1]))
    connection.send_bytes(READY)
    tasks: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, tasks), daemon=True).start()
    while True:
        text = tasks.get()
        try:
            answer = perform(pickle.loads(text))
        except BaseException as error:
            joined = not isinstance(error, NotJoined)
            answer = Raised(f"{type(error).__name__}: {error}", traceback.format_exc(), joined)
        connection.send_bytes(pickle.dumps(answer))


def _listen(connection: Connection, tasks: SimpleQueue[bytes]) -> None:
    while True:
        try:
            tasks.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # a rank that waits for another cannot be told
