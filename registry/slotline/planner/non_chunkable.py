"""Models whose prompts cannot be split: tokens of an encoder see later ones, and nothing is kept between steps."""

from __future__ import annotations

from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import ModelFacts
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Asked

_WHY = "layers of type encoder_only keep nothing between steps"


def whole_prompts(facts: ModelFacts) -> bool:
    """Return True if a prompt must be computed in one step."""
    return any(layer.attention_type == "encoder_only" for layer in facts.layers)


def length_of_whole_prompts(loaded: LoadedConfig, max_model_len: int) -> int:
    """Return the length of the longest prompt that fits into a step.

    Raises:
        NegotiationError: if a longer one was configured.
    """
    scheduler, origin = loaded.config.scheduler, loaded.origins["scheduler.max_model_len"]
    if max_model_len <= scheduler.max_batched_tokens:
        return max_model_len
    if scheduler.max_model_len != "auto":
        raise NegotiationError(
            f"scheduler.max_model_len = {max_model_len} ({origin.where}) is more than scheduler.max_batched_tokens = "
            f"{scheduler.max_batched_tokens}, and a prompt must be computed in one step: {_WHY}",
            fix=f"raise scheduler.max_batched_tokens to {max_model_len}, or lower scheduler.max_model_len",
        )
    return scheduler.max_batched_tokens


def refuse_sharing(loaded: LoadedConfig) -> Asked[bool]:
    """Turn prefix caching off.

    Raises:
        NegotiationError: if it was asked for.
    """
    origin = loaded.origins["cache.prefix_caching"]
    if loaded.config.cache.prefix_caching and origin.kind != "default":
        raise NegotiationError(
            f"cache.prefix_caching = true ({origin.where}) cannot hold: {_WHY}", fix="remove it from the configuration"
        )
    return Asked(False, _WHY)


def refuse_cache_dtype(loaded: LoadedConfig, facts: ModelFacts) -> None:
    """Refuse a cache dtype for a model without a cache.

    Raises:
        NegotiationError: if a dtype was named and no layer keeps anything.
    """
    if loaded.config.cache.dtype != "auto" and all(layer.attention_type == "encoder_only" for layer in facts.layers):
        raise NegotiationError(
            f"cache.dtype = {loaded.config.cache.dtype!r} ({loaded.origins['cache.dtype'].where}) has nothing to hold: "
            f"{_WHY}",
            fix="remove it from the configuration",
        )
