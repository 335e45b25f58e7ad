"""Sampling: logits to tokens, for a batch of rows at once.

Order of operations: logits processors, then temperature, then the floor of those that have one (min-p), top-k, top-p,
then one draw per row. The draw is the inverse of the cumulative distribution, in token order, at a number that depends
on nothing but the request's seed and the token's position. So a request's text does not change with the batch around
it, with chunked prefill or with preemption. A discarded sample needs no rewinding of a generator.

The device's operations do all of it. Those of all devices keep the same tokens and draw from the same distribution with
the same number, and differ only where the rounding of a sum moves a boundary past that number. Nothing here waits for
the device. A step's parameters are sent in one array, see `SamplingMetadata.packed`.
"""

from __future__ import annotations

import torch

from slotline.core.batch.sampling_metadata import SamplingMetadata, uniforms
from slotline.kernels.torch_sampling import invert
from slotline.registry.contracts.device import DeviceOps, Drawn

__all__ = ["Drawn", "SamplingMetadata", "invert", "sample_checked", "uniforms"]


def sample_checked(
    logits: torch.Tensor,
    batch: SamplingMetadata,
    params: torch.Tensor | None,
    ops: DeviceOps,
    *,
    keep_final: bool = False,
) -> Drawn:
    """Sample every row and notice the rows that hold NaN, without waiting for the device.

    Args:
        logits: [n, vocab_size] float32, after the logits processors. They are not changed.
        params: `batch.packed()` on the device, or None if all rows are greedy.
        ops: operations of the device.
        keep_final: whether the logits that are drawn from are wanted.

    Returns:
        Token ids [n] int64 on the device, and the logits that they were drawn from (scaled and masked, greedy rows as
            given), or None if not wanted. A row with NaN or without any finite logit gets some token of the vocabulary.
    """
    if params is None:
        tokens, holds_nan = ops.argmax_checked(logits)
        return Drawn(tokens, logits if keep_final else None, holds_nan)
    return ops.sample(logits, batch, params, keep_final=keep_final)
