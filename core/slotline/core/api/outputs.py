"""Outputs of requests, under the field's names. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from attrs import define, field

if TYPE_CHECKING:
    import torch


class Logprob(NamedTuple):
    """A token's log-probability (or logit, by `sampling.logprobs_mode`), its rank from 1, and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""The sampled token and the top tokens at one position, by token id."""


@define(kw_only=True)
class CompletionOutput:
    """One of the outputs of a request.

    Attributes:
        index: number of the output, from 0 to n - 1.
        text: the output's text. Empty with `detokenize=False`.
        token_ids: the output's tokens, a stop token included.
        logprobs: one entry per token, None unless asked for.
        finish_reason: `stop`, `length`, `abort`, `error`, or None while running.
        stop_reason: the stop string or token id that ended it, or the error. None for end-of-sequence.
        cumulative_logprob: sum over the sampled tokens, None unless logprobs were asked for.
        message: the text as the assistant's message, once it is complete. None unless `chat` was given `tool_choice`.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    message: dict[str, Any] | None = None


@define(kw_only=True)
class RequestMetrics:
    """Times in seconds since the request arrived, and counts.

    Attributes:
        time_to_first_token, time_in_all: None until known.
        num_encoder_tokens: tokens of the prompt that an encoder-decoder model's encoder reads.
        num_cached_tokens: prompt tokens taken from the prefix cache at first admission.
        num_loaded_tokens: number of these tokens that a KV connector loaded.
        num_preemptions: number of times the request lost its blocks and was recomputed.
        num_nans: NaN logits seen, or NaNs in a pooling request's answer, if `observability.count_nans` is on.
    """

    time_to_first_token: float | None = None
    time_in_all: float | None = None
    num_encoder_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_preemptions: int = 0
    num_nans: int = 0


@define(kw_only=True)
class RequestOutput:
    """A request and its outputs so far.

    Attributes:
        request_id: as given or made up at admission.
        prompt: the prompt's text, None if it came as token ids.
        prompt_token_ids: the prompt's tokens.
        prompt_logprobs: one entry per prompt token, of which the first is None. None unless asked for.
        outputs: one entry per output.
        finished: True if all outputs are finished.
        metrics: times and counts, of the first output.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    metrics: RequestMetrics = field(factory=RequestMetrics)

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens of the prompt, of its encoder's part too."""
        return len(self.prompt_token_ids) + self.metrics.num_encoder_tokens


@define(kw_only=True, eq=False)
class PoolingOutput:
    """Output of a pooling request.

    Attributes:
        data: [size] float32 on the host, or [num_tokens, size] of a task with a vector for each token.
    """

    data: torch.Tensor


@define(kw_only=True, eq=False)
class EmbeddingOutput(PoolingOutput):
    """An embedding."""

    @property
    def embedding(self) -> list[float]:
        """Return the numbers, as many as `PoolingParams.dimensions` asks for."""
        numbers: list[float] = self.data.tolist()
        return numbers

    @property
    def hidden_size(self) -> int:
        """Return the number of dimensions."""
        return len(self.data)


@define(kw_only=True, eq=False)
class ClassificationOutput(PoolingOutput):
    """Scores of the classes: probabilities, unless `PoolingParams.use_activation` was False."""

    @property
    def probs(self) -> list[float]:
        """Return one number for each class, in the order of config.json's `id2label`."""
        numbers: list[float] = self.data.tolist()
        return numbers

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""
        return len(self.data)


@define(kw_only=True, eq=False)
class ScoringOutput(PoolingOutput):
    """The score of a pair of texts, in `data` [1]."""

    @property
    def score(self) -> float:
        """Return the score."""
        return float(self.data[0])


Pooled_co = TypeVar("Pooled_co", bound=PoolingOutput, covariant=True)


@define(kw_only=True)
class PoolingRequestOutput(Generic[Pooled_co]):
    """A pooling request and its answer.

    Attributes:
        request_id: as given or made up at admission.
        prompt: the prompt's text, None if it came as token ids.
        prompt_token_ids: the prompt's tokens.
        outputs: the answer. None for a request that was aborted or failed.
        finished: True if the request has ended.
        finish_reason: `stop`, `abort`, `error`, or None while running.
        stop_reason: the error, if it failed.
        metrics: times and counts.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: Pooled_co | None
    finished: bool
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    metrics: RequestMetrics = field(factory=RequestMetrics)


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
