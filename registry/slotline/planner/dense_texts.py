"""Layers whose index picks every key of all texts that are served: plain attention, for which more backends exist."""

from __future__ import annotations

from attrs import evolve

from slotline.registry.contracts.attention import INDEX_INPUTS, AttentionLayer
from slotline.registry.contracts.model_family import ModelFacts

PLAIN_KINDS = {"dsa": "mla"}
"""Kind of cache with an index's keys -> the kind without them."""


def without_idle_index(facts: ModelFacts, max_model_len: int) -> ModelFacts:
    """Return the facts with plain layers in place of those whose index picks `max_model_len` keys or more."""
    layers = tuple(_plain(layer) if _is_idle(layer, max_model_len) else layer for layer in facts.layers)
    return facts if layers == facts.layers else evolve(facts, layers=layers)


def _is_idle(layer: AttentionLayer, max_model_len: int) -> bool:
    return layer.index_topk is not None and layer.index_topk >= max_model_len and layer.kv_kind in PLAIN_KINDS


def _plain(layer: AttentionLayer) -> AttentionLayer:
    left = tuple(each for each in layer.inputs if each.name not in INDEX_INPUTS)
    return evolve(layer, index_topk=None, index_from=None, inputs=left, kv_kind=PLAIN_KINDS[layer.kv_kind])
