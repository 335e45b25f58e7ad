"""Positions for decoders that count them by themselves, from the number of tokens in transformers' cache.

Tokens of many requests are flattened here, so the positions of a forward come from the engine.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from slotline.plugins.model_families import structure

PARAMETER = "position_ids"


def pass_on(hf_model: Any) -> Any:
    """Return the model, whose embeddings of positions get the `position_ids` of the decoder's forward.

    A decoder that takes them itself is left alone.
    """
    pass_to(hf_model.base_model)
    return hf_model


def pass_to(body: nn.Module) -> None:
    """Let a decoder's embeddings of positions get the `position_ids` of its forward."""
    if PARAMETER in inspect.signature(body.forward).parameters:
        return
    current: list[torch.Tensor | None] = [None]
    for module in body.modules():
        own = type(module).forward  # without an earlier call's change
        if isinstance(module, nn.Embedding) and PARAMETER in inspect.signature(own).parameters:
            module.forward = _told(module, current)  # type: ignore[method-assign]
        elif hasattr(module, "create_position_ids_from_input_ids"):
            module.forward = _looked_up(module, current)
    body.forward = _telling(body, current)


def quiet(hf_model: nn.Module) -> None:
    """Leave out transformers' look at token ids for padding, which waits for the device. No batch has any."""
    for module in hf_model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _say_nothing  # type: ignore[assignment]


def _say_nothing(*_: Any, **__: Any) -> None:
    return None


def _told(module: nn.Module, current: list[torch.Tensor | None]) -> Any:
    """Return the forward of an embedding with the current positions, in as many dimensions as it is called with."""
    original = type(module).forward.__get__(module)
    signature = inspect.signature(original)

    def forward(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        given, positions = bound.arguments.get(PARAMETER), current[0]
        if positions is not None:
            flat = isinstance(given, torch.Tensor) and given.ndim == 1
            bound.arguments[PARAMETER] = positions[0] if flat else positions
        return original(*bound.args, **bound.kwargs)

    return forward


def _looked_up(module: Any, current: list[torch.Tensor | None]) -> Any:
    """Return the forward of a table of positions that begin after the padding's, for the current positions."""
    original = type(module).forward.__get__(module)

    def forward(*args: Any, **options: Any) -> Any:
        positions = current[0]
        return original(*args, **options) if positions is None else module.weights[positions + module.padding_idx + 1]

    return forward


def _telling(body: nn.Module, current: list[torch.Tensor | None]) -> Any:
    """Return the forward of a decoder that tells its embeddings the positions."""
    original = body.forward

    def forward(*args: Any, position_ids: torch.Tensor | None = None, **options: Any) -> Any:
        current[0] = position_ids
        try:
            return original(*args, **structure.taking(original, options))
        finally:
            current[0] = None

    return forward
