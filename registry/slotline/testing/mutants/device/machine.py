"""Devices that are wrong about themselves, their names and their memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import attrs
import numpy.typing as npt
import torch

from slotline.core.device import TorchOps
from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.device import CopyStream, DeviceContext, DeviceMemory, PeakMemory
from slotline.registry.descriptor import DeviceInfo
from slotline.testing.check import Level
from slotline.testing.mutants import Mutant
from slotline.testing.mutants.device.making import mutant, of_device, of_ops
from slotline.testing.reference.device import Factory, HostDevice


class NoArgmax(TorchOps):
    argmax = None  # type: ignore[assignment]


class PositionalOnly(TorchOps):
    def apply_bitmask(self, logits: Any, words: Any, rows: Any) -> Any:  # type: ignore[override]
        return super().apply_bitmask(logits, words, rows)


class OldQueue:
    def scope(self) -> Any:
        raise NotImplementedError

    def wait_for_compute(self) -> None:
        """Wait for nothing."""

    def compute_waits(self) -> None:
        """Wait for nothing."""

    def record(self) -> Any:
        return None

    def wait(self, event: Any) -> None:
        """Wait for nothing."""


class WithOldQueue(HostDevice):
    def copy_stream(self) -> CopyStream:
        return OldQueue()  # type: ignore[return-value]


class SaysCpu(HostDevice):
    def info(self) -> DeviceInfo:
        return attrs.evolve(super().info(), type="cpu")


class NoTotal(HostDevice):
    def info(self) -> DeviceInfo:
        return attrs.evolve(super().info(), total_memory=0)


class FirstName(HostDevice):
    def __init__(self, context: DeviceContext) -> None:
        super().__init__(attrs.evolve(context, index=0))


class CountsUp(Factory):
    asked = 2

    def count(self) -> int:
        self.asked += 1
        return self.asked


class CountsNone(Factory):
    def count(self) -> int:
        return -1


class BareName(HostDevice):
    def __init__(self, context: DeviceContext) -> None:
        super().__init__(context)
        self.name = self.name if context.index is not None else f"{context.name}:7"


class NegativeMemory(HostDevice):
    def memory(self) -> DeviceMemory:
        return DeviceMemory(-1, super().memory().total)


class FreeAboveTotal(HostDevice):
    def memory(self) -> DeviceMemory:
        found = super().memory()
        return DeviceMemory(found.total + 1, found.total)


class TotalIsFree(HostDevice):
    taken = 0

    def memory(self) -> DeviceMemory:
        found = super().memory()
        return DeviceMemory(found.free // 2, found.total - self.taken)

    def zeros(self, num_bytes: int) -> torch.Tensor:
        self.taken += num_bytes
        return super().zeros(num_bytes)


class PeakBelowZero(HostDevice):
    def measure_peak(self) -> AbstractContextManager[PeakMemory]:
        return self._measured()

    @contextmanager
    def _measured(self) -> Iterator[PeakMemory]:
        with super().measure_peak() as found:
            yield found
        found.peak -= 1 << 40


class Unzeroed(HostDevice):
    def zeros(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 3, dtype=torch.uint8)


class Kept(HostDevice):
    pages = torch.zeros(0, dtype=torch.uint8)

    def zeros(self, num_bytes: int) -> torch.Tensor:
        if len(self.pages) < num_bytes:
            self.pages = super().zeros(num_bytes)
        return self.pages[:num_bytes]


class FloatZeros(HostDevice):
    def zeros(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes // 4)


class ReleasesAll(HostDevice):
    def zeros(self, num_bytes: int) -> torch.Tensor:
        found = super().zeros(num_bytes)
        self.given = [*getattr(self, "given", ()), found]
        return found

    def release_cached(self) -> None:
        for tensor in getattr(self, "given", ()):
            with suppress(RuntimeError):
                tensor.resize_(0)


class ByteHost(HostDevice):
    def host_empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count * dtype.itemsize, dtype=torch.uint8)


class Narrows(HostDevice):
    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        found = super().to_device(array)
        return found.float() if found.dtype == torch.float64 else found


class InMemoryOrder(HostDevice):
    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return super().to_device(array.ravel(order="K").reshape(array.shape) if array.flags.f_contiguous else array)


class SwallowsErrors(HostDevice):
    def scope(self) -> AbstractContextManager[Any]:
        return suppress(LookupError)


class AlwaysCapturing(HostDevice):
    def is_capturing(self) -> bool:
        return True


class CopiesAtTheEnd:
    """Queue whose copies run when its scope is left for the next time."""

    def __init__(self) -> None:
        self.late: list[Any] = []

    def scope(self) -> AbstractContextManager[Any]:
        return _Late(self.late)

    def wait_for_compute(self) -> None:
        """Wait for nothing."""

    def compute_waits(self) -> None:
        """Wait for nothing."""

    def record(self, *, copies: bool) -> Any:
        return None

    def wait(self, event: Any, *, copies: bool) -> None:
        """Wait for nothing."""


class _Late(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, late: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.late = late

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            for call in self.late:
                call()
            self.late[:] = [lambda: func(*args, **(kwargs or {}))]
            return args[0]
        return func(*args, **(kwargs or {}))


class LateCopies(HostDevice):
    def copy_stream(self) -> CopyStream:
        return CopiesAtTheEnd()


ALL: tuple[Mutant, ...] = (
    of_ops("no-argmax", "the table of operations has no argmax", Level.CONTRACT, NoArgmax),
    of_ops("bitmask-without-in-place", "apply_bitmask does not take in_place", Level.CONTRACT, PositionalOnly),
    of_device("old-queue", "record of a queue of copies takes no argument", Level.CONTRACT, WithOldQueue),
    of_device("says-cpu", "its facts are those of a CPU", Level.CONTRACT, SaysCpu),
    of_device("no-total", "its facts say that there is no memory", Level.CONTRACT, NoTotal),
    of_device("first-name", "every device is called the first", Level.CONTRACT, FirstName),
    of_device(
        "graphs-in-host-memory",
        "graphs are declared, and uploads that have no address",
        Level.CONTRACT,
        HostDevice,
        graphs=Flag(True),
        host_memory=Flag(True),
    ),
    of_device(
        "dtype-of-nothing", "declares a dtype that torch lacks", Level.NUMERICS, HostDevice, dtypes=Set(("float33",))
    ),
    mutant("counts-up", "any number is taken, one more each time", Level.CONTRACT, CountsUp()),
    mutant("counts-none", "the number of devices is -1", Level.CONTRACT, CountsNone()),
    of_device("bare-name", "the bare name means a device that is not there", Level.CONTRACT, BareName),
    of_device("negative-memory", "free memory is negative", Level.NUMERICS, NegativeMemory),
    of_device("free-above-total", "more memory is free than there is", Level.NUMERICS, FreeAboveTotal),
    of_device("total-is-free", "the total shrinks as memory is taken", Level.NUMERICS, TotalIsFree),
    of_device("peak-below-zero", "the peak of work is negative", Level.NUMERICS, PeakBelowZero),
    of_device("unzeroed", "memory for caches holds something", Level.NUMERICS, Unzeroed),
    of_device("kept-zeros", "memory for caches is the same each time", Level.NUMERICS, Kept),
    of_device("float-zeros", "memory for caches is float32", Level.NUMERICS, FloatZeros),
    of_device("releases-all", "memory that is in use is given back", Level.NUMERICS, ReleasesAll),
    of_device("byte-host", "host memory is of bytes, whatever was asked", Level.NUMERICS, ByteHost),
    of_device("narrows", "float64 arrays arrive as float32", Level.NUMERICS, Narrows),
    of_device("in-memory-order", "arrays with columns first arrive turned", Level.NUMERICS, InMemoryOrder),
    of_device("always-capturing", "says that it captures, always", Level.NUMERICS, AlwaysCapturing),
    of_device("swallows-errors", "errors end in its scope", Level.HOSTILE, SwallowsErrors),
    of_device("late-copies", "a queue's copies run with the next ones", Level.HOSTILE, LateCopies),
)
