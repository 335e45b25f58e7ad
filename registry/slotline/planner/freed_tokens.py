"""Extensions that free tokens in the middle of requests, and what cannot be right beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import PLAIN, AttentionLayer, ModelFacts
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Need, Plan

_BESIDE: Mapping[str, str] = {
    "drafts": "drafter.name: tokens to verify are counted by position, and rejected ones are taken back by slot",
    "states": "the model keeps states, which hold all tokens and free none",
    "pooling": "task: a request that samples nothing ends with its prompt",
    "pipeline": "parallel.pipeline: a stage may have more steps under way than the one whose tokens are freed",
    "context_shards": "parallel.decode_context: each shard has a part of a block, chosen by position",
    "kv_transfer": "kv_connector.name: a block whose load fails must be found again in the request that holds it",
    "multimodal": "the model takes images or sounds, whose places in a prompt are found by the keys before them",
}
"""Features of a plan beside which no token is freed, with the reasons."""


def score_needs(
    loaded: LoadedConfig, registry: PluginRegistry, extensions: Sequence[Descriptor[Any]]
) -> tuple[Need, ...]:
    """Return the need for attention scores if the options of an extension that frees tokens say that it reads them."""
    return tuple(
        Need(capability="scores", value=True, origin=f"[extensions.{one.name}]")
        for one in extensions
        if one.capabilities.frees_tokens and getattr(registry.options(loaded, one), "reads_scores", False)
    )


def frees_tokens(
    plan: Plan,
    facts: ModelFacts,
    offers: Mapping[tuple[Kind, str], Descriptor[Any]],
    extensions: Sequence[Descriptor[Any]],
    features: Mapping[str, bool],
) -> bool:
    """Return whether an extension of a plan declares `frees_tokens`.

    Args:
        features: of the plan, by name.

    Raises:
        NegotiationError: with every reason why no token of these caches can be freed.
    """
    names = [one.name for one in extensions if one.capabilities.frees_tokens]
    if not names:
        return False
    texts = [reason for name, reason in _BESIDE.items() if features[name]]
    texts += [] if plan.cache_groups else ["the model has no cache"]
    for group in plan.cache_groups:
        if group.format != PLAIN:
            texts.append(f"cache group {group.name!r} has the format {group.format!r}; {PLAIN!r} is moved")
        found = dict.fromkeys(text for layer in group.layers for text in _misfits(layer))
        texts += [f"layers of {group.name!r} {text}" for text in found]
    backends = dict.fromkeys(group.backend for group in plan.groups if group.cache_group)
    texts += [
        f"attention backend {name!r} keeps something for each block, and contents of blocks move"
        for name in backends
        if offers[Kind.ATTENTION, name].capabilities.block_events
    ]
    if facts.position_axes > 1:
        texts.append(f"{facts.architecture} has positions on several axes")
    if texts:
        raise NegotiationError(
            f"extension {', '.join(map(repr, names))} frees tokens in the middle of requests, which cannot hold: "
            f"{'; '.join(texts)}",
            fix="change what the reasons name, or remove the extension's table under [extensions]",
        )
    return True


def _misfits(layer: AttentionLayer) -> list[str]:
    """Return what about a layer goes wrong once slots and positions differ."""
    reasons = {
        "have a window, which counts slots": layer.window is not None,
        "have chunks, which are cut by slot": layer.chunk is not None,
        "have ALiBi slopes, whose distances count slots": layer.alibi_slopes is not None,
        "have a position bias, whose distances count slots": layer.position_bias is not None,
        "keep latents, which all heads share": layer.mla,
        "have tokens that see later ones, by position": layer.keys_ahead,
        "take inputs beside keys and values, which are not moved": bool(layer.inputs),
        f"are of type {layer.attention_type!r}": layer.attention_type != "decoder",
        f"hold the cache kind {layer.kv_kind!r}": layer.kv_kind != "full",
    }
    return [text for text, holds in reasons.items() if holds]
