"""Checks of what requests ask of logits processors and of what processors answer, and the errors for both."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import ContractError, RequestError
from slotline.registry.loading import typed_failures

if TYPE_CHECKING:
    import torch

_DEFAULTS = SamplingParams()


def refuse_unhandled(params: SamplingParams, absent: Iterable[str], handled: Collection[str]) -> None:
    """Refuse parameters that no processor of a run handles.

    Args:
        params: of a request.
        absent: sampling parameters that only a processor can honour, and none of the run does.
        handled: names that the run takes, also in `extra_args`.

    Raises:
        RequestError: naming the parameter and the remedy.
    """
    for name in params.extra_args or ():
        if name not in handled:
            raise RequestError(
                f"extra_args names {name!r}, which no logits processor of this run takes",
                fix=f"name it under [logits_processors]; this run takes: {', '.join(sorted(handled))}",
            )
    for name in absent:
        if getattr(params, name) != getattr(_DEFAULTS, name):
            raise RequestError(
                f"{name}={getattr(params, name)!r} needs a logits processor that this run does not have",
                fix="name one that takes it under [logits_processors], see `slotline plugins`",
            )


def checking(name: str, source: str) -> AbstractContextManager[None]:
    """Turn what a processor raises while it checks a request into a typed error.

    Args:
        name: of the processor.
        source: package that brings it, empty if that is not known.
    """
    return typed_failures(
        f"logits processor {name!r} failed to check a request",
        fix=f"change the parameters that it takes, or do without it{_brought(name, source)}",
    )


def check_floor(name: str, source: str, floor: float) -> None:
    """Check the answer of `LogitsProcessor.floor`.

    Raises:
        ContractError: if it is NaN or above 0.
    """
    if math.isnan(floor) or floor > 0:
        raise ContractError(
            f"logits processor {name!r} has the floor {floor}",
            fix=f"return a number of 0 or below{_brought(name, source)}",
        )


def misfit(name: str, source: str, found: Any, given: torch.Tensor) -> ContractError:
    """Return the error of a processor that was given logits and returned something of another form."""
    if not hasattr(found, "device"):
        return ContractError(
            f"logits processor {name!r} returned {type(found).__name__}",
            fix=f"return the logits{_brought(name, source)}",
        )
    return ContractError(
        f"logits processor {name!r} returned {found.dtype} {list(found.shape)} on {found.device}",
        fix=f"return {given.dtype} {list(given.shape)} on {given.device}{_brought(name, source)}",
    )


def unusable(names: Sequence[str], *, none_left: bool) -> str:
    """Return the reason why a request has no next token.

    Args:
        names: processors and parameters with work for the request.
        none_left: they ban all tokens. Otherwise they made NaN or infinity.
    """
    working = f"the logits processors with work for this request ({', '.join(names)})"
    if none_left:
        error = RequestError(
            f"no token is left to sample: {working} ban all of them",
            fix="loosen what bans tokens: allowed_token_ids, bad_words, logit_bias, or a processor of your own",
        )
        return f"RequestError: {error}"
    return f"ContractError: {working} made NaN or infinity of a logit"


def _brought(name: str, source: str) -> str:
    return f"; {name!r} is brought by {source}" if source else ""
