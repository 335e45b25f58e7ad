"""Permanent rows: the numbers of all admitted requests, as arrays.

A request takes a row when it is admitted and keeps it until it leaves, also while it is preempted. Rows are never
moved. Each step gathers its data from them. That makes the host work of a step a handful of array operations for any
number of requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slotline.core.batch.request import Request
from slotline.registry.errors import IntegrityError

Int = npt.NDArray[np.int64]
NO_LIMIT = np.iinfo(np.int64).max


class RequestTable:
    """Struct of arrays, indexed by row.

    Attributes:
        token_ids: [max_requests, max_model_len] int32, prompt and output tokens. `shown_token_ids` is a read-only view
            of the same memory for plugins.
        num_tokens: known tokens, prompt and sampled, and the most that a step in flight may give: one, and one for each
            token that it verifies.
        num_pending: the number of tokens of the step in flight. The places of the last one and of the tokens to verify
            after it hold placeholder ids until the step is handed out.
        num_rejected: the tokens that the row's last step rejected, of those that were handed out.
        generation: counts the times that the row's computed tokens were given up, by preemption or for good. It
            separates the results of a step in flight from those of a later request in the same row.
        num_spec_tokens: tokens that follow the known ones in `token_ids` until a step has verified them.
        num_prompt_tokens: tokens of the prompt.
        num_computed_tokens: tokens whose keys and values are in the cache.
        fixed_len: keys of the request that do not come from its tokens, see `Request.fixed_len`.
        length_limit: number of tokens at which the request stops for length.
        min_length: number of tokens below which no stop token counts.
        temperature, top_p, log_floor: float32, as in `SamplingMetadata`. `top_k`: int64, 0 for all.
        seed: uint64, one per request.
        num_logprobs, num_prompt_logprobs: -1 for none.
        hidden: bool, the row's request belongs to another, which users know.
        any_hidden: whether any row's request is hidden.
        stop_token_ids: [max_requests, width] int32, filled up with -1, as wide as the longest list so far.
        ignore_eos, streams: flags. `streams` rows are detokenised in every step.
        requests: the request of each row, or None.
    """

    def __init__(self, max_requests: int, max_model_len: int) -> None:
        self.max_requests = max_requests
        self.max_model_len = max_model_len
        self.token_ids = np.zeros((max_requests, max_model_len), np.int32)
        self.shown_token_ids = np.asarray(self.token_ids.data.toreadonly())
        self.num_tokens = np.zeros(max_requests, np.int64)
        self.num_pending = np.zeros(max_requests, np.int64)
        self.num_rejected = np.zeros(max_requests, np.int64)
        self.generation = np.zeros(max_requests, np.int64)
        self.num_spec_tokens = np.zeros(max_requests, np.int64)
        self.num_prompt_tokens = np.zeros(max_requests, np.int64)
        self.num_computed_tokens = np.zeros(max_requests, np.int64)
        self.fixed_len = np.zeros(max_requests, np.int64)
        self.length_limit = np.zeros(max_requests, np.int64)
        self.min_length = np.zeros(max_requests, np.int64)
        self.temperature = np.zeros(max_requests, np.float32)
        self.top_k = np.zeros(max_requests, np.int64)
        self.top_p = np.ones(max_requests, np.float32)
        self.log_floor = np.full(max_requests, -np.inf, np.float32)
        self.seed = np.zeros(max_requests, np.uint64)
        self.num_logprobs = np.full(max_requests, -1, np.int64)
        self.num_prompt_logprobs = np.full(max_requests, -1, np.int64)
        self.hidden = np.zeros(max_requests, bool)
        self.any_hidden = False
        self.ignore_eos = np.zeros(max_requests, bool)
        self.stop_token_ids = np.full((max_requests, 0), -1, np.int32)
        self.streams = np.zeros(max_requests, bool)
        self.requests: list[Request | None] = [None] * max_requests
        self._free = list(range(max_requests))  # a heap: the lowest free row is taken first

    @property
    def num_free(self) -> int:
        """Rows that no request holds."""
        return len(self._free)

    def admit(self, request: Request, default_seed: int) -> int:
        """Give the request the lowest free row and write its numbers there."""
        row = heapq.heappop(self._free)
        request.row = row
        self.requests[row] = request
        self._write_lengths(row, request)
        self._write_sampling(row, request, default_seed)
        self.hidden[row] = request.leader is not None
        self.any_hidden |= request.leader is not None
        return row

    def release(self, request: Request) -> None:
        """Take the row back. Its numbers are stale from now on.

        Raises:
            IntegrityError: if the request does not hold the row.
        """
        row = request.row
        if row < 0 or self.requests[row] is not request:
            raise IntegrityError(f"request {request.request_id!r} releases row {row}, which it does not hold")
        self.requests[row] = None
        if self.any_hidden:
            self.hidden[row] = False
            self.any_hidden = bool(self.hidden.any())
        self.invalidate(row)
        self.num_tokens[row] = 0
        request.row = -1
        heapq.heappush(self._free, row)

    def write_spec_tokens(self, rows: Int, token_ids: Int, taken: npt.NDArray[np.bool_]) -> None:
        """Write the `taken` [n, k] ones of `token_ids` [n, k] after the known tokens of `rows`."""
        which, places = taken.nonzero()
        self.token_ids[rows[which], self.num_tokens[rows[which]] + places] = token_ids[taken]

    def invalidate(self, row: int) -> None:
        """Forget the computed tokens of the row, those to verify, and the token that a step in flight would give."""
        self.num_tokens[row] -= self.num_pending[row]
        self.num_pending[row] = self.num_computed_tokens[row] = self.num_spec_tokens[row] = 0
        self.generation[row] += 1

    def reserve_pending(self, rows: Int, stand_ins: Int, verified: Int | int = 0) -> None:
        """Count the most tokens that a step in flight can give each of `rows`, which are distinct.

        Args:
            stand_ins: [n] placeholder ids of the newest tokens. Token j to verify after one has j + 1 more.
            verified: [n] tokens that the step verifies.
        """
        self.num_pending[rows] = 1 + verified
        self.num_tokens[rows] += 1 + verified
        ends, counts = self.num_tokens[rows], self.num_spec_tokens[rows]
        self.token_ids[rows, ends - 1] = stand_ins
        for index in range(int(counts.max(initial=0))):
            taken = counts > index
            self.token_ids[rows[taken], ends[taken] + index] = stand_ins[taken] + 1 + index

    def vacate(self, row: int) -> None:
        """Take a row from its request before `restore`, which puts it among the free ones."""
        request, self.requests[row] = self.requests[row], None
        if request is not None:
            request.row = -1

    def restore(self, num_known: Int) -> None:
        """Reset all rows to the tokens that their requests know: `num_known` [max_requests], none computed."""
        for row, request in enumerate(self.requests):
            if request is not None and request.row != row:
                self.requests[row] = None
        held = np.array([request is not None for request in self.requests])
        self.num_tokens[:] = np.where(held, num_known, 0)
        for numbers in (self.num_pending, self.num_computed_tokens, self.num_spec_tokens):
            numbers[:] = 0
        self.generation += 1
        self._free = np.flatnonzero(~held).tolist()
        self.hidden[:] = [request is not None and request.leader is not None for request in self.requests]
        self.any_hidden = bool(self.hidden.any())

    def num_known(self, rows: Int) -> Int:
        """Return the number of tokens [n] of `rows` whose ids are on the host."""
        known: Int = self.num_tokens[rows] - self.num_pending[rows]
        return known

    def score_prompts(self, rows: Int) -> bool:
        """Return whether one of `rows` wants log-probabilities of its prompt, so that all of its tokens are scored."""
        return bool((self.num_prompt_logprobs[rows] >= 0).any())

    def append(self, rows: Int, token_ids: npt.NDArray[np.int32]) -> None:
        """Add one sampled token to each of `rows`, which are distinct, in place of all expected ones."""
        known = self.num_tokens[rows] - self.num_pending[rows]
        self.token_ids[rows, known] = token_ids
        self.num_tokens[rows] = known + 1
        self.num_pending[rows] = 0

    def output_token_ids(self, row: int) -> list[int]:
        """Return the tokens sampled so far."""
        end = self.num_tokens[row] - self.num_pending[row]
        tokens: list[int] = self.token_ids[row, self.num_prompt_tokens[row] : end].tolist()
        return tokens

    def request(self, row: int) -> Request:
        """Return the request that holds `row`."""
        request = self.requests[row]
        if request is None:
            raise IntegrityError(f"row {row} is free but was scheduled")
        return request

    def _write_lengths(self, row: int, request: Request) -> None:
        num_prompt, params = len(request.prompt_token_ids), request.params
        self.token_ids[row, :num_prompt] = request.token_array
        self.num_tokens[row] = self.num_prompt_tokens[row] = num_prompt
        self.num_computed_tokens[row] = self.num_spec_tokens[row] = 0
        self.fixed_len[row] = request.fixed_len
        limit = self.max_model_len if params.max_tokens is None else num_prompt + params.max_tokens
        # A request that samples nothing has no token to come, so its prompt may be as long as the model allows.
        self.length_limit[row] = min(limit, self.max_model_len) if request.samples else NO_LIMIT
        self.min_length[row] = num_prompt + params.min_tokens

    def _write_sampling(self, row: int, request: Request, default_seed: int) -> None:
        params = request.params
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.log_floor[row] = -np.inf  # until a logits processor says more
        self.seed[row] = (default_seed if params.seed is None else params.seed) & (2**64 - 1)
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.ignore_eos[row] = params.ignore_eos
        self._write_stops(row, params.stop_token_ids)
        self.streams[row] = request.detokenizer is not None

    def _write_stops(self, row: int, token_ids: Sequence[int]) -> None:
        missing = len(token_ids) - self.stop_token_ids.shape[1]
        if missing > 0:
            self.stop_token_ids = np.pad(self.stop_token_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_token_ids[row] = -1
        self.stop_token_ids[row, : len(token_ids)] = token_ids
