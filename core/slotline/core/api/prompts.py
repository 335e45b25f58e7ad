"""Arguments of `LLM`: one prompt or many, and parameters for all of them or for each. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from attrs import evolve

from slotline.registry.contracts import PoolingParams
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

Params = TypeVar("Params", SamplingParams, PoolingParams)
Prompt = str | Sequence[int] | Mapping[str, Any]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts as a list. A list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    try:
        listed: list[Any] = list(prompts)
    except Exception as error:  # a foreign object may raise anything
        raise RequestError(
            f"prompts={safe_repr(prompts)} cannot be read", fix="give text, token ids, or a list"
        ) from error
    if not listed:
        raise RequestError("no prompt was given", fix="give at least one; an empty list of token ids is no prompt")
    return [listed] if isinstance(listed[0], Integral) else listed


def of_task(params: PoolingParams, task: str | None) -> PoolingParams:
    """Return the parameters with the task of the call."""
    if task is None or params.task == task:
        return params
    if params.task is not None:
        raise RequestError(
            f"PoolingParams.task={params.task!r} in a call for {task!r}", fix="leave it out, or call encode()"
        )
    return evolve(params, task=task)


def as_params(params: Params | Sequence[Params] | None, count: int, default: Params) -> Sequence[Params]:
    """Return parameters for each of `count` prompts, of the default's class."""
    kind, what = type(default), "sampling" if isinstance(default, SamplingParams) else "pooling"
    if params is None or isinstance(params, kind):
        return [default if params is None else params] * count
    given: Any = params
    try:
        listed = list(given) if isinstance(given, Iterable) else [given]  # parameters are not iterable
    except Exception:  # an object may only pretend to be iterable
        listed = [given]
    wrong = [one for one in listed if not isinstance(one, kind)]
    if wrong:
        raise RequestError(
            f"{what}_params={safe_repr(wrong[0])} is no {kind.__name__}", fix=f"give {kind.__name__}(...)"
        )
    if len(listed) != count:
        raise RequestError(
            f"{len(listed)} {what} parameters for {count} prompts", fix="give one, or one for each prompt"
        )
    return listed


def as_token_array(values: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the values [n] int64. They may be plain integers or numpy's."""
    try:
        listed = values if isinstance(values, list) else iter(values)
        return np.frombuffer(array("q", listed), np.int64)  # for a list of integers twice as fast as numpy itself
    except Exception as error:  # a foreign object may raise anything
        raise RequestError(
            f"prompt_token_ids={safe_repr(values)} are no token ids", fix="give integers, or text as a string"
        ) from error


def as_token_ids(values: Sequence[int]) -> list[int]:
    """Return the values as plain integers."""
    tokens: list[int] = as_token_array(values).tolist()
    return tokens
