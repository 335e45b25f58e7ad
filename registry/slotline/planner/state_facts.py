"""Check of state layers: refuse tensors whose shapes disagree with the facts of their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from slotline.registry.contracts import StateLayer
from slotline.registry.contracts.state import STATE_KINDS
from slotline.registry.errors import ModelError


def refuse_unfit_states(layers: Sequence[StateLayer]) -> None:
    """Refuse state tensors whose shapes disagree with the facts of their layer's kind, before anything is allocated.

    Raises:
        ModelError: naming the layer, the tensor, and both shapes.
    """
    for layer in layers:
        for tensor in layer.tensors:
            if tensor.num_elements < 1 or min(tensor.shape, default=1) < 1:
                raise _unfit(layer, f"its state {tensor.name!r} of shape {list(tensor.shape)} holds nothing")
            if tensor.dtype != "auto" and not isinstance(getattr(torch, tensor.dtype, None), torch.dtype):
                raise _unfit(layer, f"its state {tensor.name!r} has dtype {tensor.dtype!r}, which is no torch dtype")
        kind = STATE_KINDS.get(layer.state_kind)
        if kind is None:
            continue  # a plugin's own kind, for which negotiation finds a backend
        if missing := sorted(name for sizes in kind.tensors.values() for name in sizes if _fact(layer, name) is None):
            raise _unfit(layer, f"a {layer.state_kind} layer needs the facts {', '.join(missing)}")
        wanted = {name: tuple(_fact(layer, size) for size in sizes) for name, sizes in kind.tensors.items()}
        found = {tensor.name: tensor.shape for tensor in layer.tensors}
        if wanted != found:
            raise _unfit(
                layer, f"its facts make its states {_shapes(wanted)}, and its page is laid out for {_shapes(found)}"
            )


def _fact(layer: StateLayer, size: str) -> int | None:
    """Return a size of a state: a fact, or a fact minus a number."""
    name, _, less = size.partition(" - ")
    value = layer.facts.get(name)
    return None if value is None else int(value) - int(less or 0)


def _shapes(shapes: Mapping[str, Sequence[int | None]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "none"


def _unfit(layer: StateLayer, text: str) -> ModelError:
    return ModelError(
        f"state layer {layer.name!r} (kind {layer.state_kind!r}): {text}",
        fix="correct the checkpoint's config.json; if it is right, tell the author of the model family",
    )
