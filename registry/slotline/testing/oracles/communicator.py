"""What collectives give, computed from the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen

Given = tuple[str, tuple[Any, ...]] | None


@frozen(kw_only=True)
class Result:
    """Right result of a rank.

    Attributes:
        value: the tensor, in float64 if it is a sum.
        dtype: of the result.
        allowed: largest error of each number of a sum. None where all bits must be right.
    """

    value: torch.Tensor
    dtype: torch.dtype
    allowed: torch.Tensor | None = None


def results(given: Sequence[Given]) -> list[Result | None]:
    """Return the results of a call, from the method and arguments of each rank."""
    name = next(call[0] for call in given if call is not None)
    if name in ("send", "receive"):
        tensor = next(call[1][0] for call in given if call is not None and call[0] == "send")
        return [_moved(tensor) if call is not None and call[0] == "receive" else None for call in given]
    arguments = [call[1] for call in given if call is not None]
    tensors = [call[0] for call in arguments]
    if name == "all_reduce":
        return [_sum(tensors)] * len(given)
    if name == "reduce_scatter":
        return [_sum([x.chunk(len(given))[rank] for x in tensors]) for rank in range(len(given))]
    if name == "all_gather":
        dim = arguments[0][1] if len(arguments[0]) > 1 else 0
        return [_moved(torch.cat(tensors, dim))] * len(given)
    if name == "broadcast":
        source = arguments[0][1] if len(arguments[0]) > 1 else 0
        return [_moved(tensors[source])] * len(given)
    assert name == "all_to_all", name
    parts = [x.split(list(sent)) for x, sent, _ in arguments]
    return [_moved(torch.cat([part[rank] for part in parts])) for rank in range(len(given))]


def _moved(x: torch.Tensor) -> Result:
    return Result(value=x, dtype=x.dtype)


def _sum(tensors: Sequence[torch.Tensor]) -> Result:
    """Return a sum. Each rank after the first may round once, to half a unit in the last place."""
    dtype = tensors[0].dtype
    total = torch.stack([x.double() for x in tensors]).sum(0)
    large = total.abs() if len(tensors) == 2 else torch.stack([x.double().abs() for x in tensors]).sum(0)
    limits = torch.finfo(dtype)
    allowed = (len(tensors) - 1) * (limits.eps / 2 * large * (1 + 2**-10) + limits.tiny * limits.eps)
    return Result(value=total, dtype=dtype, allowed=allowed)
