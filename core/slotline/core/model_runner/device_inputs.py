"""Inputs of each device that runs a part of the model, and their upload. A single device reads everything."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.device.transfer_buffer import TransferBuffer
from slotline.core.kv_cache.block_table import BlockTables
from slotline.registry.contracts.prefix_groups import StepPrefixes

Int = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


class UploadedInputs(NamedTuple):
    """Tensors of one step on a device, with `slot_mappings` by cache group of the device.

    `fixed_lens` are [num_requests] int32, empty if no group has a fixed number of keys. `prefixes` are the numbers of
    `StepPrefixes`, empty for none.
    """

    positions: torch.Tensor
    slot_mappings: list[torch.Tensor]
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    fixed_lens: torch.Tensor
    prefixes: torch.Tensor


@frozen(eq=False)
class DeviceInputs:
    """Uploads to one device.

    Attributes:
        staging: of the device.
        tables: of the cache groups that are read there.
        cache_groups: indices of these groups. A later device has those of its own layers, the first device has all.
    """

    staging: TransferBuffer
    tables: BlockTables
    cache_groups: tuple[int, ...]

    def send(
        self,
        positions: Int,
        slots: list[Int],
        starts: Int32,
        seq_lens: Int32,
        fixed_lens: Int32,
        prefixes: StepPrefixes | None,
    ) -> UploadedInputs:
        """Upload the inputs of attention except block tables. `slots` are by cache group.

        Arrays with an entry for each token come before those with an entry for each request, since graphs of mixed
        batches read only the former and take any number of requests.
        """
        upload = self.staging.upload
        return UploadedInputs(
            upload(positions),
            [upload(slots[i]) for i in self.cache_groups],
            upload(starts),
            upload(seq_lens),
            upload(fixed_lens),
            upload(np.zeros(0, np.int32) if prefixes is None else prefixes.packed()),
        )
