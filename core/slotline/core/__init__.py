"""The public API. Importing this does not import torch; using `LLM` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slotline.core.frontend.lora_request import LoRARequest
from slotline.core.frontend.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from slotline.core.frontend.sampling_params import SamplingParams
from slotline.registry.contracts import PoolingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from slotline.core.engine import Engine
    from slotline.core.frontend.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from slotline.core.frontend.llm import LLM

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_LAZY = {
    "LLM": "slotline.core.frontend.llm",
    "BeamSearchOutput": "slotline.core.frontend.beam_search",
    "BeamSearchParams": "slotline.core.frontend.beam_search",
    "BeamSearchSequence": "slotline.core.frontend.beam_search",
    "Engine": "slotline.core.engine",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch, or is seldom needed, when it is asked for."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
