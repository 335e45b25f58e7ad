"""Prompts of embeddings in a request's body: safetensors files in base64, each with one tensor."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from slotline.core.scheduler.admission import EngineLimits
from slotline.registry.errors import RequestError
from slotline.registry.loading import one_line

_FIX = "encode safetensors.torch.save({'prompt_embeds': tensor}) in base64"


def as_embedded_prompts(given: str | list[str] | None, limits: EngineLimits) -> list[dict[str, Any]]:
    """Return each prompt of embeddings as a mapping for `AsyncLLM`. Empty for none.

    Raises:
        RequestError: if the engine takes none, or one cannot be read.
    """
    if given is None:
        return []
    if (told := limits.absent.get("prompt_embeds")) is not None:
        reason, fix = told(given)
        raise RequestError(reason, fix=fix)
    return [{"prompt_embeds": _decoded(one)} for one in ([given] if isinstance(given, str) else given)]


def _decoded(text: str) -> torch.Tensor:
    """Return the one tensor of a file."""
    try:
        found: dict[str, torch.Tensor] = load(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, SafetensorError, KeyError) as error:
        raise RequestError(f"prompt_embeds cannot be read: {one_line(error)}", fix=_FIX) from error
    if len(found) != 1:
        raise RequestError(f"prompt_embeds has {len(found)} tensors, and a prompt is one", fix=_FIX)
    return next(iter(found.values()))
