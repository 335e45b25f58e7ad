"""The public API. Importing this does not import torch; using `LLM` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slotline.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from slotline.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slotline.core.engine import Engine
    from slotline.core.llm import LLM

__all__ = ["LLM", "CompletionOutput", "Engine", "Logprob", "RequestMetrics", "RequestOutput", "SamplingParams"]

_LAZY = {"LLM": "slotline.core.llm", "Engine": "slotline.core.engine"}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
