"""Choice of fast prefill: the layers, and the queries of the last caching layer, that prompt tokens may skip.

After the last layer that owns a cache, a layer's output for a token is read only by the next layer. A token whose
logits are not wanted can skip these layers (YOCO, arXiv 2405.05254, section 3.2). The queries of the last layer that
owns a cache are read only by that layer. If no layer follows it, the model leaves them out by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from attrs import frozen

from slotline.planner.refusals import cannot_hold
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import AttentionLayer, ModelFacts
from slotline.registry.descriptor import Descriptor
from slotline.registry.negotiation import Setting

KEY = "cache.kv_sharing_fast_prefill"


@frozen(kw_only=True)
class FastPrefill:
    """Decision about fast prefill.

    Attributes:
        layers: indices of the attention layers that run only for tokens whose logits are wanted. Empty if it is off.
        settings: the record for the plan, if the model has layers that could be skipped.
    """

    layers: frozenset[int] = frozenset()
    settings: tuple[Setting, ...] = ()


def trailing_readers(layers: Sequence[AttentionLayer]) -> frozenset[int]:
    """Return the layers after the last one that owns a cache. All of them read another layer's cache."""
    return frozenset(
        layer.index for layer in takewhile(lambda layer: layer.shares_kv_with is not None, reversed(layers))
    )


def last_queries(facts: ModelFacts, *, task: str, drafter: Descriptor[Any] | None, stages: int) -> int | None:
    """Return the index of the model's last layer if queries without wanted logits may be left out there, else None.

    Its keys and values are still needed for all tokens, since later tokens read them.
    """
    last = facts.layers[-1] if facts.layers and not facts.state_layers else None
    if last is None or last.shares_kv_with is not None or last.attention_type != "decoder":
        return None
    return None if _against(task, drafter, stages) else last.index


def _against(task: str, drafter: Descriptor[Any] | None, stages: int) -> list[str]:
    """Return the reasons why the end of the model must run for all tokens."""
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
    """Decide if fast prefill is on.

    Raises:
        NegotiationError: with every reason, if it was asked for and is not possible.
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
        raise cannot_hold(loaded, KEY, "true", texts, "false")
    setting = Setting(key=KEY, asked="true", resolved="true", origin=origin.where, explicit=True)
    return FastPrefill(layers=readers, settings=(setting,))
