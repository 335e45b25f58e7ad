"""Architectures that inspection tries, apart from those that the tests vouch for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import transformers

from slotline.plugins.model_families.audio import ARCHITECTURES as AUDIO
from slotline.registry.errors import ModelError

_INSIDE = "it computes attention inside its modules, outside transformers' interface"
_SOUND = "it makes several tokens of sound in each step"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "Inkling2ForCausalLM": "its layers attend to the outputs of earlier layers, which no cache keeps",
        "Inkling2LoopForCausalLM": "its layers attend to the outputs of earlier layers, which no cache keeps",
        "JetMoeForCausalLM": "its attention chooses experts by values of tokens, which inspection does not have",
        "MoshiForCausalLM": "transformers gives other text with its cache than without",
        "MusicgenForCausalLM": _SOUND,
        "MusicgenMelodyForCausalLM": _SOUND,
        "MvpForCausalLM": _INSIDE,
        "ProphetNetForCausalLM": "it predicts several tokens by streams of its own",
        "ReformerModelWithLMHead": "it attends by hashes",
        "RoFormerForCausalLM": _INSIDE,
        "TrOCRForCausalLM": _INSIDE,
        "XLNetLMHeadModel": "it attends in both directions, by permutations",
        "XmodForCausalLM": "it chooses adapters by a language, which requests do not have",
    }
)
"""Architecture -> the reason, where inspection would give none or another one."""


def is_tried(architecture: str) -> bool:
    """Return True for transformers' classes that generate text, alone or after encoders of other inputs."""
    return (architecture in _known() or architecture in AUDIO) and hasattr(transformers, architecture)


def refuse(path: Path, architecture: str) -> None:
    """Refuse an architecture that is known not to run.

    Raises:
        ModelError: with the reason.
    """
    if architecture in REFUSED:
        raise ModelError(
            f"{architecture} of {path} is not served: {REFUSED[architecture]}",
            fix="use a checkpoint of another architecture, or a plugin that serves this one",
        )


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
    return frozenset(known)
