"""Requests as the front of replicas knows them."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field

from slotline.core.batch.request import UNSAMPLED, Request, Status
from slotline.ranks.replicas.reports import End, News
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.text.tokenizer import Tokenizer, with_bad_words

CHEAP = 4
"""Tokens of a prompt that count as one of an output in the load of a replica."""
EXPECTED = 1024
"""Tokens that an output counts at most before it is known, in the load of a replica."""


@define(eq=False)
class SettledText:
    """Text of a request that its replica decodes. No later token can change it."""

    settled: str = ""


@define(kw_only=True, eq=False)
class SentRequest(Request):
    """A request that a replica has.

    Attributes:
        key: its number, which is never used again.
        replica: number of the replica that has it.
        weight: what it adds to the load there.
        routed_by: names of the prefixes that its replica was chosen by.
        refusal: why the replica refused it, None if it did not.
        pooled: the public form of its answer.
        aborted: whether its end has been asked for.
    """

    key: int
    replica: int = -1
    weight: int
    routed_by: Sequence[bytes] = ()
    aborted: bool = False
    refusal: BaseException | None = None
    pooled: Any = None

    def begin(self, *, stream: bool) -> None:
        """Have room for what the replica tells. `stream` is whether it may decode the text while the request runs."""
        if self.params.logprobs is not None:
            self.logprobs = []
        if self.params.stop or (stream and self.params.detokenize):
            self.detokenizer = SettledText()  # type: ignore[assignment]

    def routed_tokens(self) -> npt.NDArray[np.int64]:
        """Return numbers [n] int64 by which prompts are compared: the tokens, or hashes of a prompt's embeddings."""
        if self.prompt_known:
            return self.token_array
        rows = self.inputs["prompt_embeds"].view(torch.uint8).numpy()
        return np.array([hash(row.tobytes()) for row in rows])

    def take(self, token: int) -> None:
        """Add a token."""
        if not self.output_token_ids:
            self.metrics.time_to_first_token = monotonic() - self.arrival_time
        self.output_token_ids.append(token)

    def hear(self, news: News) -> None:
        """Add what a step gave besides tokens."""
        if news.text is not None and self.detokenizer is not None:
            self.detokenizer.settled = news.text  # type: ignore[misc]
        if news.logprobs is not None:
            self.logprobs = (self.logprobs or []) + news.logprobs
        if news.prompt_logprobs is not None:
            self.prompt_logprobs = news.prompt_logprobs

    def end(self, end: End) -> None:
        """Take everything that was known of it at its end."""
        self.output_token_ids = end.token_ids.tolist()
        self.text, self.finish_reason, self.stop_reason = end.text, end.reason, end.cause
        self.metrics, self.prompt_logprobs, self.pooled = end.metrics, end.prompt_logprobs, end.pooled
        if end.logprobs is not None:
            self.logprobs = (self.logprobs or []) + end.logprobs
        self.status = Status.FINISHED

    def give_up(self, reason: str, refusal: BaseException | None = None) -> None:
        """End it with what is known of it here."""
        self.finish_reason, self.refusal, self.status = reason, refusal, Status.FINISHED
        self.text = getattr(self.detokenizer, "settled", "")


def sent_request(
    key: int,
    request_id: str,
    tokens: npt.NDArray[np.int64],
    params: Any,
    *,
    samples: bool,
    tokenizer: Tokenizer | None,
    **fields: Any,
) -> SentRequest:
    """Return a request of a prompt.

    Args:
        params: `SamplingParams`, or parameters of another task.
        samples: whether the engine generates.
        tokenizer: for bad words that are text.
        fields: further attributes of `Request`.
    """
    sampling, other = (params, None) if isinstance(params, SamplingParams) else (UNSAMPLED, params)
    return SentRequest(
        key=key,
        weight=len(tokens) // CHEAP + min(sampling.max_tokens or EXPECTED, EXPECTED),
        request_id=request_id,
        prompt_token_ids=tokens.tolist(),
        token_array=tokens,
        params=sampling if not sampling.bad_words else with_bad_words(sampling, tokenizer),
        task_params=other,
        samples=other is None or samples,
        prompt_known=fields["inputs"].get("prompt_embeds") is None,
        **fields,
    )


class SentRequests(dict[int, SentRequest]):
    """Requests by key. There is none for the key 0, and for those that have ended."""

    def __missing__(self, key: int) -> None:
        """Return None."""


@define(eq=False)
class FrontRows:
    """What stands for an engine's rows in the front: requests by the numbers in the results of steps."""

    requests: SentRequests = field(factory=SentRequests)


NOBODY = np.zeros(0, np.int64)
"""Keys of no tokens."""
