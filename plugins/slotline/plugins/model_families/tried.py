"""Architectures that inspection tries, apart from those that the tests vouch for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import transformers

REFUSED: Mapping[str, str] = MappingProxyType({})
"""Architecture -> the reason why inspection cannot find out that it does not run."""


def is_tried(architecture: str) -> bool:
    """Return True for transformers' classes that generate text, alone or after encoders of other inputs."""
    return architecture in _known() and hasattr(transformers, architecture)


@cache
def _known() -> frozenset[str]:
    from transformers.models.auto import modeling_auto

    known: set[str] = set()
    for names in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        for value in names.values():
            known.update((value,) if isinstance(value, str) else value)
    return frozenset(known - set(REFUSED))


def architectures_of(model_type: str) -> list[str]:
    """Return the class that generates text of a model type, for a configuration that names none. Empty if unknown."""
    from transformers.models.auto import modeling_auto

    found = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    return [found] if isinstance(found, str) else list(found)[:1]
