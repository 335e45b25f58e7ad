"""Packed weights in huge pages on a CPU, where products read them faster.

A decode step reads every weight once, and in pages of four KiB the processor looks up an address for every 64 lines.
Weights are copied, one after the other, into memory for which the system is asked for huge pages. oneDNN's layout stays
as it is: torch makes a tensor of it from memory and the layout's description. Some weights are timed in both places
first, and all stay where they are if the copies are not faster.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from slotline.plugins.model_families.passes.packed_linear import PackedLinear
from slotline.plugins.model_families.passes.target import Target
from slotline.registry.loading import one_line

SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
PLACE = 4096
"""A weight begins at a multiple of so many bytes."""
FEWEST_BYTES = 1 << 21
"""Bytes of all weights below which nothing is tried."""
SAMPLE_BYTES = 1 << 26
"""Bytes of weights that are timed, so that no cache holds them."""
TURNS = 4
"""Passes over the sample in each place, in turn, of which the fastest counts."""


class Room:
    """Private memory for which huge pages are asked.

    Args:
        size: bytes.
        page: bytes of a huge page.

    Raises:
        OSError: if the system does not give it.
    """

    def __init__(self, size: int, page: int) -> None:
        self._memory = mmap.mmap(-1, size + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._start, self._first = start, -start % page
        self._taken = self._first

    def copy(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy of a weight in this memory, which must be kept while the copy lives.

        Raises:
            AttributeError, RuntimeError: if torch cannot make such a tensor.
        """
        begin, opaque = self._taken, weight.layout == torch._mkldnn  # type: ignore[attr-defined]
        size = int(torch.ops.mkldnn._nbytes(weight)) if opaque else weight.nbytes
        self._taken += -(-size // PLACE) * PLACE
        if not opaque:
            part = torch.frombuffer(self._memory, dtype=weight.dtype, count=weight.numel(), offset=begin)
            return part.view(weight.shape).copy_(weight)
        ctypes.memmove(self._start + begin, int(torch.ops.mkldnn.data_ptr(weight)), size)
        return _opaque_tensor(weight, self._start + begin)

    def given(self) -> int:
        """Return the bytes that are in huge pages, 0 where the system does not say it."""
        found, inside = 0, False
        try:
            lines = Path("/proc/self/smaps").read_text().splitlines()
        except OSError:
            return 0
        for line in lines:
            first = line.split(maxsplit=1)[0]
            if not first.endswith(":"):
                low, _, high = first.partition("-")
                inside = int(low, 16) <= self._start + self._taken - 1 and int(high, 16) > self._start
            elif inside and first == "AnonHugePages:":
                found += int(line.split()[1]) << 10
        return min(found, self._taken - self._first)


def _opaque_tensor(like: torch.Tensor, address: int) -> torch.Tensor:
    """Return a tensor in oneDNN's layout of the bytes at an address, with the layout's description of another one."""
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
    described = bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(like).numpy())
    sizes, strides = (ctypes.c_int64 * 2)(*like.shape), (ctypes.c_int64 * 2)(like.shape[1], 1)
    kind = getattr(library, f"aoti_torch_dtype_{str(like.dtype).removeprefix('torch.')}")()
    handle, word, number = ctypes.c_void_p(), ctypes.c_int64, ctypes.c_int32
    make = library.aoti_torch_create_tensor_from_blob_v2
    make.argtypes = [ctypes.c_void_p, word, ctypes.c_void_p, ctypes.c_void_p, word, number, number, number]
    make.argtypes += [ctypes.c_void_p, number, ctypes.c_char_p, word]
    error = make(
        *(address, 2, sizes, strides, 0, kind, library.aoti_torch_device_type_cpu(), 0, ctypes.byref(handle)),
        *(library.aoti_torch_layout__mkldnn(), described, len(described)),
    )
    if error:
        raise RuntimeError("torch makes no tensor in oneDNN's layout of given memory")
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    taken: torch.Tensor = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(capsule(handle.value, None, None))
    return taken


def page_bytes() -> int:
    """Return the bytes of a huge page that a program may ask for, 0 where there are none."""
    try:
        allowed = (SYSTEM / "enabled").read_text()
        size = int((SYSTEM / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0
    return size if "[never]" not in allowed and hasattr(mmap, "MADV_HUGEPAGE") else 0


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Copy all packed weights into huge pages if products read them faster there."""
    linears = [module for module in model.modules() if isinstance(module, PackedLinear)]
    if not target.packs or not linears:
        return ()
    if any(linear.packed.is_meta for linear in linears):
        return ("weights in pages of the usual size: they were saved after the passes",)
    size, page = sum(-(-_bytes(linear) // PLACE) * PLACE for linear in linears), page_bytes()
    if size < max(page, FEWEST_BYTES):
        return ()
    if not page:
        return ("weights in pages of the usual size: the system gives no huge ones",)
    try:
        room = Room(size, page)
        sample = _sample(linears)
        copies = [room.copy(linear.packed) for linear in sample]
        dense = copies[0] if sample[0].way.layout == "plain" else copies[0].to_dense()
        if not torch.equal(dense, sample[0].weight):
            return ("weights in pages of the usual size: a copy differs",)
    except (OSError, AttributeError, RuntimeError, StopIteration) as error:
        return (f"weights in pages of the usual size: {one_line(error)}",)
    ratio = _ratio(sample, copies)
    if ratio <= 1:
        return (f"weights in pages of the usual size: {ratio:.2f} times the speed in huge ones",)
    for linear, copy in zip(sample, copies, strict=True):
        linear.move(copy, room)
    for linear in linears[len(sample) :]:
        linear.move(room.copy(linear.packed), room)
    given = f"{room.given() >> 20} of {size >> 20} MiB"
    return (f"weights in huge pages, {given} so far: {ratio:.2f} times the speed for one row",)


def _bytes(linear: PackedLinear) -> int:
    packed = linear.packed
    return packed.nbytes if linear.way.layout == "plain" else int(torch.ops.mkldnn._nbytes(packed))


def _sample(linears: Sequence[PackedLinear]) -> Sequence[PackedLinear]:
    """Return the first layers, up to `SAMPLE_BYTES`."""
    total = 0
    for count, linear in enumerate(linears, 1):
        total += _bytes(linear)
        if total >= SAMPLE_BYTES:
            return linears[:count]
    return linears


def _ratio(linears: Sequence[PackedLinear], copies: Sequence[torch.Tensor]) -> float:
    """Return how many times as fast one row is multiplied by all weights where the copies are."""
    inputs = {linear.in_features: torch.ones(1, linear.in_features, dtype=linear.packed.dtype) for linear in linears}
    places = [linear.packed for linear in linears], copies
    best = [float("inf")] * 2
    with torch.inference_mode():
        for _ in range(TURNS):
            for index, weights in enumerate(places):
                for linear, weight in zip(linears, weights, strict=True):
                    linear.packed = weight
                start = perf_counter()
                for linear in linears:
                    PackedLinear.forward(linear, inputs[linear.in_features])
                best[index] = min(best[index], perf_counter() - start)
    for linear, weight in zip(linears, places[0], strict=True):
        linear.packed = weight
    return best[0] / best[1]
