"""Inputs for checks of the short forwards: hidden states, position embeddings and a recording attention function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slotline.plugins.model_families.passes.equality import TOLERANCES, relative_difference
from slotline.plugins.model_families.passes.target import Target

PROBE_NAME = "slotline_passes_probe"
PROBE_POSITIONS = (1, 17, 300)


@define
class Recorder:
    """An attention function that keeps what it was called with."""

    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]]

    def __call__(self, _: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, None]:
        self.calls.append((query.clone(), key.clone(), value.clone(), options))
        return query.transpose(1, 2), None


@contextmanager
def recording(model: Any) -> Iterator[Recorder]:
    """Record the calls of the model's attention function inside."""
    recorder, before = Recorder([]), model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[PROBE_NAME] = recorder
    model.config._attn_implementation = PROBE_NAME
    try:
        yield recorder
    finally:
        model.config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS[PROBE_NAME]


def probe(module: Any, rotary: Any, target: Target) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Return random hidden states [1, tokens, features] and their position embeddings."""
    features = module.config.hidden_size
    hidden = torch.randn(1, len(PROBE_POSITIONS), features, generator=torch.Generator().manual_seed(features))
    device = next(rotary.buffers()).device
    hidden = hidden.to(device, target.dtype)
    positions = torch.tensor([PROBE_POSITIONS], device=device)  # [1, tokens]
    # A rope type by layer type means that the embedding must be told which (Gemma 3).
    by_type = isinstance(getattr(rotary, "rope_type", None), dict)
    return hidden, rotary(hidden, positions, *((_layer_type(module),) if by_type else ()))


def _layer_type(module: Any) -> str:
    """Return the type of an attention module's layer: its own attribute, or the configuration's (Olmo 3)."""
    own = getattr(module, "layer_type", None)
    return str(own if own is not None else module.config.layer_types[module.layer_idx])


def same(found: Any, expected: torch.Tensor, states: tuple[torch.Tensor, ...], recorder: Recorder) -> bool:
    """Return True if outputs and rotated states of both forwards agree within the tolerance."""
    *turned, _ = recorder.calls.pop()
    pairs = [(found[0], expected), *zip(turned, states, strict=True)]
    tolerance = TOLERANCES[expected.dtype]
    return all(a.shape == b.shape and relative_difference(a, b) <= tolerance for a, b in pairs)
