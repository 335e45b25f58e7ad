"""Start of the other ranks of one machine, by torch's own launcher."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from attrs import define
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from slotline.ranks.messages import pickled
from slotline.registry.config import LoadedConfig
from slotline.registry.errors import ConfigError, RankError
from slotline.registry.loading import one_line
from slotline.registry.ranks import Place

if TYPE_CHECKING:  # an engine of one process does without the launcher
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
CONFIG = "slotline/config"
"""Key of the store that has the configuration, pickled."""
TOLD = "slotline/told"
"""Key of the store that has what else a program of ranks is told, pickled."""
FOLLOWER = "slotline.ranks.follower"


@define(eq=False)
class Launched:
    """Processes that this one started.

    Attributes:
        context: torch's handle on them.
        name: what each is, as an error names it.
        first: number of the first.
    """

    context: SubprocessContext
    name: str = "rank"
    first: int = 1

    def ended(self) -> str | None:
        """Return what happened to a process that has ended, None while all run."""
        for index in self.context.subprocess_handlers:
            if (text := self.exit_of(index)) is not None:
                return f"{self.name} {index + self.first} has ended: {text}"
        return None

    def exit_of(self, index: int) -> str | None:
        """Return how the process of an index, from 0, has ended. None while it runs."""
        code = self.context.subprocess_handlers[index].proc.poll()
        return None if code is None else exit_text(code)

    def pid_of(self, index: int) -> int:
        """Return the id of the process of an index."""
        return int(self.context.subprocess_handlers[index].proc.pid)

    def end(self, patience: float = 0.0) -> None:
        """End the processes, after this many seconds in which they may end by themselves."""
        until = time.monotonic() + patience
        processes = [handler.proc for handler in self.context.subprocess_handlers.values()]
        for process in processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for process in processes:
            process.wait()
        self.context.close(signal.SIGKILL)


def start_others(
    place: Place, loaded: LoadedConfig, timeout: float, program: str = FOLLOWER, told: object = None
) -> tuple[Launched, Store]:
    """Start the other ranks of this machine that serve the same requests, and return them with the store they reach.

    Args:
        program: module that they run.
        told: what it finds in the store at `TOLD`.

    Raises:
        ConfigError: if the configuration cannot be sent to another process.
        RankError: if they cannot be started.
    """
    sent = packed(loaded)
    wait = timedelta(seconds=timeout)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)
    store.set(CONFIG, sent.hex())
    if told is not None:
        store.set(TOLD, pickle.dumps(told).hex())
    size = place.layout.replica_size
    environments = {
        rank - 1: environment_with(
            RANK=str(rank),
            LOCAL_RANK=str(place.local_rank + rank),
            WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(store.port),
        )
        for rank in range(1, size)
    }
    return start_programs(program, environments), store


def environment_with(**own: str) -> dict[str, str]:
    """Return the variables of a process that imports what this one does, with some of its own."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # this process says the same
        **own,
    }


def start_programs(
    module: str, environments: dict[int, dict[str, str]], name: str = "rank", first: int = 1
) -> Launched:
    """Start a module as a program, once for each environment. Its argument is the id of this process.

    Args:
        module: its name.
        environments: all variables of each process, by its index from 0.
        name: what each process is, as an error names it.
        first: number of the first.

    Raises:
        RankError: if they cannot be started.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    try:
        with _quietly():
            context = start_processes(
                name="slotline",
                entrypoint=sys.executable,
                args=dict.fromkeys(environments, ("-m", module, str(os.getpid()))),
                envs=environments,
                logs_specs=DefaultLogsSpecs(),
            )
    except OSError as error:
        raise RankError(
            f"the {'other ' if first else ''}{name}s cannot be started: {error}", fix="free memory or processes"
        ) from error
    assert isinstance(context, SubprocessContext)
    return Launched(context, name, first)


def packed(loaded: LoadedConfig) -> bytes:
    """Return a configuration as it is sent to other processes.

    Raises:
        ConfigError: if it cannot be sent.
    """
    try:
        return pickled(loaded)
    except Exception as error:
        raise ConfigError(
            f"this configuration cannot be sent to other processes: {one_line(error)}",
            fix="write the settings into a TOML file, with plugins by name",
        ) from error


def exit_text(code: int) -> str:
    """Return what an exit code says."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep this process' handlers of signals, since torch sets its own, and torch's warning where it cannot."""
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    logger = logging.getLogger(SubprocessContext.__module__)
    level, main = logger.level, threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _HANDLED} if main else {}
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        for number, handler in handlers.items():
            if handler is not None:  # of another language
                signal.signal(number, handler)
