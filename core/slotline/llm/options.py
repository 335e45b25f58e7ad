"""Check of options: refuse those that a method of `LLM` does not have, suggesting similar names. Torch-free."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from attrs import fields

from slotline.registry.config.faults import similar
from slotline.registry.contracts import PoolingParams
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

P = ParamSpec("P")
T = TypeVar("T")

_PARAMETERS = {"sampling_params": SamplingParams, "pooling_params": PoolingParams}


def known_options(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method refuse options that it does not have.

    Raises:
        RequestError: when the method is called with an unknown option.
    """
    names = tuple(inspect.signature(method).parameters)

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if unknown := kwargs.keys() - names:
            raise unknown_option(method.__name__, min(unknown), names)
        return method(*args, **kwargs)

    return checked


def unknown_option(method: str, name: str, names: Iterable[str], fix: str | None = None) -> RequestError:
    """Return the error for an option that a method does not have. `names` are its known options."""
    names = [one for one in names if one != "self"]
    for argument, kind in _PARAMETERS.items():
        if argument in names and name in {field.name for field in fields(kind)}:
            return RequestError(
                f"{method}() has no option {name!r}", fix=f"give it as {argument}={kind.__name__}({name}=...)"
            )
    kinds = [kind for argument, kind in _PARAMETERS.items() if argument in names]
    near = similar(name, [*names, *(field.name for kind in kinds for field in fields(kind))])
    fix = fix or f"leave it out; its options are {', '.join(names)}"
    return RequestError(f"{method}() has no option {safe_repr(name)}{near}", fix=fix)
