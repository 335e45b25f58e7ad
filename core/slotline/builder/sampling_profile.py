"""Profile of the sampler: made-up parameters, and a draw at full size."""

from __future__ import annotations

import numpy as np
import torch

from slotline.builder.plugin_construction import oom_as_capacity_error
from slotline.core.batch.sampling_metadata import SamplingMetadata
from slotline.core.sampling.sampler import sample_checked
from slotline.registry.contracts import DeviceOps


def warm_up(num_rows: int, vocab_size: int, device: str, ops: DeviceOps) -> None:
    """Run the sampler once at full size on random logits, so that its memory is part of the profile.

    Raises:
        CapacityError: if the device runs out of memory. It names the setting to lower.
    """
    batch = made_up_batch(num_rows, vocab_size)
    params = torch.from_numpy(batch.packed()).to(device)
    what = f"sampling {num_rows} rows of {vocab_size} logits"
    with oom_as_capacity_error(what, "lower scheduler.max_requests or cache.memory"):
        sample_checked(torch.randn(num_rows, vocab_size, device=device), batch, params, ops, keep_final=True)


def made_up_batch(num_rows: int, vocab_size: int) -> SamplingMetadata:
    """Make up parameters of rows that use every option of a draw."""
    return SamplingMetadata(
        rows=np.arange(num_rows),
        positions=np.zeros(num_rows, np.int64),
        temperature=np.full(num_rows, 0.5, np.float32),
        top_k=np.full(num_rows, max(1, vocab_size - 1), np.int64),
        top_p=np.full(num_rows, 0.9, np.float32),
        log_floor=np.full(num_rows, -4.6, np.float32),
        seed=np.arange(num_rows, dtype=np.uint64),
    )
