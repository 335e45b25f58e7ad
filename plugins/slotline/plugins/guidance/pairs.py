"""Pairs of requests: a leader, and the companion that a logits processor asks for, which computes another prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from attrs import evolve

from slotline.core.batch.request import Request
from slotline.registry.contracts import Companion
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.text.tokenizer import Tokenizer

Int = npt.NDArray[np.int64]


def refuse_companion(request: Request, asked: str, max_requests: int, *, drafts: bool, chunked_prefill: bool) -> None:
    """Refuse a companion that cannot be computed. `asked` is the request's parameter that wants it.

    Raises:
        RequestError: with the reason.
    """
    if drafts:
        raise RequestError(
            f"{asked} beside a drafter, which proposes for each prompt alone", fix='set drafter.name = "none"'
        )
    if request.inputs.get("features"):
        raise RequestError(f"{asked} with multi_modal_data", fix="give a prompt of text alone")
    if not chunked_prefill:
        raise RequestError(
            f"{asked} needs prompts that may be divided over steps", fix="set scheduler.chunked_prefill = true"
        )
    if max_requests < 2:
        raise RequestError(f"{asked} takes two rows of scheduler.max_requests = {max_requests}", fix="raise it to 2")


def pair(request: Request, companion: Companion, tokenizer: Tokenizer | None, max_model_len: int) -> Request:
    """Return the companion of a request, and limit the request to the length that both can have.

    Raises:
        RequestError: if the other prompt is text and the model has no tokenizer, or leaves no room for `min_tokens`.
    """
    params, name = request.params, companion.name
    if not isinstance(companion.prompt, str):
        prompt = list(companion.prompt)
    elif tokenizer is not None:
        prompt = tokenizer.encode(companion.prompt)
    else:
        raise RequestError(f"{name} as text, and this model has no tokenizer", fix="give its token ids")
    room = max(1, max_model_len - max(len(prompt), len(request.prompt_token_ids)))
    if params.min_tokens > room:
        raise RequestError(
            f"min_tokens={params.min_tokens} does not fit: {name} has {len(prompt)} tokens and leaves "
            f"{room} of max_model_len={max_model_len}",
            fix=f"lower min_tokens, shorten {name} or raise scheduler.max_model_len",
        )
    most = room if params.max_tokens is None else min(params.max_tokens, room)
    request.params = evolve(params, max_tokens=most)
    return Request(
        request_id=f"{request.request_id} ({name})",
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False),
        priority=request.priority,
        cache_salt=request.cache_salt,
        inputs={"lora_request": request.inputs.get("lora_request")},
        arrival=request.arrival + 1,
        leader=request,
        role=name,
    )


class LivePairs:
    """Unfinished pairs, each a leader and its companion."""

    NONE, ABSENT = -1, -2

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._other: dict[str, Request] = {}  # by id of each of the two
        self._pairs: list[tuple[Request, Request]] = []

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[tuple[Request, Request]]:
        return iter(self._pairs)

    def add(self, leader: Request, companion: Request) -> None:
        """Add a pair."""
        self._pairs.append((leader, companion))
        self._other[leader.request_id], self._other[companion.request_id] = companion, leader

    def remove(self, request: Request) -> None:
        """Remove the pair of a request, if it is in one."""
        other = self._other.pop(request.request_id, None)
        if other is not None:
            self._other.pop(other.request_id, None)
            self._pairs = [both for both in self._pairs if request not in both]

    def retain(self, requests: Sequence[Request]) -> None:
        """Remove the pairs of all other requests."""
        there = {request.request_id for request in requests}
        for leader, companion in list(self._pairs):
            if leader.request_id not in there or companion.request_id not in there:
                self.remove(leader)

    def other(self, request: Request) -> Request | None:
        """Return the other one of a request's pair, None if it is in none."""
        return self._other.get(request.request_id)

    def partners(self) -> Int:
        """Return each row's partner [max_requests], `ABSENT` if that has no row, `NONE` if the row is in no pair."""
        found = np.full(self._max_requests, self.NONE)
        for one, other in self._pairs:
            for row, partner in ((one.row, other.row), (other.row, one.row)):
                if row >= 0:
                    found[row] = partner if partner >= 0 else self.ABSENT
        return found

    def places(self, rows: Int) -> Int:
        """Return for each of a step's `rows` [n] the place of its companion among them, -1 without one."""
        place, companions = np.full(self._max_requests, -1), np.full(self._max_requests, -1)
        place[rows] = np.arange(len(rows))
        for leader, companion in self._pairs:
            if leader.row >= 0 and companion.row >= 0:
                companions[leader.row] = place[companion.row]
        return companions[rows]
