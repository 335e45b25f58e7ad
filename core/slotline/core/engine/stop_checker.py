"""When a request stops: at the end-of-sequence token, stop tokens, stop strings, and lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slotline.core.batch.extensions import Ended
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable

Int = npt.NDArray[np.int64]


class StopChecker:
    """Stop rules of all rows, checked as array comparisons. Only streams and stop strings are checked one by one."""

    def __init__(self, rows: RequestTable, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._rows = rows
        self._is_eos = np.zeros(vocab_size, bool)
        self._is_eos[[token for token in eos_token_ids if token < vocab_size]] = True

    def ended(self, which: Int, tokens: npt.NDArray[np.int32]) -> Ended:
        """Return the rows of `which` [n] that end with the token just appended to each, `tokens` [n]."""
        rows = self._rows
        known = rows.num_tokens[which]
        may_stop = known >= rows.min_length[which]
        at_eos = self._is_eos[tokens] & ~rows.ignore_eos[which] & may_stop
        too_long = known >= rows.length_limit[which]
        ended: Ended = dict.fromkeys(which[too_long].tolist(), ("length", None))
        if rows.stop_token_ids.shape[1]:
            at_stop = (rows.stop_token_ids[which] == tokens[:, None]).any(axis=1) & may_stop
            stopped = zip(which[at_stop].tolist(), tokens[at_stop].tolist(), strict=True)
            ended |= {row: ("stop", token) for row, token in stopped}
        ended |= dict.fromkeys(which[at_eos].tolist(), ("stop", None))
        for i in np.flatnonzero(rows.streams[which]).tolist():
            self._detokenize(int(which[i]), int(tokens[i]), bool(may_stop[i]), ended)
        return ended

    def ends_outside_text(self, request: Request) -> bool:
        """Return whether the last token is a stop token that is not part of the text.

        A last token by which an extension ended the request is part of it.
        """
        if request.finish_reason != "stop" or request.params.include_stop_str_in_output:
            return False
        last = request.output_token_ids[-1]
        return bool(self._is_eos[last]) or last in request.params.stop_token_ids

    def _detokenize(self, row: int, token: int, may_stop: bool, ended: Ended) -> None:
        request = self._rows.request(row)
        if ended.get(row, ("", None))[0] == "stop" and not request.params.include_stop_str_in_output:
            return  # the stop token is no part of the text
        stop = request.detokenizer.append(token, may_stop=may_stop)  # type: ignore[union-attr]
        if stop is not None:
            ended[row] = ("stop", stop)
