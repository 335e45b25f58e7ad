"""Transfer buffers: what is uploaded arrives, at addresses that stay, and what is downloaded is the caller's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slotline.registry.contracts.device import TransferBuffer
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.device import DTYPES, Array, DeviceUnderTest, needs_copies, random_array, same

ALIGNMENT = 16
SHAPES: tuple[tuple[int, ...], ...] = ((5,), (1,), (0,), (3, 7), (2, 0), (2, 3, 4), (17,), (16,), (15,))
"""Shapes whose sizes in bytes are multiples of 16 or not."""
IN_FLIGHT = 4
"""Downloads of one dtype that a step and the one prepared behind it have at most."""


def sent(under_test: DeviceUnderTest, buffer: TransferBuffer, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Upload arrays in one step, and return them as tensors on the device."""
    buffer.begin()
    tensors = []
    for array in arrays:
        tensor = buffer.upload(array)
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensors.append(under_test.expect_tensor(tensor, array.shape, dtype, "an upload"))
    buffer.flush()
    buffer.mark()
    return tensors


def expect_arrived(under_test: DeviceUnderTest, arrays: Sequence[Array], tensors: Sequence[torch.Tensor]) -> None:
    """Raise `Failed` unless tensors hold the arrays that were uploaded."""
    for number, (array, tensor) in enumerate(zip(arrays, tensors, strict=True)):
        same(array, under_test.host(tensor), f"upload {number} of {array.dtype} {list(array.shape)}")


def reserved(arrays: Sequence[Array]) -> int:
    """Return the bytes that arrays take of a reservation."""
    return sum(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)


@check(
    Kind.DEVICE,
    "device.buffer.upload",
    Level.NUMERICS,
    cases=lambda _: ({"dtype": np.dtype(dtype).name} for dtype in DTYPES),
    cost=0.01,
)
def buffer_upload(run: Run) -> None:
    """Arrays of any shape arrive with their shape and dtype, all of a step together."""
    under_test = DeviceUnderTest(run)
    dtype = np.dtype(run["dtype"]).type
    arrays = [random_array(under_test.rng, dtype, shape) for shape in SHAPES]
    with under_test.at_work():
        expect_arrived(under_test, arrays, sent(under_test, under_test.buffer(), arrays))


@check(Kind.DEVICE, "device.buffer.download", Level.NUMERICS, cost=0.02)
def buffer_download(run: Run) -> None:
    """Tensors come to the host with their shape and dtype: empty, strided, of any dtype, computed on the device."""
    under_test = DeviceUnderTest(run)
    buffer = under_test.buffer()
    with under_test.at_work():
        for dtype in DTYPES:
            array = random_array(under_test.rng, dtype, (6, 8))
            whole = under_test.put(array)
            pairs = ((whole, array), (whole[:0], array[:0]), (whole[1:3, ::2], array[1:3, ::2]), (whole.T, array.T))
            for tensor, wanted in pairs:
                found = buffer.download(tensor).wait()
                if not isinstance(found, np.ndarray) or found.dtype != wanted.dtype:
                    raise Failed(f"download of {wanted.dtype} {list(wanted.shape)} is {found!r:.60}")
                same(wanted, found, f"download of {wanted.dtype} {list(wanted.shape)}")
        doubled = under_test.put(array) if dtype is np.bool_ else under_test.put(array) * 2
        same(under_test.host(doubled), buffer.download(doubled).wait(), "download of a result")


@check(Kind.DEVICE, "device.buffer.landing", Level.NUMERICS, cost=0.02)
def buffer_landing(run: Run) -> None:
    """What the device writes to a landing arrives, and is the caller's own when the landing is written again."""
    under_test = DeviceUnderTest(run)
    buffer = under_test.buffer()
    landing = buffer.landing(8, torch.int64)
    if landing.device.type != "cpu" or (tuple(landing.shape), landing.dtype) != ((8,), torch.int64):
        raise Failed(f"landing(8, int64) is {landing.dtype} {list(landing.shape)} on {landing.device}")
    with under_test.at_work():
        arrived = []
        for step in range(3):
            landing[:5].copy_(under_test.put(np.arange(5) + step), non_blocking=True)
            arrived.append(buffer.arriving(landing[:5]).wait())
    for step, found in enumerate(arrived):
        same(np.arange(5) + step, found, f"landing of step {step}, after later ones")


@check(Kind.DEVICE, "device.buffer.addresses", Level.HOSTILE, cases=lambda subject: _once(subject), cost=0.02)
def buffer_addresses(run: Run) -> None:
    """Equal sizes in equal order get equal addresses in every step, multiples of 16, and the newest values."""
    under_test = DeviceUnderTest(run)
    buffer, found = under_test.buffer(), []
    with under_test.at_work():
        for step in range(4):
            arrays = [random_array(under_test.rng, np.int32, shape) + step for shape in SHAPES]
            tensors = sent(under_test, buffer, arrays)
            expect_arrived(under_test, arrays, tensors)
            found.append([tensor.data_ptr() for tensor in tensors if tensor.numel()])
            sent(under_test, buffer, [random_array(under_test.rng, np.float32, (step + 1, 3))])  # another kind of step
    if any(addresses != found[0] for addresses in found):
        raise Failed(f"the addresses of four like steps differ: {found}")
    if odd := [address for address in found[0] if address % ALIGNMENT]:
        raise Failed(f"addresses {odd} are no multiples of {ALIGNMENT}")


