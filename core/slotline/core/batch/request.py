"""A request as the engine knows it. Its numbers are in `RequestTable`. This object holds the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from time import monotonic
from typing import TYPE_CHECKING, Any

from attrs import Factory, define, field

from slotline.core.api.outputs import RequestMetrics, TokenLogprobs
from slotline.core.api.prompts import as_token_array
from slotline.registry.contracts import BlockHash
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.contracts.scheduler_policy import PolicyRequest, Rank

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from slotline.text.detokenizer import Detokenizer


UNSAMPLED = SamplingParams(max_tokens=1, detokenize=False)
"""Sampling parameters of a request that samples nothing."""


class Status(Enum):
    """State of a request in its life cycle."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@define(kw_only=True, eq=False)
class Request:
    """One sequence to generate, or one prompt to answer otherwise.

    Attributes:
        request_id: unique among the unfinished.
        prompt_token_ids: at least one token. `token_array` [n] int64 holds the same.
        prompt_known: False if the prompt's tokens only hold the places of what an extension computes in their stead.
        params: sampling parameters.
        task_params: parameters of another task than generation, as its extension adjusted them. None to generate.
        samples: whether it gets tokens. Otherwise it ends with an `answer`.
        whole_prompt: whether every position of the prompt must be computed, so that no cached prefix is taken.
        prompt: text of the prompt, if it came as text.
        priority: lower runs first under a policy that knows priorities.
        cache_salt: requests share cached prefixes only with equal salts.
        cache_key: beside the salt, text that separates its cached prefixes from those of requests with another key.
        index: which of the n outputs of its prompt.
        arrival: order of arrival at the engine.
        view, order: what the policy was shown of it when it began to wait, and its standing: lower goes first.
        leader: the request that this one belongs to, None for one that was added. Users are told only of those.
        role: name of its prompt in messages.
        row: permanent row from admission until the request leaves, else -1.
        joined: whether plugins are prepared for it. It joins once, even if it is preempted several times.
        fixed_len: keys that it has from its first step on in cache groups that hold other keys than its tokens'.
        hash_extra: returns bytes that go into the hash of the block of tokens [start, end), beside these tokens. None
            for none.
        inputs: further arguments of `Engine.add` by name, and what extensions keep with the request.
        block_hashes: chained hashes of its full blocks so far.
        answer: [size] or [num_tokens, size] float32, of a finished request that samples nothing.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_array: npt.NDArray[np.int64] = field(
        default=Factory(lambda self: as_token_array(self.prompt_token_ids), takes_self=True), repr=False
    )
    params: SamplingParams
    task_params: Any = None
    samples: bool = True
    whole_prompt: bool = field(
        default=Factory(lambda self: self.params.prompt_logprobs is not None, takes_self=True), repr=False
    )
    prompt_known: bool = True
    prompt: str | None = None
    priority: int = 0
    cache_salt: str = ""
    cache_key: str = ""
    index: int = 0
    arrival: int = 0
    arrival_time: float = field(factory=monotonic)
    view: PolicyRequest | None = field(default=None, repr=False)
    order: tuple[Rank, int] = ((), 0)
    leader: Request | None = None
    role: str = "prompt"
    row: int = -1
    joined: bool = False
    status: Status = Status.WAITING
    fixed_len: int = 0
    hash_extra: Callable[[int, int], bytes] | None = None
    inputs: dict[str, Any] = field(factory=dict, repr=False)
    block_hashes: list[BlockHash] = field(factory=list)
    answer: npt.NDArray[np.float32] | None = None
    output_token_ids: list[int] = field(factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    detokenizer: Detokenizer | None = None
    metrics: RequestMetrics = field(factory=RequestMetrics)

    @property
    def known_prompt(self) -> list[int]:
        """Return the prompt's tokens as others may read them: none if they only hold places."""
        return self.prompt_token_ids if self.prompt_known else []

    @property
    def finished(self) -> bool:
        """True if no more tokens will come."""
        return self.status is Status.FINISHED


def leaders(requests: Sequence[Request]) -> list[Request]:
    """Return the requests that users know of, each once."""
    return list(dict.fromkeys(request.leader or request for request in requests))
