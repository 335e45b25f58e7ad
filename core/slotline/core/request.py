"""A request as the engine knows it. Its numbers live in `Rows`; this object holds the rest."""

from __future__ import annotations

from enum import Enum
from time import monotonic
from typing import TYPE_CHECKING

from attrs import define, field

from slotline.core.outputs import RequestMetrics, TokenLogprobs
from slotline.core.sampling_params import SamplingParams
from slotline.registry.contracts import BlockHash

if TYPE_CHECKING:
    from slotline.core.detokenizer import Detokenizer


class Status(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@define(kw_only=True, eq=False)
class Request:
    """One sequence to generate.

    Attributes:
        request_id: unique among the unfinished.
        prompt_token_ids: at least one token.
        params: sampling parameters.
        prompt: text of the prompt, if it came as text.
        priority: lower runs first under the priority policy.
        cache_salt: requests share cached prefixes only with equal salts.
        index: which of the n outputs of its prompt.
        arrival: order of arrival at the engine.
        row: permanent row from admission until the request leaves, else -1.
        block_hashes: chained hashes of its full blocks so far.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    priority: int = 0
    cache_salt: str = ""
    index: int = 0
    arrival: int = 0
    arrival_time: float = field(factory=monotonic)
    row: int = -1
    status: Status = Status.WAITING
    block_hashes: list[BlockHash] = field(factory=list)
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
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.status is Status.FINISHED
