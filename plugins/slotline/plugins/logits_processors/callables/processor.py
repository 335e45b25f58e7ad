"""Calls a request's own functions on its logits."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

logger = logging.getLogger("slotline")

_Function = Callable[..., Any]


class Callables:
    """The functions of each row, with its prompt's tokens for those that take three arguments."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._functions: dict[int, list[tuple[_Function, bool]]] = {}
        self._warned = False

    def validate(self, params: Mapping[str, Any]) -> None:
        """Check that each takes (output_token_ids, logits) or (prompt_token_ids, output_token_ids, logits)."""
        for function in params.get("logits_processors") or ():
            _takes_prompt(function)

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Keep the request's functions."""
        functions = params.get("logits_processors") or ()
        if not functions:
            return False
        if not self._warned:
            logger.warning(
                "SamplingParams(logits_processors=...) is slow: the functions run one by one in every step; "
                "docs/sampling.md shows how to write a logits processor that takes all rows at once"
            )
            self._warned = True
        self._functions[row] = [(function, _takes_prompt(function)) for function in functions]
        return True

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Call each function of each row with lists and a row of logits of its own."""
        for entry, row in enumerate(batch.rows.tolist()):
            end = int(batch.num_tokens[entry])
            tokens = batch.token_table[row, :end].tolist()
            if batch.draft_token_ids is not None:
                tokens += batch.draft_token_ids[entry, : batch.draft_positions[entry]].tolist()
            prompt, output = (
                tokens[: batch.num_prompt_tokens[entry]],
                tokens[batch.num_prompt_tokens[entry] :],
            )
            for index, (function, takes_prompt) in enumerate(self._functions[row]):
                given = [list(prompt)] if takes_prompt else []
                found = function(*given, list(output), logits[entry].clone())
                _check(index, found, logits[entry])
                logits[entry] = found
        return logits

    def release(self, row: int) -> None:
        """Let the row's functions go."""
        del self._functions[row]


def _takes_prompt(function: _Function) -> bool:
    """Return True if the callable takes three arguments.

    Raises:
        RequestError: if it takes neither two nor three.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # no Python function: nothing to read there
        signature = None
    for count in (2, 3):
        try:
            if signature is not None:
                signature.bind(*range(count))
                return count == 3
        except TypeError:
            continue
    raise RequestError(
        f"logits_processors holds {safe_repr(function, 80)}, which does not take two or three arguments",
        fix="take (output_token_ids, logits) or (prompt_token_ids, output_token_ids, logits)",
    )


def _check(index: int, found: Any, given: torch.Tensor) -> None:
    want = (given.shape, given.dtype, given.device)
    if not isinstance(found, torch.Tensor) or (found.shape, found.dtype, found.device) != want:
        shown = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)[:60]
        raise RequestError(
            f"logits_processors[{index}] returned {shown}", fix=f"return the logits, {want[1]} {list(want[0])}"
        )
    if bool(found.isnan().any()):
        raise RequestError(f"logits_processors[{index}] returned NaN", fix="return numbers or minus infinity")
