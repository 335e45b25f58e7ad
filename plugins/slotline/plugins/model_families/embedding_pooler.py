"""Embeddings of pooled hidden states, or of each token's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from attrs import evolve, frozen

from slotline.kernels.async_copy import to_device
from slotline.plugins.model_families.dense_layers import DenseLayers
from slotline.plugins.model_families.sentence_transformers import Recipe
from slotline.registry.contracts import PooledTexts, PoolingMethod, PoolingParams
from slotline.registry.errors import RequestError


@frozen(eq=False)
class EmbeddingPooler:
    """Embeddings: pooled states, cut to the requested dimensions and divided by their length.

    Cutting before normalising follows Matryoshka Representation Learning (Kusupati et al., 2022, section 3).

    Attributes:
        recipe: the checkpoint's recipe, or the default.
        hidden_size: numbers in a whole embedding, after the linear layers.
        dimensions: lengths that the model was trained for, None if it was trained for one length.
        dense: linear layers over the pooled states.
    """

    recipe: Recipe
    hidden_size: int
    dimensions: Sequence[int] | None = None
    dense: DenseLayers | None = None

    @property
    def method(self) -> PoolingMethod:
        """Hidden states to use."""
        return self.recipe.method

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of requests."""
        return ("token_embed",) if self.recipe.each_token else ("embed", "token_embed")

    @property
    def texts(self) -> PooledTexts:
        """Prompts and similarity."""
        return self.recipe.texts

    @property
    def refusals(self) -> Mapping[str, str]:
        """Reasons for tasks that it does not serve."""
        return (
            {"embed": "the model has a vector for each token, and none for the text"} if self.recipe.each_token else {}
        )

    def reload(self, path: Path) -> None:
        """Read the linear layers again, from the same places in a folder.

        Raises:
            ModelError: if they cannot be read.
        """
        if self.dense is not None:
            self.dense.load([path / folder.name for folder in self.recipe.dense])

    def adjust(self, params: PoolingParams) -> PoolingParams:
        """See `slotline.registry.contracts.pooling.Pooler.adjust`."""
        wanted = self.recipe.dimensions if params.dimensions is None else params.dimensions
        if wanted not in (None, self.hidden_size) and (self.dimensions is None or wanted not in self.dimensions):
            raise RequestError(f"dimensions={wanted} is not served by this model", fix=self._allowed())
        normalize = self.recipe.normalize if params.normalize is None else params.normalize
        return evolve(params, dimensions=wanted or self.hidden_size, normalize=normalize)

    def pool(self, states: torch.Tensor, params: Sequence[PoolingParams]) -> torch.Tensor:
        """Return embeddings [n, hidden_size] float32. Numbers past a request's dimensions are 0."""
        if self.dense is not None:
            states = self.dense(states)
        sizes = [one.dimensions or self.hidden_size for one in params]
        if min(sizes, default=self.hidden_size) < self.hidden_size:
            ends = to_device(np.array(sizes), states.device)  # [n] int64
            kept = torch.arange(self.hidden_size, device=states.device) < ends[:, None]  # [n, hidden_size] bool
            states = states * kept
        flags = [bool(one.normalize) for one in params]
        if not any(flags):
            return states
        lengths = states.norm(dim=-1, keepdim=True).clamp_min(1e-12)  # [n, 1]
        if not all(flags):
            chosen = to_device(np.array(flags), states.device)  # [n] bool
            lengths = torch.where(chosen[:, None], lengths, 1.0)
        normalized: torch.Tensor = states / lengths
        return normalized

    def _allowed(self) -> str:
        if self.dimensions is None:
            return (
                f"leave dimensions out: the model's embeddings have {self.hidden_size} numbers, and its config.json "
                "names neither is_matryoshka nor matryoshka_dimensions"
            )
        if isinstance(self.dimensions, range):
            return f"use 1 to {self.hidden_size}"
        return f"use one of {', '.join(map(str, self.dimensions))}"
