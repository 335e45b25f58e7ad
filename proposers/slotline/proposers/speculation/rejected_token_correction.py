"""Correction of upper bounds on the device.

If a step in flight verifies drafts of a request, the host counts all of them as accepted. Only the device knows the
rejected ones, and subtracts them from the next step's lengths, positions and slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.batch.input_batch_cpu import InputBatchCPU
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.core.device.torch_ops import TorchOps
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.registry.contracts import DeviceOps


class Bounds(NamedTuple):
    """Indices of the rejected drafts for the requests and tokens of a step.

    Attributes:
        which: [num_requests + 1] int64, the row of each request, padded ones included, and of padded tokens. It is
            `null_row`, which has no rejected drafts, if the numbers are exact.
        owner: [num_padded_tokens] int64, the entry of `which` that each token belongs to.
    """

    which: torch.Tensor
    owner: torch.Tensor


def upload_bounds(
    host: InputBatchCPU,
    pending: npt.NDArray[np.bool_],
    null_row: int,
    upload: Callable[[npt.NDArray[Any]], torch.Tensor],
) -> Bounds:
    """Upload the bounds of a step.

    `pending` [num_requests] marks requests whose lengths are upper bounds. `null_row` is never corrected.
    """
    requests = len(host.rows)
    which = np.full(len(host.seq_lens) + 1, null_row)
    which[:requests] = np.where(pending, host.rows, null_row)
    owner = np.full(len(host.input_ids), len(host.seq_lens))
    owner[: host.num_tokens] = np.repeat(np.arange(requests), host.counts)
    return Bounds(upload(which), upload(owner))


@frozen(eq=False)
class BoundedInputs:
    """Inputs of a step on the device whose numbers are upper bounds.

    Attributes:
        positions: [num_padded_tokens] int64.
        slot_mappings: [num_padded_tokens] int64 by cache group.
        seq_lens: [num_padded_requests] int32.
    """

    positions: torch.Tensor
    slot_mappings: Sequence[torch.Tensor]
    seq_lens: torch.Tensor


def make_exact(
    inputs: ModelInputs,
    bounds: Bounds,
    table: PlaceholderTokens,
    groups: Sequence[CacheGroup],
    kernel_block_sizes: Sequence[int],
) -> None:
    """Make the bounds of a step's inputs exact on the device, in place."""
    batches = inputs.batches[: len(groups)]  # of the first pipeline stage
    seq_lens = [batch.seq_lens for batch, group in zip(batches, groups, strict=True) if group.fixed_len is None]
    sent = BoundedInputs(
        inputs.positions,
        [batch.slot_mapping for batch in batches],
        seq_lens[0] if seq_lens else torch.zeros_like(bounds.which[:-1], dtype=torch.int32),
    )
    tables = [batch.block_table for batch in batches]
    accepted = getattr(inputs.extras.get("states"), "num_accepted", None)
    subtract_rejected(table.rejected, bounds, sent, tables, accepted, groups, kernel_block_sizes, table.ops)


@torch.inference_mode()  # the views were made while graphs were captured, and are inference tensors
def subtract_rejected(
    fallen: torch.Tensor,
    bounds: Bounds,
    sent: BoundedInputs,
    tables: Sequence[torch.Tensor],
    accepted: torch.Tensor | None,
    groups: Sequence[CacheGroup],
    kernel_block_sizes: Sequence[int],
    ops: DeviceOps | None = None,
) -> None:
    """Make bounds exact, in place.

    The forward pass waits for it.
    """
    read = [i for i, group in enumerate(groups) if group.fixed_len is None]
    of_groups = [(tables[i], sent.slot_mappings[i], kernel_block_sizes[i]) for i in read]
    (ops or TorchOps()).subtract_rejected(
        fallen, bounds.which, bounds.owner, sent.positions, sent.seq_lens, accepted, of_groups
    )
