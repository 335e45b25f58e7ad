"""Planning for drafters with a checkpoint: its folder, and the attention layers that it adds to the model's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import AttentionLayer, DrafterInspection, KVDrafterFactory, ModelFacts
from slotline.registry.descriptor import Descriptor
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import ContractError, NegotiationError
from slotline.registry.negotiation import Setting

LENGTH = "drafter.max_model_len"


def draft_path(loaded: LoadedConfig, facts: ModelFacts) -> str | None:
    """Return the draft checkpoint's folder: as configured, else named like the drafter in the model folder, or None."""
    path = loaded.path("drafter.path") or facts.path / loaded.config.drafter.name
    return str(path) if loaded.config.drafter.path or path.is_dir() else None


def draft_length(loaded: LoadedConfig, max_model_len: int) -> int:
    """Return the tokens, drafts included, up to which a request gets drafts, at most `max_model_len`."""
    return min(loaded.config.drafter.max_model_len or max_model_len, max_model_len)


def draft_length_setting(loaded: LoadedConfig, max_model_len: int) -> tuple[Setting, ...]:
    """Return the record of a length beyond which requests go without drafts. Empty if there is none."""
    length = draft_length(loaded, max_model_len)
    if length == max_model_len:
        return ()
    origin = f"{loaded.origins[LENGTH].where}; longer requests go on without drafts"
    return (Setting(key=LENGTH, asked=str(length), resolved=str(length), origin=origin, explicit=True),)


def draft_layers(
    loaded: LoadedConfig,
    registry: PluginRegistry,
    descriptor: Descriptor[Any] | None,
    facts: ModelFacts,
    max_model_len: int,
    inspect_model: Callable[[Path], ModelFacts],
    *,
    divided: bool,
) -> tuple[AttentionLayer, ...]:
    """Return the drafter's own attention layers, numbered after the model's.

    Raises:
        SlotlineError: if the drafter does not fit the model, if its layers are not decoder layers or cannot see keys
            ahead where its blocks need it, or if the model is divided over stages.
    """
    if descriptor is None or not descriptor.capabilities.needs_kv_group:
        return ()
    name = descriptor.name
    if divided:
        raise NegotiationError(
            f"drafter {name!r} has attention layers of its own, and the model is divided over pipeline stages",
            fix="remove parallel.pipeline, or name a drafter without layers of its own",
        )
    factory: KVDrafterFactory = registry.factory(descriptor)  # type: ignore[assignment]  # checked below
    if not callable(getattr(factory, "attention_layers", None)):
        raise ContractError(
            f"drafter {name!r} declares needs_kv_group, and its factory has no attention_layers",
            fix="tell the author of the plugin",
        )
    inspection = DrafterInspection(
        facts=facts,
        num_tokens=loaded.config.drafter.tokens,
        max_model_len=draft_length(loaded, max_model_len),
        path=draft_path(loaded, facts),
        inspect_model=inspect_model,
        options=registry.options(loaded, descriptor),
    )
    with registry.building(descriptor):
        own = numbered(factory.attention_layers(inspection), len(facts.layers))
    if odd := [layer for layer in own if layer.attention_type != "decoder"]:
        raise NegotiationError(
            f"drafter {name!r} has an attention layer {odd[0].name!r} of type {odd[0].attention_type}, and a drafter "
            "is given neither an encoder's keys nor whole prompts",
            fix="name another checkpoint in drafter.path, one of a decoder",
        )
    ahead = descriptor.capabilities.block_attention == "full"
    if ahead and (odd := [layer for layer in own if layer.chunk is not None or layer.alibi_slopes is not None]):
        raise NegotiationError(
            f"drafter {name!r} has an attention layer {odd[0].name!r} with chunks or ALiBi, and tokens of its blocks "
            "see later ones, which is not defined there",
            fix="name another checkpoint in drafter.path",
        )
    return tuple(evolve(layer, name=f"{name}.{layer.name}", keys_ahead=ahead or layer.keys_ahead) for layer in own)


def numbered(layers: Sequence[AttentionLayer], first: int) -> tuple[AttentionLayer, ...]:
    """Return the layers with indices from `first` on."""
    return tuple(
        evolve(
            layer,
            index=first + layer.index,
            shares_kv_with=None if layer.shares_kv_with is None else first + layer.shares_kv_with,
            index_from=None if layer.index_from is None else first + layer.index_from,
        )
        for layer in layers
    )
