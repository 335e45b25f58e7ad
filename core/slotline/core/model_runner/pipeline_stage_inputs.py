"""What each pipeline stage reads of a step, on its way to the stage's device; one stage reads everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.device.transfer_buffer import TransferBuffer
from slotline.core.kv_cache.block_table import BlockTables

Int = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


class UploadedInputs(NamedTuple):
    """Tensors of one step on a feed's device; `slot_mappings` by cache group of the feed.

    `encoder_lens` are [num_requests] int32, empty where nothing is read of an encoder.
    `common_prefixes` are [num_cache_groups] int32, of all cache groups, empty where no group has one.
    """

    positions: torch.Tensor
    slot_mappings: list[torch.Tensor]
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    encoder_lens: torch.Tensor
    common_prefixes: torch.Tensor


@frozen(eq=False)
class StageInputs:
    """The way to one stage's device.

    Attributes:
        staging: of the device.
        tables: of the cache groups that are read there.
        cache_groups: which these are; a later stage has those of its own layers, the first one has all.
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
        encoder_lens: Int32,
        prefixes: Sequence[int],
    ) -> UploadedInputs:
        """Upload what attention reads beside block tables; `slots` and `prefixes` are by cache group.

        What has a size for each token comes before what has one for each request, since graphs of mixed batches read
        the former alone and take any number of requests.
        """
        upload = self.staging.upload
        return UploadedInputs(
            upload(positions),
            [upload(slots[i]) for i in self.cache_groups],
            upload(starts),
            upload(seq_lens),
            upload(encoder_lens),
            upload(np.asarray(prefixes if any(prefixes) else (), np.int32)),
        )
