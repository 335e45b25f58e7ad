"""Public API. Each name is imported when it is first asked for, so that a command starts at once."""

from __future__ import annotations

from slotline.registry.moved_modules import install as _install_moved_modules

_install_moved_modules()

TYPE_CHECKING = False  # an interrupt while `typing` is imported would be a traceback
if TYPE_CHECKING:
    from typing import Any

    from slotline.core.api.outputs import (
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
        ScoringOutput,
        ScoringRequestOutput,
    )
    from slotline.core.engine.engine import Engine
    from slotline.llm.async_llm import AsyncLLM
    from slotline.llm.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from slotline.llm.llm import LLM
    from slotline.registry.contracts import PoolingParams, StructuredOutputsParams
    from slotline.registry.contracts.sampling_params import SamplingParams
    from slotline.registry.lora_request import LoRARequest

__all__ = [
    "LLM",
    "AsyncLLM",
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
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]

_OUTPUTS = (
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
)
_LAZY = {
    **dict.fromkeys(_OUTPUTS, "slotline.core.api.outputs"),
    "LoRARequest": "slotline.registry.lora_request",
    "SamplingParams": "slotline.registry.contracts.sampling_params",
    "PoolingParams": "slotline.registry.contracts",
    "StructuredOutputsParams": "slotline.registry.contracts",
    "LLM": "slotline.llm.llm",
    "AsyncLLM": "slotline.llm.async_llm",
    "BeamSearchOutput": "slotline.llm.beam_search",
    "BeamSearchParams": "slotline.llm.beam_search",
    "BeamSearchSequence": "slotline.llm.beam_search",
    "Engine": "slotline.core.engine.engine",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for."""
    if name in _LAZY:
        from slotline.registry.lean_start import import_module

        found = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
