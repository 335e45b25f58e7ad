"""Prompts that are embeddings, as users give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FIX = "give a tensor [n, hidden_size] of float32, bfloat16 or float16"


def as_prompt_embeds(value: Any) -> torch.Tensor:
    """Return a prompt's embeddings [n, hidden_size], contiguous in host memory, of the dtype that they came in.

    Args:
        value: a tensor or an array, on any device.

    Raises:
        RequestError: naming what is wrong with them.
    """
    if isinstance(value, np.ndarray):
        value = _from_array(value)
    if not isinstance(value, torch.Tensor):
        raise RequestError(f"prompt_embeds={safe_repr(value)} is no tensor", fix=_FIX)
    if value.layout != torch.strided or value.is_meta or value.dtype not in _DTYPES:
        where = "meta" if value.is_meta else str(value.layout)
        raise RequestError(f"prompt_embeds has the dtype {value.dtype} and the layout {where}", fix=_FIX)
    if value.ndim != 2:
        raise RequestError(f"prompt_embeds has the shape {list(value.shape)}", fix=_FIX)
    if value.numel() == 0:
        raise RequestError(f"prompt_embeds is empty: its shape is {list(value.shape)}", fix="give at least one row")
    embeds = value.detach().cpu().contiguous()
    refuse_unfinite(embeds)
    return embeds


def refuse_unfinite(embeds: torch.Tensor) -> None:
    """Refuse embeddings [n, hidden_size] with NaN or infinity.

    Raises:
        RequestError: naming the first such row.
    """
    if torch.isfinite(torch.stack(torch.aminmax(embeds))).all():
        return
    row = int((~torch.isfinite(embeds)).any(1).nonzero()[0])
    raise RequestError(
        f"prompt_embeds has NaN or infinity in row {row}, as {str(embeds.dtype).removeprefix('torch.')}",
        fix="give finite numbers that the model's dtype can hold",
    )


def _from_array(value: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor of an array's numbers."""
    try:
        return torch.tensor(value)
    except TypeError as error:
        raise RequestError(f"prompt_embeds is an array of {value.dtype}", fix=_FIX) from error