@check(Kind.DEVICE, "device.buffer.full", Level.HOSTILE, cost=0.02)
def buffer_full(run: Run) -> None:
    """A step of exactly the reserved bytes arrives, a larger reservation holds more, and an empty step is none."""
    under_test = DeviceUnderTest(run)
    buffer = under_test.device.transfer_buffer()
    with under_test.at_work():
        sent(under_test, buffer, [])
        for times in (1, 9, 3):
            arrays = [random_array(under_test.rng, dtype, shape) for shape in SHAPES for dtype in DTYPES] * times
            buffer.reserve(reserved(arrays))
            expect_arrived(under_test, arrays, sent(under_test, buffer, arrays))


@check(Kind.DEVICE, "device.buffer.strided", Level.HOSTILE, cost=0.02)
def buffer_strided(run: Run) -> None:
    """Arrays that are strided, reversed or columns first arrive, and large ones beside small ones."""
    under_test = DeviceUnderTest(run)
    whole = random_array(under_test.rng, np.int32, (40, 30))
    arrays = [whole[::3, ::2], whole[:, 1], whole.T, np.asfortranarray(whole), whole[5:, :7], whole[:1], whole]
    if not run.subject.capabilities.host_memory.support:
        arrays.append(whole[::-1])  # torch has no view of it
    with under_test.at_work():
        buffer = under_test.buffer(reserved(arrays))
        expect_arrived(under_test, arrays, sent(under_test, buffer, arrays))


@check(Kind.DEVICE, "device.buffer.shapes", Level.HOSTILE, cost=0.02)
def buffer_shapes(run: Run) -> None:
    """The same place of a buffer can be of another shape and dtype in each step."""
    under_test = DeviceUnderTest(run)
    buffer = under_test.buffer()
    with under_test.at_work():
        for shape in ((4, 6), (6, 4), (24,), (2, 3, 4), (4, 6)):
            for dtype in (np.int32, np.float32, np.int64):
                arrays = [random_array(under_test.rng, dtype, shape)]
                expect_arrived(under_test, arrays, sent(under_test, buffer, arrays))


@check(Kind.DEVICE, "device.buffer.reused", Level.HOSTILE, cases=lambda subject: _once(subject), cost=0.02)
def buffer_reused(run: Run) -> None:
    """The host's array may be written once the next step begins, and work on an earlier step saw that step's values."""
    under_test = DeviceUnderTest(run)
    buffer, array, results = under_test.buffer(1 << 20), np.zeros(50_000, np.int32), []
    with under_test.at_work():
        for step in range(4):
            buffer.begin()
            array[:] = step
            tensor = buffer.upload(array)
            buffer.flush()
            buffer.mark()
            results.append(tensor + 10)
    for step, result in enumerate(results):
        same(np.full(50_000, 10 + step, np.int32), under_test.host(result), f"work on step {step}")


@check(Kind.DEVICE, "device.buffer.in_flight", Level.HOSTILE, cases=lambda subject: _once(subject), cost=0.02)
def buffer_in_flight(run: Run) -> None:
    """Downloads of two steps under way at once bring what each tensor held, are waited for in any order, and stay."""
    under_test = DeviceUnderTest(run)
    buffer, found = under_test.buffer(), {}
    with under_test.at_work():
        tensors = [under_test.put(np.full(9, number)) for number in range(IN_FLIGHT)]
        downloads = [buffer.download(tensor) for tensor in tensors]
        for tensor in tensors:
            tensor.fill_(99)
        for number in reversed(range(IN_FLIGHT)):
            found[number] = downloads[number].wait()
        for _ in range(IN_FLIGHT):
            buffer.download(tensors[0]).wait()
    for number, array in found.items():
        same(np.full(9, number), array, f"download {number}, after later ones")
    found[0][:] = 5
    same(np.full(9, 99), under_test.host(tensors[0]), "a tensor whose download was written")


@check(Kind.DEVICE, "device.buffer.two", Level.HOSTILE, cost=0.02)
def buffer_two(run: Run) -> None:
    """Two buffers of a device have nothing in common."""
    under_test = DeviceUnderTest(run)
    with under_test.at_work():
        buffers = under_test.buffer(), under_test.buffer()
        arrays = [[random_array(under_test.rng, np.int32, (7,)) + 100 * number] for number in range(2)]
        tensors = [sent(under_test, buffer, own) for buffer, own in zip(buffers, arrays, strict=True)]
        for own, found in zip(arrays, tensors, strict=True):
            expect_arrived(under_test, own, found)


def _once(subject: object) -> tuple[dict[str, object], ...]:
    """Return one case for a device that copies."""
    needs_copies(subject)  # type: ignore[arg-type]
    return ({},)
