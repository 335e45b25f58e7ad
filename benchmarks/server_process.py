"""A server as a process of its own, on a core of its own, and what the system says of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
from attrs import define
from raw_client import ask_once, post

SERVE = (sys.executable, "-c", "import sys; from slotline.cli import main; sys.exit(main())", "serve")


@define(eq=False)
class ServerProcess:
    """A serving process.

    Attributes:
        port: on 127.0.0.1.
    """

    port: int
    process: psutil.Process

    def cpu_time(self) -> float:
        """Return the seconds of CPU time that the process took."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def server_process(command: Sequence[str], core: int | None = None, **variables: str) -> Iterator[ServerProcess]:
    """Start a command with `--port N` behind it, and end it with SIGTERM.

    Args:
        core: that it may use, None for all.
        variables: of its environment.

    Raises:
        RuntimeError: with the end of what it said, if it ends before it answers, or does not answer.
    """
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        environment = {**os.environ, **variables}
        started = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=environment)
        try:
            if core is not None:
                os.sched_setaffinity(started.pid, {core})
            if not _answers(port, started):
                log.seek(0)
                raise RuntimeError(f"no server came of {command}:\n{log.read()[-4000:].decode(errors='replace')}")
            yield ServerProcess(port, psutil.Process(started.pid))
        finally:
            started.terminate()
            started.wait(60)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _answers(port: int, process: subprocess.Popen[bytes]) -> bool:
    """Return whether a request is answered, at most after five minutes."""
    for _ in range(3000):
        if process.poll() is not None:
            return False
        try:
            ask_once(port, post("/none", b""))
            return True
        except OSError:
            time.sleep(0.1)
    return False


@contextmanager
def own_cores() -> Iterator[int | None]:
    """Keep this process on the first core, and give another one for the server, None if there is none."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        yield None
        return
    os.sched_setaffinity(0, {cores[0]})
    try:
        yield cores[-1]
    finally:
        os.sched_setaffinity(0, set(cores))
