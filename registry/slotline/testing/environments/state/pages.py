"""Slots: state tensors in separate memory, or together in one padded page per slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from slotline.registry.contracts.state import StateTensorSpec
from slotline.testing.environments.state.problem import Problem

GUARD = 16  # bytes between two tensors of a page, and at its end
PAGE_ALIGNMENT = 16


@frozen
class Region:
    """Location of a state tensor: in `page` [num_slots, bytes], from byte `first` to `last` (excluded)."""

    view: Tensor
    page: Tensor
    first: int
    last: int


def plain_slots(problems: Sequence[Problem], num_slots: int, device: str) -> tuple[dict[str, Region], ...]:
    """Return separate, contiguous tensors filled with zeros."""
    found: list[dict[str, Region]] = []
    for problem in problems:
        own = {}
        for spec in problem.layer.tensors:
            view = torch.zeros(num_slots, *spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            page = view.view(num_slots, -1).view(torch.uint8)
            own[spec.name] = Region(view, page, 0, page.shape[1])
        found.append(own)
    return tuple(found)


def slots_in_one_page(
    problems: Sequence[Problem], num_slots: int, device: str, channel_last: bool
) -> tuple[dict[str, Region], ...]:
    """Return all tensors of a slot one after the other in one padded page. Every byte is 0xFF, which reads as NaN."""
    places: list[list[tuple[StateTensorSpec, int, int]]] = []
    end = GUARD
    for problem in problems:
        places.append([])
        for spec in problem.layer.tensors:
            size = int(np.prod(spec.shape)) * getattr(torch, spec.dtype).itemsize
            places[-1].append((spec, end, size))
            end = _aligned(end + size) + GUARD
    page = torch.full((num_slots, end), 0xFF, dtype=torch.uint8, device=device)
    return tuple(
        {spec.name: _region(page, spec, first, size, channel_last) for spec, first, size in own} for own in places
    )


def _region(page: Tensor, spec: StateTensorSpec, first: int, size: int, channel_last: bool) -> Region:
    dtype = getattr(torch, spec.dtype)
    rows, columns = spec.shape[0], int(np.prod(spec.shape[1:]))
    flat = page.view(dtype)[:, first // dtype.itemsize : first // dtype.itemsize + rows * columns]
    if spec.name == "conv" and channel_last:
        view = flat.unflatten(1, (columns, rows)).mT
    else:
        view = flat.unflatten(1, spec.shape)
    return Region(view, page, first, first + size)


def _aligned(size: int) -> int:
    return -(-size // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
