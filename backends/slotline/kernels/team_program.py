"""Operations that a team of threads runs one after another in one call, compiled by numba.

Between kernels that take microseconds, a call from Python takes as long as they do, and starting the team again for
each does too. A program is started once: every thread runs its share of each operation, and waits for the others where
the next one needs their results. An operation is a C function of the address of whole numbers, of 64 bits, which asks
OpenMP for the thread's place by itself.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from attrs import frozen
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from slotline.kernels.numba_cache import cached_cfunc
from slotline.kernels.torch_threads import Team, torch_team

SIGNATURE = types.void(types.CPointer(types.int64))
CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_COUNT, _BARRIER, _FIRST = range(3)
"""Words of a program: the number of operations, the address of what a thread waits by, 0 for one thread, then three
words of each operation: the address of its function, of what it is told, and 1 if its results are waited for."""


@frozen
class Operation:
    """One operation.

    Attributes:
        address: of a C function ``void(int64_t *)``.
        told: the numbers that it is told.
        waits: whether the next operation reads what other threads wrote here.
    """

    address: int
    told: tuple[int, ...]
    waits: bool = True


@intrinsic
def _call(typingctx: Any, address: Any, told: Any) -> Any:
    """Call the C function ``void(int64_t *)`` at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(64)]).as_pointer()
        builder.call(builder.inttoptr(args[0], function), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@cache
def _runner() -> tuple[int, Any]:
    """Return the address of the function that runs a program in one thread, and how to call it."""

    def run(program_at):  # type: ignore[no-untyped-def]
        program = carray(program_at, (1 << 60,))
        for index in range(program[_COUNT]):
            at = _FIRST + 3 * index
            _call(program[at], program[at + 1])
            if program[at + 2] != 0 and program[_BARRIER] != 0:
                _call(program[_BARRIER], 0)

    address: int = cached_cfunc(SIGNATURE, run).address
    return address, CALL(address)


def team_of(threads: int) -> Team | None:
    """Return the team that programs of so many threads run in, None for one thread."""
    return torch_team() if threads > 1 else None


class Program:
    """A program in memory, whose numbers may be changed between two runs.

    Args:
        operations: in order.
        threads: of the team. More than one need `torch_threads.torch_team`.

    Attributes:
        words: all numbers, int64.
        told: where in `words` each operation's numbers begin.
    """

    def __init__(self, operations: Sequence[Operation], threads: int) -> None:
        self._team, self._threads = team_of(threads), threads
        at = _FIRST + 3 * len(operations)
        self.told: list[int] = []
        for operation in operations:
            self.told.append(at)
            at += len(operation.told)
        self.words = np.zeros(at, np.int64)
        self._at = self.words.ctypes.data
        self.words[_COUNT] = len(operations)
        self.words[_BARRIER] = 0 if self._team is None else self._team.barrier
        for index, (operation, begin) in enumerate(zip(operations, self.told, strict=True)):
            place = _FIRST + 3 * index
            self.words[place : place + 3] = operation.address, self._at + 8 * begin, operation.waits
            self.words[begin : begin + len(operation.told)] = operation.told

    def run(self) -> None:
        """Run all operations."""
        address, call = _runner()
        if self._team is None:
            call(self._at)
        else:
            self._team.run(address, self._at, self._threads)


def runs_programs() -> bool:
    """Return True if programs run with as many threads as torch has."""
    return torch.get_num_threads() == 1 or torch_team() is not None
