"""A request as the engine knows it. Its numbers are in `RequestTable`. This object holds the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from time import monotonic
from typing import TYPE_CHECKING, Any

from attrs import Factory, define, field

from slotline.core.api.outputs import RequestMetrics, TokenLogprobs
from slotline.core.api.prompts import as_token_array
from slotline.registry.contracts import BlockHash, PoolingParams
from slotline.registry.contracts.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from slotline.core.api.detokenizer import Detokenizer


class Status(Enum):
    """State of a request in its life cycle."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@define(kw_only=True, eq=False)
class Request:
    """One sequence to generate, or one prompt to pool.

    Attributes:
        request_id: unique among the unfinished.
        prompt_token_ids: at least one token. `token_array` [n] int64 holds the same.
        params: sampling parameters.
        pooling_params: for a pooling request, which samples nothing: its parameters, as the model adjusted them.
        pools_whole_prompt: whether its answer needs the hidden states of every position.
        prompt: text of the prompt, if it came as text.
        priority: lower runs first under the priority policy.
        cache_salt: requests share cached prefixes only with equal salts.
        cache_key: beside the salt, text that separates its cached prefixes from those of requests with another key.
        index: which of the n outputs of its prompt.
        arrival: order of arrival at the engine.
        leader: the request that this one belongs to, None for one that was added. Users are told only of those.
        role: name of its prompt in messages.
        row: permanent row from admission until the request leaves, else -1.
        joined: whether plugins are prepared for it. It joins once, even if it is preempted several times.
        fixed_len: keys that it has from its first step on in cache groups that hold other keys than its tokens'.
        hash_extra: returns bytes that go into the hash of the block of tokens [start, end), beside these tokens. None
            for none.
        inputs: further arguments of `Engine.add` by name, and what extensions keep with the request.
        block_hashes: chained hashes of its full blocks so far.
        pooled: [size] float32, the answer of a finished pooling request.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_array: npt.NDArray[np.int64] = field(
        default=Factory(lambda self: as_token_array(self.prompt_token_ids), takes_self=True), repr=False
    )
    params: SamplingParams
    pooling_params: PoolingParams | None = None
    pools_whole_prompt: bool = False
    prompt: str | None = None
    priority: int = 0
    cache_salt: str = ""
    cache_key: str = ""
    index: int = 0
    arrival: int = 0
    arrival_time: float = field(factory=monotonic)
    leader: Request | None = None
    role: str = "prompt"
    row: int = -1
    joined: bool = False
    status: Status = Status.WAITING
    fixed_len: int = 0
    hash_extra: Callable[[int, int], bytes] | None = None
    inputs: dict[str, Any] = field(factory=dict, repr=False)
    block_hashes: list[BlockHash] = field(factory=list)
    pooled: npt.NDArray[np.float32] | None = None
    output_token_ids: list[int] = field(factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    detokenizer: Detokenizer | None = None
    metrics: RequestMetrics = field(factory=RequestMetrics)

    @property
    def order(self) -> tuple[int, int]:
        """Scheduling order: lower goes first."""
        return (self.priority, self.arrival)

    @property
    def whole_prompt(self) -> bool:
        """True if every position of the prompt must be computed, so that no cached prefix is taken."""
        return self.params.prompt_logprobs is not None or self.pools_whole_prompt

    @property
    def finished(self) -> bool:
        """True if no more tokens will come."""
        return self.status is Status.FINISHED


def leaders(requests: Sequence[Request]) -> list[Request]:
    """Return the requests that users know of, each once."""
    return list(dict.fromkeys(request.leader or request for request in requests))
