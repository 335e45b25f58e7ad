"""Rules for transcripts: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022), 4.5.

They are those of WhisperTimeStampLogitsProcessor and of the suppressed tokens in transformers, for rows of any place in
their texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.kernels.async_copy import to_device
from slotline.plugins.logits_processors.bans import ban
from slotline.plugins.logits_processors.row_values import RowValues
from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

_LISTS = ("suppress", "begin_suppress")
_NUMBERS = ("first_timestamp", "end", "most_initial")
_NONE = -1


class SpeechRules:
    """Bans of tokens, everywhere or first in an output, and of timestamps in the wrong place.

    The parameter is a mapping with any of: `suppress`, tokens never taken; `begin_suppress`, tokens that do not come
    first; `first_timestamp`, the token of 0.00 s, behind which only later timestamps are, and before which stands the
    token that forbids timestamps; with it `end`, the token of the end of text, and `most_initial`, the number of the
    latest timestamp with which an output may begin.
    """

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        self._lists = {name: RowValues(context.max_requests) for name in _LISTS}
        self._numbers = {name: np.full(context.max_requests, _NONE, np.int64) for name in _NUMBERS}
        self._ids = torch.arange(context.vocab_size, device=context.device)

    def validate(self, params: Mapping[str, Any]) -> None:
        """Check names, tokens and numbers."""
        rules = params.get("speech_rules")
        if rules is None:
            return
        known = isinstance(rules, Mapping) and rules.keys() <= {*_LISTS, *_NUMBERS}
        right = known and all(
            isinstance(rules.get(name) or [], list | tuple) and all(map(self._is_token, rules.get(name) or ()))
            for name in _LISTS
        )
        right = right and all(rules.get(name) is None or self._is_token(rules[name]) for name in _NUMBERS)
        stamps = right and rules.get("first_timestamp") is not None
        if not right or (stamps and (not rules["first_timestamp"] or rules.get("end") is None)):
            raise RequestError(
                f"speech_rules={safe_repr(rules, 80)} is not allowed",
                fix=f"give lists of tokens as {' and '.join(_LISTS)}, and first_timestamp above 0 with end, all below "
                f"{self._vocab_size:,}",
            )

    def _is_token(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < self._vocab_size

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Write the row's rules."""
        rules = params.get("speech_rules") or {}
        for name, lists in self._lists.items():
            lists.set(row, sorted(set(rules.get(name) or ())))
        for name, numbers in self._numbers.items():
            numbers[row] = _NONE if rules.get(name) is None else rules[name]
        return bool(rules)

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Ban what may not follow. Of text and timestamps, ban the text where timestamps together are likelier."""
        outputs = batch.lengths - batch.num_prompt_tokens
        ban(logits, *self._lists["suppress"].take(batch.rows))
        first = np.flatnonzero(outputs == 0)
        entries, tokens = self._lists["begin_suppress"].take(batch.rows[first])
        ban(logits, first[entries], tokens)
        stamped = np.flatnonzero(self._numbers["first_timestamp"][batch.rows] != _NONE)
        if len(stamped):
            width = max(2, int(outputs.max()))
            history = np.where(np.arange(-width, 0) >= -outputs[:, None], batch.tail(width), _NONE)
            where = to_device(stamped, logits.device)
            logits[where] = self._timed(logits[where], batch.rows[stamped], history[stamped], outputs[stamped])
        return logits

    def release(self, row: int) -> None:
        """Forget the row's tokens."""
        for lists in self._lists.values():
            lists.drop(row)

    def _timed(
        self,
        logits: torch.Tensor,
        rows: npt.NDArray[np.int64],
        history: npt.NDArray[np.int64],
        outputs: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Return logits [n, vocab_size] of rows with timestamps, whose outputs are `history` [n, width], to the right.

        Timestamps come in pairs, except before the end, and never go back.
        """
        zero, end, most = (self._numbers[name][rows] for name in _NUMBERS)
        stamps = history >= zero[:, None]
        last, before = stamps[:, -1], stamps[:, -2] | (outputs < 2)
        place = history.shape[1] - 1 - stamps[:, ::-1].argmax(axis=1)
        newest = history[np.arange(len(history)), place]
        least = np.where(stamps.any(axis=1), newest + ~(last & ~before), zero)  # the end of one may begin the next
        least = np.where(last & before, self._vocab_size, least)  # a text has to follow
        least_text = np.where(last & ~before, end, 0)  # a second timestamp, or the end
        least_text = np.where(outputs == 0, zero, least_text)
        above = np.where((outputs == 0) & (most != _NONE), zero + most, self._vocab_size)
        zero_, least_, text_, above_ = (
            to_device(values, logits.device)[:, None] for values in (zero, least, least_text, above)
        )
        is_stamp = self._ids >= zero_  # [n, vocab_size]
        banned = torch.where(is_stamp, (self._ids < least_) | (self._ids > above_), self._ids < text_)
        logits = logits.masked_fill(banned | (self._ids == zero_ - 1), -torch.inf)
        chances = logits.log_softmax(dim=-1)
        of_stamps = chances.masked_fill(~is_stamp, -torch.inf).logsumexp(dim=-1, keepdim=True)
        of_text = chances.masked_fill(is_stamp, -torch.inf).amax(dim=-1, keepdim=True)
        return logits.masked_fill((of_stamps > of_text) & ~is_stamp, -torch.inf)
