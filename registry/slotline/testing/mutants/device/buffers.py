"""Transfer buffers with a bug."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.device.transfer_buffer import Arrived, CopyBuffer
from slotline.registry.contracts.device import Download
from slotline.testing.check import Level
from slotline.testing.mutants import Mutant
from slotline.testing.mutants.device.making import of_buffer, of_device
from slotline.testing.reference.device import HostDevice


class Overlaps(CopyBuffer):
    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        found = super().upload(array)
        self._used -= 16 if self._used >= 16 and array.nbytes % 16 == 1 else 0
        return found


class Unaligned(CopyBuffer):
    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        start = self._used
        found = super().upload(array)
        self._used = -(-(start + array.nbytes) // 8) * 8
        return found


class Moves(CopyBuffer):
    def begin(self) -> None:
        super().begin()
        self._device = torch.empty_like(self._device)
        self._views.clear()
        self._stretches.clear()


class FirstStepOnly(CopyBuffer):
    done = 0

    def flush(self) -> None:
        self.done += 1
        if self.done < 4:
            super().flush()


class NoFlush(CopyBuffer):
    def flush(self) -> None:
        """Copy when the next step begins."""

    def begin(self) -> None:
        super().flush()
        super().begin()


class RoundsDown(CopyBuffer):
    def flush(self) -> None:
        size = self._used // 4096 * 4096 if self._used > 4096 else self._used
        self._device[:size].copy_(self._source[:size])


class ByPlaceAlone(CopyBuffer):
    """Remembers the view of a place and a dtype, whatever its shape."""

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        start = self._used
        found = super().upload(array)
        known = self._by_place.setdefault((start, array.dtype, array.size), found)
        return known if self.steps > 8 else found

    def begin(self) -> None:
        super().begin()
        self.steps = getattr(self, "steps", 0) + 1
        self._by_place: dict[Any, torch.Tensor] = getattr(self, "_by_place", {})


class InMemoryOrder(CopyBuffer):
    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return super().upload(array.ravel(order="K").reshape(array.shape) if array.flags.f_contiguous else array)


class NoReserve(CopyBuffer):
    def reserve(self, num_bytes: int) -> None:
        if not hasattr(self, "_host") or not len(self._host):
            super().reserve(num_bytes)


class ExactReserve(CopyBuffer):
    def reserve(self, num_bytes: int) -> None:
        super().reserve(max(num_bytes - 16, 0))


class Later:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self.tensor.clone().numpy()
        return found


class DownloadsLate(CopyBuffer):
    def download(self, tensor: torch.Tensor) -> Download:
        return Later(tensor)


class DownloadsViews(CopyBuffer):
    def download(self, tensor: torch.Tensor) -> Download:
        return Arrived(tensor.numpy())


class OneResult(CopyBuffer):
    room = torch.zeros(1 << 16, dtype=torch.int64)

    def download(self, tensor: torch.Tensor) -> Download:
        if tensor.dtype != torch.int64:
            return super().download(tensor)
        room = self.room[: tensor.numel()].view(tensor.shape)
        room.copy_(tensor)
        return Arrived(room.numpy())


class FlatDownloads(CopyBuffer):
    def download(self, tensor: torch.Tensor) -> Download:
        return Arrived(super().download(tensor).wait().reshape(-1))


class LandsOnce(CopyBuffer):
    def arriving(self, landed: torch.Tensor) -> Download:
        return Arrived(landed.numpy())


class Widens(CopyBuffer):
    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return super().upload(array.astype(np.int32) if array.dtype == np.int16 else array)


class OneBuffer(HostDevice):
    def transfer_buffer(self) -> CopyBuffer:
        self.only = getattr(self, "only", None) or CopyBuffer(self.torch_device)
        return self.only


ALL: tuple[Mutant, ...] = (
    of_buffer("overlaps", "the memory of an upload is used again too early", Level.NUMERICS, Overlaps),
    of_buffer("no-flush", "uploads arrive when the next step begins", Level.NUMERICS, NoFlush),
    of_buffer("widens", "int16 arrays arrive as int32", Level.NUMERICS, Widens),
    of_buffer("flat-downloads", "downloads have one dimension", Level.NUMERICS, FlatDownloads),
    of_buffer("lands-once", "what arrived changes when the landing is written again", Level.NUMERICS, LandsOnce),
    of_buffer("unaligned", "addresses are multiples of 8", Level.HOSTILE, Unaligned),
    of_buffer("moves", "uploads have other addresses in each step", Level.HOSTILE, Moves),
    of_buffer("first-steps", "uploads from the fourth step on do not arrive", Level.HOSTILE, FirstStepOnly),
    of_buffer("rounds-down", "the last bytes of a large step stay", Level.HOSTILE, RoundsDown),
    of_buffer("by-place-alone", "a place keeps the shape that it had first", Level.HOSTILE, ByPlaceAlone),
    of_buffer("buffer-in-memory-order", "uploads with columns first arrive turned", Level.HOSTILE, InMemoryOrder),
    of_buffer("no-reserve", "a second reservation is ignored", Level.HOSTILE, NoReserve),
    of_buffer("exact-reserve", "a reservation is 16 bytes short", Level.HOSTILE, ExactReserve),
    of_buffer("downloads-late", "a download brings what its tensor holds later", Level.HOSTILE, DownloadsLate),
    of_buffer("downloads-views", "a download is a view of its tensor", Level.HOSTILE, DownloadsViews),
    of_buffer("one-result", "downloads share their memory on the host", Level.HOSTILE, OneResult),
    of_device("one-buffer", "every buffer is the same", Level.HOSTILE, OneBuffer),
)
