"""Forces the end mark of a model's thinking once the tokens since its start mark have reached the budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.kernels.async_copy import to_device
from slotline.plugins.logits_processors.thinking_budget.options import ThinkingBudgetOptions
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

Int = npt.NDArray[np.int64]
_Marks = tuple[tuple[int, ...], tuple[int, ...]]


class ThinkingBudget:
    """Budget and marks of each row. The state of a row is read from its history, drafts included.

    Tokens count from the last start mark, in the prompt or in the output. An end mark that has begun is completed.
    """

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        options: ThinkingBudgetOptions = context.options or ThinkingBudgetOptions()
        self._defaults = (options.start_token_ids, options.end_token_ids)
        self._budget = np.zeros(context.max_requests, np.int64)
        self._kind = np.zeros(context.max_requests, np.int64)  # index into the marks
        self._marks: list[_Marks] = []
        self._uses: list[int] = []  # rows that have each of them

    def validate(self, params: Mapping[str, Any]) -> None:
        """Check that the budget is an integer, and that both marks are known."""
        budget = params.get("thinking_token_budget")
        if budget is None:
            return
        if not isinstance(budget, int) or isinstance(budget, bool) or not 0 <= budget < 2**31:
            raise RequestError(
                f"thinking_token_budget={safe_repr(budget, 80)} is not allowed",
                fix="give an integer from 0 to 2147483647, or None",
            )
        for name, mark in zip(("start", "end"), self._marks_of(params), strict=True):
            if not isinstance(mark, list | tuple) or not mark or not all(map(self._is_token, mark)):
                raise RequestError(
                    f"thinking_token_budget={budget} with thinking_{name}_token_ids={mark!r}",
                    fix=f"give thinking_{name}_token_ids, or set {name}_token_ids under "
                    f"[logits_processors.thinking_budget]: token ids from 0 to {self._vocab_size - 1}",
                )

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Write the row's budget, and which marks are its."""
        budget = params.get("thinking_token_budget")
        if budget is None:
            return False
        start, end = self._marks_of(params)
        self._budget[row], self._kind[row] = budget, self._index((tuple(start), tuple(end)))
        self._uses[self._kind[row]] += 1
        return True

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Leave only the end mark's next token if the budget is spent, in place, all rows of equal marks at once."""
        history, kinds = batch.tail(), self._kind[batch.rows]
        for kind in np.unique(kinds).tolist():
            start, end = self._marks[kind]
            entries = np.flatnonzero(kinds == kind)
            since = _tokens_since(history[entries], start)  # [m], -1 without a start mark
            closed = _tokens_since(history[entries], end)
            thinking = (since >= 0) & ((closed < 0) | (closed + len(end) > since))
            spent = thinking & (since >= self._budget[batch.rows[entries]])
            entries, tokens = entries[spent], _next_of_mark(history[entries[spent]], since[spent], end)
            if len(entries):
                index, forced = (to_device(array, logits.device) for array in (entries, tokens))
                kept = logits[index, forced]
                logits[index] = -torch.inf
                logits[index, forced] = kept
        return logits

    def release(self, row: int) -> None:
        """Decrease the number of rows that use the row's marks."""
        self._uses[self._kind[row]] -= 1

    def _index(self, marks: _Marks) -> int:
        """Return the index of the marks. New marks replace unused ones."""
        used = [i for i, known in enumerate(self._marks) if known == marks]
        free = [i for i, count in enumerate(self._uses) if count == 0]
        if not used and not free:
            self._marks.append(marks)
            self._uses.append(0)
        index = (used or free or [len(self._marks) - 1])[0]
        self._marks[index] = marks
        return index

    def _marks_of(self, params: Mapping[str, Any]) -> tuple[Any, Any]:
        start, end = self._defaults
        return params.get("thinking_start_token_ids", start), params.get("thinking_end_token_ids", end)

    def _is_token(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < self._vocab_size


def _tokens_since(history: Int, mark: tuple[int, ...]) -> Int:
    """Return the number of tokens [m] after the last `mark` in histories [m, width], or -1 without a mark."""
    width = history.shape[1]
    begins = width - len(mark) + 1
    if begins <= 0:
        return np.full(len(history), -1)
    found = np.ones((len(history), begins), bool)
    for offset, token in enumerate(mark):
        found &= history[:, offset : offset + begins] == token
    behind: Int = np.where(found.any(axis=1), found[:, ::-1].argmax(axis=1), -1)
    return behind


def _next_of_mark(history: Int, since: Int, mark: tuple[int, ...]) -> Int:
    """Return the token [m] of `mark` that continues the end of the history, looking back `since` [m] tokens."""
    width, following = history.shape[1], np.full(len(history), mark[0])
    for length in range(1, min(len(mark), width + 1)):
        begun = (history[:, width - length :] == mark[:length]).all(axis=1) & (since >= length)
        following[begun] = mark[length]
    return following
