"""Memory: figures, zeroed memory, host memory, small arrays, dtypes."""

from __future__ import annotations

import numpy as np
import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.device import DTYPES, DeviceUnderTest, in_host_memory, random_array, same

WORK = 16 << 20
"""Bytes whose peak is measured."""
SIZES = (0, 1, 15, 4096, 100_003)


@check(Kind.DEVICE, "device.memory.figures", Level.NUMERICS, cost=0.01)
def memory_figures(run: Run) -> None:
    """Free memory is above 0 and at most the total, which does not change while memory is taken."""
    under_test = DeviceUnderTest(run)
    before = under_test.device.memory()
    with under_test.at_work():
        held = under_test.device.zeros(1 << 20)
        after = under_test.device.memory()
    for found in (before, after):
        if not all(isinstance(number, int) for number in found) or not 0 < found.free <= found.total:
            raise Failed(f"memory() is {found!r}, expected free bytes above 0 and at most the total")
    if before.total != after.total:
        raise Failed(f"the total was {before.total} and is {after.total}, with {held.numel()} bytes taken")


@check(Kind.DEVICE, "device.memory.peak", Level.NUMERICS, cost=0.05)
def memory_peak(run: Run) -> None:
    """The peak of some work is not negative, at most a few times what the work held, and at least that on a device."""
    under_test = DeviceUnderTest(run)
    with under_test.at_work():
        with under_test.device.measure_peak() as nothing:
            pass
        with under_test.device.measure_peak() as some:
            under_test.device.zeros(WORK).fill_(1)
    figures = {"nothing": nothing.peak, "some": some.peak}
    if not all(isinstance(peak, int) for peak in figures.values()) or min(figures.values()) < 0:
        raise Failed(f"the peaks of no work and of {WORK} bytes are {figures}, expected bytes from 0")
    if nothing.peak > WORK or some.peak > 8 * WORK:
        raise Failed(f"the peaks of no work and of {WORK} bytes are {figures}")
    if not in_host_memory(under_test) and some.peak < WORK:  # a process may have held more before
        raise Failed(f"the peak of work that held {WORK} bytes is {some.peak}")


@check(Kind.DEVICE, "device.memory.zeros", Level.NUMERICS, cost=0.02)
def memory_zeros(run: Run) -> None:
    """Memory for caches is zeroed bytes of its own on the device, also where other memory was given back."""
    under_test = DeviceUnderTest(run)
    with under_test.at_work():
        for size in SIZES:
            for _ in range(2):
                found = under_test.device.zeros(size)
                under_test.expect_tensor(found, (size,), torch.uint8, f"zeros({size})")
                same(np.zeros(size, np.uint8), under_test.host(found), f"zeros({size})")
                found.fill_(255)
                del found
                under_test.device.release_cached()
        one, other = under_test.device.zeros(4096), under_test.device.zeros(4096)
        one.view(torch.float32).fill_(1)
        if bool(under_test.host(other).any()):
            raise Failed("two zeroed memories share bytes")


@check(Kind.DEVICE, "device.memory.release", Level.NUMERICS, cost=0.01)
def memory_release(run: Run) -> None:
    """Giving back cached memory leaves tensors that live as they are."""
    under_test = DeviceUnderTest(run)
    array = random_array(under_test.rng, np.int32, (1000,))
    with under_test.at_work():
        tensor, cache = under_test.put(array), under_test.device.zeros(4096)
        cache.fill_(7)
        under_test.device.zeros(4096)  # goes at once
        under_test.device.release_cached()
    same(array, under_test.host(tensor), "a tensor after release_cached()")
    same(np.full(4096, 7, np.uint8), under_test.host(cache), "memory for caches after release_cached()")


@check(
    Kind.DEVICE,
    "device.memory.host",
    Level.NUMERICS,
    cases=lambda _: ({"dtype": dtype} for dtype in ("float32", "int64", "uint8", "bool")),
    cost=0.01,
)
def memory_host(run: Run) -> None:
    """Host memory has the asked size and dtype, can be written and read, and is pinned if the device declares it."""
    under_test = DeviceUnderTest(run)
    dtype: torch.dtype = getattr(torch, run["dtype"])
    for count in (0, 1, 777):
        found = under_test.device.host_empty(count, dtype)
        if found.device.type != "cpu" or (tuple(found.shape), found.dtype) != ((count,), dtype):
            raise Failed(f"host_empty({count}, {dtype}) is {found.dtype} {list(found.shape)} on {found.device}")
        found.fill_(1)
        if int(found.sum()) != count:
            raise Failed(f"host_empty({count}, {dtype}) does not hold what is written to it")
        if run.subject.capabilities.pinned_memory.support and count and not found.is_pinned():
            raise Failed("pinned_memory is declared, and host_empty() gives memory that is not pinned")


@check(
    Kind.DEVICE,
    "device.memory.to_device",
    Level.NUMERICS,
    cases=lambda _: ({"dtype": np.dtype(dtype).name} for dtype in DTYPES),
    cost=0.01,
)
def memory_to_device(run: Run) -> None:
    """A small array arrives with its shape and dtype: of any number of dimensions, empty, strided, columns first."""
    under_test = DeviceUnderTest(run)
    dtype = np.dtype(run["dtype"])
    whole = random_array(under_test.rng, dtype.type, (6, 10))
    arrays = (whole, whole[:0], whole[0, :1], whole[::2, ::3], np.asfortranarray(whole), whole[::-1])
    with under_test.at_work():
        for array in (*arrays, whole.reshape(2, 3, 10)):
            found = under_test.device.to_device(array)
            wanted = torch.from_numpy(np.empty(0, dtype)).dtype
            under_test.expect_tensor(found, array.shape, wanted, "to_device()")
            same(array, under_test.host(found), f"to_device() of {dtype} with strides {array.strides}")


@check(
    Kind.DEVICE,
    "device.memory.dtypes",
    Level.NUMERICS,
    cases=lambda subject: ({"dtype": dtype} for dtype in _dtypes(subject.capabilities.dtypes)),
    cost=0.01,
)
def memory_dtypes(run: Run) -> None:
    """Weights and activations of each declared dtype can be multiplied and added on the device."""
    under_test = DeviceUnderTest(run)
    dtype = getattr(torch, run["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise Failed(f"{run['dtype']!r} is declared, and torch has no dtype of that name")
    if not dtype.is_floating_point:
        raise NotApplicable(f"{run['dtype']} is no dtype of activations")
    left, right = (under_test.rng.integers(-3, 4, shape) for shape in ((5, 8), (8, 3)))
    with under_test.at_work():
        one, other = (under_test.put(array.astype(np.float32)).to(dtype) for array in (left, right))
        found = one @ other + other[:1]
        under_test.expect_tensor(found, (5, 3), dtype, "a product")
        same((left @ right + right[:1]).astype(np.float32), under_test.host(found.float()), f"a product in {dtype}")


def _dtypes(offer: object) -> tuple[str, ...]:
    """Return the dtypes that are tried: those declared, or the usual ones if any is."""
    values = getattr(offer, "values", None)
    return ("float32", "bfloat16", "float16") if values is None else tuple(sorted(values))
