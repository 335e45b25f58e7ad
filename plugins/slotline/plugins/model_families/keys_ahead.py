"""Decoders in which tokens of an image see all of that image, as the masks of transformers show."""

from __future__ import annotations

import copy
from typing import Any

import torch
from attrs import evolve

from slotline.registry.contracts.model_family import ModelFacts
from slotline.registry.errors import ModelError

_TEXT, _IMAGE = 0, 1
_PROBE = (_TEXT, _IMAGE, _IMAGE, _TEXT)
"""Types of a few tokens, as transformers' processors count them."""


def with_keys_ahead(facts: ModelFacts, model_class: Any, config: Any) -> ModelFacts:
    """Return facts that say of each layer whether tokens of an image see the image's later tokens in it.

    Args:
        model_class: the whole transformers model's class.
        config: its configuration.

    Raises:
        ModelError: if text or tokens of other images see later tokens too.
    """
    make_masks = getattr(model_class, "create_masks_for_generate", None)
    if make_masks is None:  # then masks are causal, whatever the tokens are
        return facts
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text._attn_implementation = "eager"  # which has masks of numbers
    types = torch.tensor([_PROBE])
    masks = make_masks(
        config=config,
        inputs_embeds=torch.zeros(1, len(_PROBE), 1),
        attention_mask=torch.ones_like(types),
        cache=None,
        position_ids=torch.arange(len(_PROBE))[None],
        token_type_ids=types,
        mm_token_type_ids=types,
        is_first_iteration=True,
    )
    by_type = masks if isinstance(masks, dict) else dict.fromkeys(text.layer_types, masks)
    ahead = {name: _sees_ahead(mask[0, 0] == 0, facts) for name, mask in by_type.items()}
    layers = (evolve(layer, keys_ahead=ahead[kind]) for layer, kind in zip(facts.layers, text.layer_types, strict=True))
    return evolve(facts, layers=tuple(layers))


def _sees_ahead(visible: torch.Tensor, facts: ModelFacts) -> bool:
    """Return True if the first token of an image sees the second one, from what the probe's tokens see [4, 4] bool."""
    later = visible.triu(diagonal=1).nonzero().tolist()
    if later not in ([], [[1, 2]]):
        raise ModelError(
            f"in {facts.architecture} of {facts.path} text sees what comes after it",
            fix="use a model family plugin that serves this architecture",
        )
    return bool(later)
