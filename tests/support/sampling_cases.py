"""What tests of the sampler share: batches, the sampler's functions on them, and the definitions in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from devices import device_for

from slotline.core.batch.sampling_metadata import PackedParameters, SamplingMetadata
from slotline.core.sampling.sampler import sample_checked
from slotline.kernels.torch_sampling import invert, least_kept


def batch(n: int, **values: Any) -> SamplingMetadata:
    """n rows; each value stands for all rows or is given by row."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "positions": 0}
    types = {"top_k": np.int64, "positions": np.int64, "seed": np.uint64}
    arrays = {
        name: np.broadcast_to(np.asarray(value, types.get(name, np.float32)), n).copy()
        for name, value in {**defaults, **values}.items()
    }
    with np.errstate(divide="ignore"):
        arrays["log_floor"] = np.log(arrays.pop("min_p"))
    return SamplingMetadata(rows=np.arange(n), **arrays)


def params(rows: SamplingMetadata, device: str = "cpu") -> torch.Tensor:
    """The packed parameters on a device."""
    return torch.from_numpy(rows.packed()).to(device)


def columns(rows: SamplingMetadata) -> PackedParameters:
    return PackedParameters(params(rows))


def sample(
    logits: torch.Tensor, rows: SamplingMetadata, sent: torch.Tensor | None, *, keep_final: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens by the operations of the logits' device, and the logits that they were drawn from."""
    ops = device_for(logits.device.type).ops
    found = sample_checked(logits, rows, sent, ops, keep_final=keep_final)
    return found.tokens, found.final


def draw(logits: torch.Tensor, columns: PackedParameters) -> torch.Tensor:
    """One token per row, [n] int64, by inverse transform of the softmax."""
    return invert(logits.softmax(dim=-1).double(), columns.uniform)


def drawn(logits: torch.Tensor, rows: SamplingMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the logits that they were drawn from."""
    sent = None if rows.all_greedy else params(rows, str(logits.device))
    tokens, final = sample(logits, rows, sent, keep_final=True)
    assert final is not None
    return tokens, final


def masked(logits: torch.Tensor, rows: SamplingMetadata) -> torch.Tensor:
    """What min-p, top-k and top-p leave of logits, in torch."""
    least = least_kept(logits, rows, columns(rows))
    return logits if least is None else logits.masked_fill(logits < least, -torch.inf)


def allowed(probabilities: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens may be drawn, from the definitions: min-p, then top-k, then the smallest set that reaches top-p."""
    keep = probabilities >= min_p * probabilities.max()
    order = np.argsort(-probabilities, kind="stable")
    order = order[keep[order]]
    if top_k > 0:
        order = order[:top_k]
    weights = probabilities[order] / probabilities[order].sum()
    before = np.cumsum(weights) - weights
    result = np.zeros(len(probabilities), bool)
    result[order[before < top_p]] = True
    return result
