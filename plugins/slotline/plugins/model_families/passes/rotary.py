"""Position embeddings in one call instead of nine operations, which at few tokens cost a layer's time.

The module stays, with its frequencies. Its forward is replaced if the short one gives the same cosines and sines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slotline.plugins.model_families.passes.equality import TOLERANCES, relative_difference
from slotline.plugins.model_families.passes.kernels import FusedKernels
from slotline.plugins.model_families.passes.packed_linear import has_hooks
from slotline.plugins.model_families.passes.target import Target

PROBE_POSITIONS = (0, 1, 17, 300, 4095)


class LeanRotary:
    """The short forward of one rotary embedding whose frequencies no forward changes."""

    def __init__(self, module: nn.Module, fused: FusedKernels, dtype: torch.dtype, width: int) -> None:
        self._module: Any = module
        self._original: Callable[..., Any] = module.forward
        self._angles, self._dtype, self._width = fused.angles, dtype, width

    def __call__(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the original's result: cosines and sines [batch, num_tokens, width] in x's dtype."""
        prefix = "" if layer_type is None else f"{layer_type}_"
        frequencies = self._module._buffers.get(f"{prefix}inv_freq")
        plain = position_ids.ndim == 2  # of one axis, which is what was compared
        if not plain or frequencies is None or x.dtype != self._dtype or frequencies.dtype != torch.float32:
            return self._original(x, position_ids, *(() if layer_type is None else (layer_type,)))  # type: ignore[no-any-return]
        scaling = getattr(self._module, f"{prefix}attention_scaling")
        return self._angles(position_ids, frequencies, scaling, self._width, self._dtype)


def apply(model: nn.Module, target: Target) -> tuple[str, ...]:
    """Shorten the forward of the model's rotary embedding if the short one is equal for each of its types."""
    rotary: Any = getattr(getattr(model, "base_model", None), "rotary_emb", None)
    if target.fused is None or rotary is None or has_hooks(rotary):
        return ()
    by_type = isinstance(getattr(rotary, "rope_type", None), dict)
    types = rotary.rope_type if by_type else {None: getattr(rotary, "rope_type", None)}
    if not all(isinstance(name, str) and "dynamic" not in name and name != "longrope" for name in types.values()):
        return ()
    device = next(rotary.buffers()).device
    probe = torch.zeros(1, device=device, dtype=target.dtype)
    positions = torch.tensor([PROBE_POSITIONS], device=device)
    lean = None
    for kind in types:
        arguments = (probe, positions) if kind is None else (probe, positions, kind)
        try:
            expected = rotary.forward(*arguments)
        except (RuntimeError, TypeError, ValueError):
            return ()  # takes other arguments
        lean = lean or LeanRotary(rotary, target.fused, target.dtype, expected[0].shape[-1])
        if not _same(lean(*arguments), expected):
            return ()
    if lean is None:
        return ()
    rotary.forward = lean
    return ("position embeddings in one call",)


def _same(found: Any, expected: Any) -> bool:
    return all(
        a.shape == b.shape and a.dtype == b.dtype and relative_difference(a, b) <= TOLERANCES[b.dtype]
        for a, b in zip(found, expected, strict=True)
    )
