"""Mutants that get multi-head latent attention wrong."""

from __future__ import annotations

import torch
from attrs import evolve

from slotline.registry.contracts.attention import AttentionLayer, KVCache, TreeMask
from slotline.testing.check import Level
from slotline.testing.mutants.attention.making import mutant
from slotline.testing.reference.attention.backend import EagerAttention, Plan


class ValuesFromTheEnd(EagerAttention):
    def latent_values(self, layer: AttentionLayer, keys: torch.Tensor) -> torch.Tensor:
        return keys[..., -layer.head_size_v :]


class PositionsLeftOut(EagerAttention):
    """Scores only by the latent."""

    def scores(self, layer: AttentionLayer, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        size = layer.head_size_v if layer.mla else layer.head_size
        return super().scores(layer, query[..., :size], keys[..., :size])


class ScaleOfTheLatent(EagerAttention):
    def cap(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        return super().cap(layer, scores / layer.scale * layer.head_size**-0.5 if layer.mla else scores)


class ValuesStored(EagerAttention):
    """Writes what it is handed as values over the latents."""

    def write(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:
        super().write(layer, key, value, cache, plan)
        if layer.mla:
            latents = KVCache(cache.value, cache.value)
            super().write(layer, value, value, latents, plan)


class ScaleOfValues(EagerAttention):
    """Counts the values' scale for what is read as values."""

    def scaled(
        self, layer: AttentionLayer, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().scaled(evolve(layer, mla=False), keys, values)


class SixteenHeads(EagerAttention):
    """Lets the heads of a latent beyond the sixteenth read what the first ones found, as a tile that is cut off."""

    def combine(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = super().combine(weights, values)
        return out if out.shape[1] <= 16 else out[:, torch.arange(out.shape[1]) % 16]


class TreeIgnored(EagerAttention):
    """Has no mask of a tree over latents."""

    def among_nodes(self, layer: AttentionLayer, tree: TreeMask, seen: torch.Tensor, *rest: int) -> torch.Tensor:
        return seen if layer.mla else super().among_nodes(layer, tree, seen, *rest)


L1, L2 = Level.NUMERICS, Level.HOSTILE

MUTANTS = (
    mutant("latent-values-from-the-end", L1, "the value is a key's last numbers", ValuesFromTheEnd),
    mutant("latent-without-positions", L1, "scores leave out the part with positions", PositionsLeftOut),
    mutant("latent-scale", L1, "scores are scaled by the latent's size", ScaleOfTheLatent),
    mutant("latent-values-stored", L2, "write stores the values over the latents", ValuesStored),
    mutant("latent-scale-of-values", L1, "values of an eight-bit cache count the values' scale", ScaleOfValues),
    mutant("latent-of-sixteen-heads", L1, "heads beyond the sixteenth repeat the first", SixteenHeads),
    mutant("latent-tree-ignored", L1, "nodes of a tree attend to the latents before them", TreeIgnored),
)
