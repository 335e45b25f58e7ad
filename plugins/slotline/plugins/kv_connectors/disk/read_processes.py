"""Processes that read files of blocks into rows of shared memory, beside the steps or while there are none."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slotline.plugins.kv_connectors.disk import file_reader
from slotline.plugins.kv_connectors.disk.block_file import named
from slotline.plugins.kv_connectors.disk.file_reader import FAULTS, JOB, RESULT
from slotline.plugins.kv_connectors.stores.block_store import Counts, Fault, Key, Place, Read

if TYPE_CHECKING:
    from slotline.plugins.kv_connectors.disk.store import DiskStore

LOWEST = 19
"""Niceness of the process that reads while steps run: it gets what they leave of the processors, and no more than an
eightieth of one that they use."""


class ReadProcesses:
    """Two processes, started when they are first needed. Implements `RowReaders`.

    Args:
        store: whose files are read.
        memory: handle of the memory that the rows lie in.
        counts: what happened.
    """

    def __init__(self, store: DiskStore, memory: int, counts: Counts) -> None:
        self._store, self._memory, self._counts = store, memory, counts
        self._processes: dict[bool, _Process] = {}  # by whether steps run
        self._asked: dict[int, str] = {}  # by number: name of the file
        self.works = True

    def ask(self, places: Sequence[tuple[int, Key, Place]], *, beside: bool) -> None:
        if beside not in self._processes:
            try:
                self._processes[beside] = _Process(self._store.root, self._memory, LOWEST if beside else 0)
            except OSError as error:
                self._lose("cannot be started", error)
        jobs = list[bytes]()
        for number, key, place in places:
            name = self._store.name(key)
            self._asked[number] = name
            told = os.fsencode(name)
            jobs += (JOB.pack(number, *place, *named(key, self._store.identity), len(told)), told)
        if self.works:
            self._processes[beside].send(b"".join(jobs))

    def poll(self) -> list[tuple[int, Read]]:
        found = list[tuple[int, Read]]()
        for process in list(self._processes.values()):
            for number, fault, code in process.results():
                found.append((number, self._result(self._asked.pop(number), FAULTS[fault], code)))
            if process.has_ended:
                self._lose("has ended", process.code)
        return found

    def lost(self) -> list[int]:
        """Return the numbers of what no process will read any more, since one has ended. Call it behind `poll`."""
        if self.works:
            return []
        gone = list(self._asked)
        self._asked.clear()
        return gone

    def _result(self, name: str, fault: str, code: int) -> Read:
        """Take note of what was wrong with a file, and return it."""
        if fault == Fault.UNREADABLE.value:
            return OSError(code, os.strerror(code), name)
        if fault:
            self._store.found_fault(name, Fault(fault))
        return Fault(fault) if fault else None

    def _lose(self, what: str, why: object) -> None:
        """Do without processes from now on."""
        if self.works:
            self._counts.fault("no_reader", f"the process that reads {what} (%s): threads of this one read", why)
        self.works = False
        for process in self._processes.values():
            process.stop()
        self._processes.clear()


class _Process:
    """A process that runs `file_reader`.

    Args:
        folder: of the files.
        memory: handle of the rows' memory.
        niceness: of the process, beside that of this one.

    Raises:
        OSError: if it cannot be started.
    """

    def __init__(self, folder: Path, memory: int, niceness: int) -> None:
        if not sys.executable:
            raise OSError("the path of the interpreter is not known")
        program = str(Path(file_reader.__file__).resolve())
        command = [sys.executable, "-E", "-s", "-S", program, str(folder), str(memory), str(niceness)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, pass_fds=[memory]
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._in, self._out = process, process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)
        self._unsent, self._came = b"", b""
        self.has_ended = False
        self.stop = weakref.finalize(self, _stop, process)

    @property
    def code(self) -> int | None:
        """Return the exit code of a process that has ended."""
        return self._process.wait()

    def send(self, jobs: bytes) -> None:
        """Tell the process of jobs, as much as it takes now. The rest follows with the next call."""
        self._unsent += jobs
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._in, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.has_ended = True

    def results(self) -> list[tuple[int, int, int]]:
        """Return what has been read since the last call: numbers, faults, and the system's numbers of them."""
        if self._unsent:
            self.send(b"")
        try:
            data = os.read(self._out, 2**16)
            self.has_ended = not data
            self._came += data
        except BlockingIOError:
            pass
        whole = len(self._came) // RESULT.size * RESULT.size
        data, self._came = self._came[:whole], self._came[whole:]
        return [(number, fault, code) for number, fault, code in RESULT.iter_unpack(data)]


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process, whatever it does, and wait for it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.kill()
    process.wait()
