"""A device under test, and tensors on it that lie where wrong reads and writes are seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.registry.config.load import load_config
from slotline.registry.config.plugin_tables import options_path
from slotline.registry.contracts.device import Device, DeviceContext, DeviceOps, TransferBuffer
from slotline.registry.descriptor import Kind
from slotline.registry.devices import Devices
from slotline.registry.discovery import PluginRegistry
from slotline.registry.records import PluginRecord, PluginState
from slotline.testing.check import Failed, NotApplicable, Run
from slotline.testing.subject import Subject

Array = npt.NDArray[Any]
LAYOUTS = ("padded", "offset", "spread", "turned")
"""Layouts of a tensor: rows of wider rows, an address that is a multiple of one element only, every second element,
and columns first."""
GUARD = 16
"""Elements behind every tensor that nothing may touch."""
POISON = 42
"""Value of elements that no operation may read, for integers. It is NaN for floats."""
DTYPES = (np.float32, np.float64, np.float16, np.int64, np.int32, np.int16, np.uint8, np.bool_)


@frozen(eq=False)
class Laid:
    """Tensor and the memory that it is a part of, [elements]."""

    tensor: torch.Tensor
    whole: torch.Tensor

    def touched_outside(self) -> bool:
        """Return True if an element beside the tensor was written."""
        memory = self.whole.cpu().clone()
        memory.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()).fill_(
            poison(memory.numpy().dtype)
        )
        found = memory.numpy()
        return found.tobytes() != np.full(len(found), poison(found.dtype), found.dtype).tobytes()


class DeviceUnderTest:
    """Device that the subject makes, and its operations."""

    def __init__(self, run: Run, index: int | None = None) -> None:
        self.device: Device = run.subject.build(context_of(run.subject, index))
        self.ops: DeviceOps = self.device.ops
        self.torch_device = torch.device(self.device.torch_device)
        self.rng = np.random.default_rng(run.seed)

    def lay(self, array: Array, layout: str = "plain") -> Laid:
        """Return an array as a tensor on the device, in one of `LAYOUTS` or contiguous."""
        offset, strides = _strides(array.shape, layout)
        size = offset + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True)) + 1 + GUARD
        whole = np.full(max(size, GUARD + offset), poison(array.dtype), array.dtype)
        if array.size:
            steps = [stride * array.itemsize for stride in strides]
            np.lib.stride_tricks.as_strided(whole[offset:], array.shape, steps)[...] = array
        memory = torch.from_numpy(whole).to(self.torch_device, copy=True)
        return Laid(memory.as_strided(array.shape, strides, offset), memory)

    def put(self, array: Array) -> torch.Tensor:
        """Return an array as a contiguous tensor on the device, copied by torch."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.torch_device, copy=True)

    def host(self, tensor: torch.Tensor) -> Array:
        """Return a copy of a tensor on the host, once all that was launched is over."""
        self.device.synchronize()
        found: Array = tensor.cpu().clone().numpy()
        return found

    def buffer(self, num_bytes: int = 1 << 16) -> TransferBuffer:
        """Return a transfer buffer with room for `num_bytes`."""
        buffer = self.device.transfer_buffer()
        buffer.reserve(num_bytes)
        return buffer

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Make the device the current one, as an engine does in a step."""
        with torch.inference_mode(), self.device.scope():
            yield

    def expect_tensor(self, found: Any, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> torch.Tensor:
        """Raise `Failed` unless an object is a tensor of this shape and dtype on the device, and return it."""
        if not isinstance(found, torch.Tensor):
            raise Failed(f"{what} is {found!r:.80}, expected a tensor")
        given = f"{found.dtype} {list(found.shape)} on {found.device}"
        here = found.device.type == self.torch_device.type
        if (tuple(found.shape), found.dtype) != (shape, dtype) or not here:
            raise Failed(f"{what} is {given}, expected {dtype} {list(shape)} on {self.torch_device}")
        return found


def context_of(subject: Subject, index: int | None = None) -> DeviceContext:
    """Return the arguments of the factory for one device string."""
    return DeviceContext(contract=1, name=subject.name, index=index, options=subject.options)


def devices_of(subject: Subject) -> Devices:
    """Return the engine's own resolution of device strings, which knows the subject and no other device."""
    row = PluginRecord(
        kind=Kind.DEVICE,
        name=subject.name,
        value=subject.target or "under test",
        state=PluginState.LOADED,
        descriptor=subject.descriptor,
        inline=True,
    )
    path = options_path(Kind.DEVICE, subject.name)
    values = {".".join((*path, key)): value for key, value in subject.settings.items()}
    return Devices(PluginRegistry([row]), load_config(values=values, environ={}))


def in_host_memory(under_test: DeviceUnderTest) -> bool:
    """Return True if the device's tensors are the host's."""
    return under_test.torch_device.type == "cpu"


def needs_copies(subject: Subject) -> None:
    """Raise `NotApplicable` for a device whose uploads are views of the host's arrays."""
    if subject.capabilities.host_memory.support:
        raise NotApplicable("declared: host memory, so that nothing is copied")


def poison(dtype: np.dtype[Any]) -> Any:
    """Return the value of elements that must not be read."""
    if dtype.kind == "b":
        return True
    return np.nan if dtype.kind == "f" else POISON


def same(expected: Array, found: Array, what: str) -> None:
    """Raise `Failed` unless two arrays of one shape are equal, where NaN equals NaN."""
    if expected.shape != found.shape:
        raise Failed(f"{what}: {list(found.shape)}, expected {list(expected.shape)}")
    alike = expected == found
    if expected.dtype.kind == "f":
        alike = alike | (np.isnan(expected) & np.isnan(found))
    if not alike.all():
        place = tuple(int(axis[0]) for axis in np.nonzero(~alike))
        raise Failed(
            f"{what}: {found[place]} at {list(place)}, expected {expected[place]}; "
            f"{int((~alike).sum())} of {alike.size} differ"
        )


def same_all(expected: Mapping[str, Array], found: Mapping[str, Array], what: str) -> None:
    """Raise `Failed` unless all arrays are equal, by name."""
    for name, array in expected.items():
        same(array, found[name], f"{what}: {name}")


def nan_rows(logits: Array) -> Array:
    """Return which rows [n] bool of logits [n, vocab_size] hold NaN."""
    return np.asarray(np.isnan(logits).any(axis=1))


def random_array(rng: np.random.Generator, dtype: Any, shape: tuple[int, ...]) -> Array:
    """Return random values of any dtype."""
    found: Array = rng.integers(0, 2 if dtype is np.bool_ else 100, shape).astype(dtype)
    return found


def _strides(shape: tuple[int, ...], layout: str) -> tuple[int, list[int]]:
    """Return the offset and the strides, in elements."""
    step = {"spread": 2}.get(layout, 1)
    gap = {"padded": 5, "spread": 3, "turned": 3}.get(layout, 0)
    sizes = shape[::-1] if layout != "turned" else shape
    strides, extent = list[int](), step
    for place, size in enumerate(sizes):
        strides.append(extent)
        extent = extent * max(size, 1) + (gap if place == 0 else 0)
    if layout == "turned":
        return 0, [3] if len(shape) == 1 else strides
    return 3 if layout == "offset" else 0, strides[::-1]
