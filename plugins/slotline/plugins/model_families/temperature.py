"""Llama 4's temperature tuning, which makes queries of far positions longer.

transformers takes a token's position from its place in the forward, and tokens of many requests are flattened here. The
factor is ``1 + attn_scale * log(1 + floor((position + 1) / floor_scale))``, exactly 1 below `floor_scale`. Below it the
tuning is switched off, and longer sequences are refused.
"""

from __future__ import annotations

from typing import Any

from slotline.registry.errors import ModelError


def longest_untuned(hf_model: Any) -> int | None:
    """Return the longest sequence in which the tuning changes nothing, or None for a model without it."""
    scales = [m.floor_scale for m in hf_model.modules() if getattr(m, "attn_temperature_tuning", False)]
    return max(1, int(min(scales)) - 1) if scales else None


def settle(hf_model: Any, max_model_len: int) -> None:
    """Switch the tuning off, in place.

    Raises:
        ModelError: if `max_model_len` reaches positions where it matters.
    """
    for name, module in hf_model.named_modules():
        if not getattr(module, "attn_temperature_tuning", False):
            continue
        if max_model_len >= module.floor_scale:
            raise ModelError(
                f"{name!r} tunes the temperature of attention from position {int(module.floor_scale) - 1} on, which "
                f"this version does not serve; max_model_len is {max_model_len}",
                fix=f"set scheduler.max_model_len = {int(module.floor_scale) - 1} or less",
            )
        module.attn_temperature_tuning = False
