"""Batches of the state layers: the part of a step's inputs that they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.batch.input_batch_cpu import PAD_SLOT, InputBatchCPU
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request_table import RequestTable
from slotline.core.device.transfer_buffer import reserved_bytes
from slotline.registry.contracts import StateBatch

NAME = "states"
"""Name under which `ModelInputs.extras` holds the batch."""


class StateBatches:
    """Builder of a step's `StateBatch`.

    Attributes:
        num_accepted: [max_requests] int64, of each row's last step, the tokens up to the last accepted draft, or 1 if
            no draft was verified.
    """

    def __init__(self, rows: RequestTable) -> None:
        self._rows = rows
        self.num_accepted = np.ones(rows.max_requests, np.int64)

    def gather(self, batch: InputBatchCPU, upload: Callable[[npt.NDArray[Any]], torch.Tensor]) -> StateBatch:
        """Build the batch of a step. Padded requests have no slot, and made-up requests have the first ones."""
        requests = len(batch.rows)
        padding = (0, len(batch.seq_lens) - requests)
        slots = np.arange(requests, dtype=np.int32) if batch.made_up else batch.rows.astype(np.int32)
        accepted = self.num_accepted[batch.rows].astype(np.int32)
        if batch.pending is not None:
            accepted = np.where(batch.pending, self._rows.num_pending[batch.rows], accepted).astype(np.int32)
        return StateBatch(
            num_requests=requests,
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            query_start_loc=upload(batch.starts32),
            slots=upload(np.pad(slots, padding, constant_values=PAD_SLOT)),
            has_initial_state=upload(np.pad(batch.seq_lens[:requests] > batch.counts, padding)),
            num_accepted=upload(np.pad(accepted, padding, constant_values=1)),
            query_start_loc_cpu=batch.starts32[: requests + 1],
            num_decodes=min(batch.num_decodes, requests),
        )

    def staging_bytes(self, max_tokens: int) -> int:
        """Return the bytes that `gather` uploads at most."""
        return 4 * reserved_bytes((self._rows.max_requests + 1,), np.int32)

    def captured_inputs(self, inputs: ModelInputs) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a step that captured state layers read."""
        batch: StateBatch = inputs.extras[NAME]
        return batch.query_start_loc, batch.slots, batch.has_initial_state, batch.num_accepted
