"""Rotary frequencies that hold for every batch.

transformers chooses the frequencies of `dynamic` and `longrope` scaling in each forward, by the highest position in it.
In a batch of several requests one request's result would then depend on the others, and its cached keys on earlier
steps. It also costs a device synchronisation. The choice is therefore made once, for the longest allowed sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def freeze(hf_model: torch.nn.Module, max_model_len: int) -> tuple[str, ...]:
    """Fix the frequencies of every rotary module in place.

    * ``dynamic``: those of the unscaled model. They are exact up to `max_position_embeddings`, which is also the
      longest sequence that inspection allows.
    * ``longrope``: the long ones if `max_model_len` exceeds the original length, else the short ones (like vLLM).

    Returns:
        A note for each kind of scaling that was fixed.
    """
    notes = []
    for module in hf_model.modules():
        for layer_type, rope_type in _rope_types(module):
            if rope_type == "longrope":
                notes.append(_freeze_longrope(module, layer_type, max_model_len))
            elif "dynamic" in rope_type:
                notes.append("dynamic rope scaling is fixed at the unscaled frequencies")
            else:
                continue
            _mark_fixed(module, layer_type)
    return tuple(dict.fromkeys(notes))


def _rope_types(module: Any) -> Iterator[tuple[str | None, str]]:
    """Return the (layer type, rope type) pairs of a rotary module. The layer type is None if there is only one type."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, dict):
        yield from rope_type.items()
    elif isinstance(rope_type, str):
        yield None, rope_type


def _freeze_longrope(module: Any, layer_type: str | None, max_model_len: int) -> str:
    of_type = {} if layer_type is None else {"layer_type": layer_type}
    buffer = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
    inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, buffer.device, seq_len=max_model_len, **of_type)
    buffer.copy_(inv_freq)  # [rotary_size / 2] float32
    parameters = module.config.rope_parameters
    original = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
    kind = "long" if max_model_len > original else "short"
    return (
        f"longrope is fixed at the {kind} factors, since max_model_len is {max_model_len} ({original} before scaling)"
    )


def _mark_fixed(module: Any, layer_type: str | None) -> None:
    """Set the `default` rope type, which the forward does not change."""
    module.rope_type = "default" if layer_type is None else {**module.rope_type, layer_type: "default"}
