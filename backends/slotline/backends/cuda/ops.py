"""Operations of a step on NVIDIA GPUs: one kernel where torch would launch many."""

from __future__ import annotations

import torch

from slotline.core.device import TorchOps
from slotline.kernels.triton_support import has_triton


def ops_for(device: str) -> TorchOps:
    """Return the operations in Triton, or torch's where Triton cannot run; a warning says why then."""
    if not has_triton():
        return TorchOps()
    from slotline.backends.cuda.triton_ops import TritonOps

    return TritonOps(device)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return `DeviceOps.argmax` of [n, vocab_size] logits, for drafters older than `DrafterContext.ops`."""
    if logits.is_cuda and has_triton():
        from slotline.backends.cuda.triton_argmax import likeliest_triton

        return likeliest_triton(logits)
    return logits.argmax(-1)
