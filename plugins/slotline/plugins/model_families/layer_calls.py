"""Calls of decoder layers, as a model makes them when it is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from slotline.plugins.model_families import structure


class LayerCalls:
    """What the layers of a decoder are called with.

    Attributes:
        ran: the layers that were called.
        chained: whether each was given one tensor of the hidden states' width, [1, num_tokens, hidden_size], and no
            embeddings of its own.
    """

    def __init__(self, model: Any) -> None:
        self._layers = tuple(getattr(model.base_model, "layers", ()))
        self._width = structure.hidden_size(model)
        self.ran: set[torch.nn.Module] = set()
        self.chained = not getattr(model.config, "hidden_size_per_layer_input", None)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the calls inside."""
        handles = [layer.register_forward_pre_hook(self._note, with_kwargs=True) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, layer: torch.nn.Module, args: Any, options: Any) -> None:
        self.ran.add(layer)
        tensors = [one for one in tree_leaves((args, options)) if isinstance(one, torch.Tensor)]
        wide = [one for one in tensors if one.is_floating_point() and one.shape[-1:] == (self._width,)]
        self.chained &= len(wide) == 1 and wide[0].ndim == 3
