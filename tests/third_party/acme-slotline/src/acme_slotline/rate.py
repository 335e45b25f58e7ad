"""A step extension: each request gets at most so many new tokens for each second of wall time."""

from __future__ import annotations

from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from slotline.registry.contracts import ExtensionContext
from slotline.registry.errors import RequestError

Int = npt.NDArray[np.int64]


class TokenRate:
    """Token budget of each request: `extra_args["acme_tokens_per_second"]`, or the table's `tokens_per_second`."""

    def __init__(self, context: ExtensionContext) -> None:
        self._rows = context.rows
        self._default = context.options.tokens_per_second or np.inf
        self._rate = np.full(context.max_requests, np.inf)  # tokens for each second, by row
        self._start = np.zeros(context.max_requests)  # seconds, when the request joined

    def validate(self, request: Any) -> None:
        """Refuse a rate that is no positive number."""
        rate = (request.params.extra_args or {}).get("acme_tokens_per_second", 1.0)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < np.inf:
            raise RequestError(f"acme_tokens_per_second={rate!r} is not allowed", fix="give a number of tokens above 0")

    def admit(self, request: Any) -> None:
        """Start a request's clock."""
        rate = (request.params.extra_args or {}).get("acme_tokens_per_second", self._default)
        self._rate[request.row], self._start[request.row] = rate, monotonic()

    def release(self, row: int) -> None:
        """Forget a row's rate."""
        self._rate[row] = np.inf

    def limit_tokens(self, rows: Int, counts: Int) -> Int:
        """Leave out the requests that have had their tokens. Prompts are not limited."""
        sampled = self._rows.num_tokens[rows] - self._rows.num_prompt_tokens[rows]
        due = 1 + self._rate[rows] * (monotonic() - self._start[rows])
        return np.where(sampled < due, counts, 0)
