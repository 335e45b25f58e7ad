"""What prompts may leave out at the model's end: the layers behind the last one that owns a cache; that one's queries.

What such a layer computes for a token is read by nobody but the next one, so a token whose logits are not wanted need
not pass it (YOCO, arXiv 2405.05254, section 3.2). Of the last layer that owns a cache nobody but itself reads the
queries; where none stands behind it, the model leaves them out by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from attrs import frozen

from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import AttentionLayer, ModelFacts
from slotline.registry.descriptor import Descriptor
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Setting

KEY = "cache.kv_sharing_fast_prefill"


@frozen(kw_only=True)
class FastPrefill:
    """What was decided.

    Attributes:
        layers: indices of the attention layers that are run for wanted tokens alone; empty where it is off.
        settings: the record, of models that have such layers.
    """

    layers: frozenset[int] = frozenset()
    settings: tuple[Setting, ...] = ()


def trailing_readers(layers: Sequence[AttentionLayer]) -> frozenset[int]:
    """The layers behind the last one that owns a cache, all of which read the cache of another."""
    return frozenset(
        layer.index for layer in takewhile(lambda layer: layer.shares_kv_with is not None, reversed(layers))
    )


def last_queries(facts: ModelFacts, *, task: str, drafter: Descriptor[Any] | None, stages: int) -> int | None:
    """The index of the model's last layer if queries of tokens that nobody asks for may be left out there; else None.

    Its keys and values are needed of all tokens, since later ones read them.
    """
    last = facts.layers[-1] if facts.layers and not facts.state_layers else None
    if last is None or last.shares_kv_with is not None or last.attention_type != "decoder":
        return None
    return None if _against(task, drafter, stages) else last.index


def _against(task: str, drafter: Descriptor[Any] | None, stages: int) -> list[str]:
    """Who needs the end of the model for all tokens."""
    texts = []
    if task != "generate":
        texts.append(f"task {task!r} reads hidden states of whole prompts")
    if drafter is not None and (drafter.capabilities.needs_computed or drafter.capabilities.needs_layers):
        texts.append(f"drafter {drafter.name!r} reads hidden states of whole prompts")
    if stages > 1:
        texts.append(f"the model runs over {stages} pipeline stages")
    return texts


def choose_fast_prefill(
    loaded: LoadedConfig,
    facts: ModelFacts,
    family: Descriptor[Any],
    *,
    task: str,
    drafter: Descriptor[Any] | None,
    stages: int,
) -> FastPrefill:
    """Whether it is on, as asked.

    Raises:
        NegotiationError: with every reason, if it was asked for and cannot be.
    """
    asked, origin = loaded.config.cache.kv_sharing_fast_prefill, loaded.origins[KEY]
    readers = frozenset() if facts.state_layers else trailing_readers(facts.layers)
    if not asked:
        origin_text = f"{origin.where}: {len(readers)} of {len(facts.layers)} layers could leave out unwanted tokens"
        setting = Setting(key=KEY, asked="false", resolved="false", origin=origin_text)
        return FastPrefill(settings=(setting,) if readers else ())
    texts = []
    if not readers:
        texts.append(f"no layer of {facts.architecture} stands behind the last one that stores keys or states")
    if refusal := family.capabilities.fast_prefill.refusal(True):
        texts.append(f"model family {family.name!r}: {refusal}")
    texts += _against(task, drafter, stages)
    if texts:
        raise NegotiationError(
            f"{KEY} = true ({origin.where}) cannot hold: {'; '.join(texts)}",
            fix=f"remove what it cannot hold beside, or set {KEY} = false",
        )
    setting = Setting(key=KEY, asked="true", resolved="true", origin=origin.where, explicit=True)
    return FastPrefill(layers=readers, settings=(setting,))
