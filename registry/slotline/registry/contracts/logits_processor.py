"""The logits-processor contract, version 1.

A processor keeps its state by permanent row: `admit` when a request takes the row, `release` when it leaves. `apply`
gets the rows that the logits belong to, in any order, some of them more than once under speculation.

Two things a processor may declare beside that: that the sampler can do its work (`floors`), and that its requests have
a second prompt computed with them (`companions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, field, frozen

from slotline.registry.capability import Flag, Set
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


@frozen(kw_only=True, field_transformer=declared)
class LogitsProcessorCapabilities:
    """What a logits processor offers.

    Attributes:
        devices: device types.
        parameters: names in `SamplingParams` (or keys of its `extra_args`) that it consumes.
        argmax_invariant: never changes which token is the greedy one, so greedy requests may skip it.
        needs_history: reads the output tokens so far.
        sequential: what it does at a place follows also from the logits that it was shown at the row's places before.
            It is shown each place of a row where a token is sampled, one after another, the last one again where a step
            is repeated, with other logits maybe; `admit` begins anew. Not with `speculation`: nothing promises that the
            logits before a draft are shown in the same call as those behind it, or in an earlier one.
        speculation: right at each draft position.
        floors: it only drops tokens that are too unlikely beside the most likely one, and has `floor`. The engine
            does not call `apply`: the sampler does the same in its own pass over the logits, behind the grammars.
        companions: its requests may have a companion, another prompt with the same output behind it, whose logits it
            reads: it has `companion`, and is shown the rows of requests that have one.
        default: part of every run unless the configuration says otherwise.
        order: processors apply in rising order; ties by name.
        examples: settings of sampling parameters that are accepted and change the logits of some request, one mapping
            for each; what the conformance suite tries the processor with. Token ids in them are below 32, and the
            requests are shorter than 64 tokens. Parameters that go into `extra_args` stand beside the others.
        bad_examples: settings that are refused with `RequestError`, likewise.
    """

    devices: Set[str] = Set(None)
    parameters: tuple[str, ...] = ()
    argmax_invariant: bool = False
    needs_history: bool = False
    sequential: bool = False
    speculation: Flag = Flag(False)
    floors: bool = False
    companions: bool = False
    default: bool = False
    order: int = 100
    examples: tuple[Mapping[str, Any], ...] = field(default=(), eq=False)
    bad_examples: tuple[Mapping[str, Any], ...] = field(default=(), eq=False)


@frozen(kw_only=True)
class LogitsProcessorContext:
    """What a processor's factory gets.

    Attributes:
        eos_token_ids: the model's end-of-sequence tokens.
        tokenizer: transformers' fast tokenizer of the model; None where there is none.
    """

    contract: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_requests: int
    max_model_len: int
    device: str
    options: Any = None
    tokenizer: Any = None


@define(kw_only=True, eq=False)
class LogitsBatch:
    """Which logits these are.

    Attributes:
        rows: [num_logits] int64 on the host, the permanent row of each logits row.
        draft_positions: [num_logits] int64 on the host, draft tokens assumed before this row; 0 without speculation.
        token_table: [max_requests, max_model_len] int32 on the host, tokens by row, drafts excluded; it cannot be
            written to.
        num_tokens: [num_logits] int64 on the host, tokens known for each row, drafts excluded.
        num_prompt_tokens: [num_logits] int64 on the host.
        draft_token_ids: [num_logits, max_draft] int64 on the host, the drafts assumed: the first `draft_positions` of
            each row, then -1; None without speculation.
        companion_logits: [num_logits, vocab_size] float32, what the model says behind each row's companion, not to be
            changed; None for processors without `companions`.
    """

    rows: npt.NDArray[np.int64]
    draft_positions: npt.NDArray[np.int64]
    token_table: npt.NDArray[np.int32]
    num_tokens: npt.NDArray[np.int64]
    num_prompt_tokens: npt.NDArray[np.int64]
    draft_token_ids: npt.NDArray[np.int64] | None = None
    companion_logits: torch.Tensor | None = None

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[num_logits] int64: tokens before each logits row, prompt, output and assumed drafts."""
        return self.num_tokens + self.draft_positions

    def tail(self, width: int | None = None) -> npt.NDArray[np.int64]:
        """The last `width` tokens before each logits row, its assumed drafts included; all of them if None.

        Returns:
            [num_logits, width] int64, aligned to the right, -1 where a history is shorter.
        """
        import numpy

        lengths = self.lengths
        if width is None:
            width = int(lengths.max(initial=0))
        places = lengths[:, None] + numpy.arange(-width, 0)  # [num_logits, width]
        known = (places >= 0) & (places < self.num_tokens[:, None])
        tokens = self.token_table[self.rows[:, None], numpy.where(known, places, 0)].astype(numpy.int64)
        if self.draft_token_ids is not None and self.draft_token_ids.shape[1]:
            drafted = places - self.num_tokens[:, None]
            drafts = numpy.take_along_axis(
                self.draft_token_ids, drafted.clip(0, self.draft_token_ids.shape[1] - 1), axis=1
            )
            tokens = numpy.where(drafted >= 0, drafts, tokens)
            known |= drafted >= 0
        result: npt.NDArray[numpy.int64] = numpy.where(known, tokens, -1)
        return result


@frozen(kw_only=True)
class Companion:
    """A second prompt, computed beside a request's own: both are followed by the same output, token by token.

    Attributes:
        prompt: text for the model's tokenizer, or one or more token ids.
        name: the parameter that the prompt came with, as refusals name it.
        asked: the parameter that asks for a companion, and its value, likewise.
    """

    prompt: str | Sequence[int]
    name: str
    asked: str


class LogitsProcessor(Protocol):
    """What a built logits processor can do; `floor` and `companion` are asked of those alone that declare them."""

    def validate(self, params: Mapping[str, Any]) -> None:
        """Check a request's sampling parameters at admission.

        Raises:
            slotline.registry.errors.RequestError: naming the parameter, its value and what is allowed.
        """
        ...

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """A request took `row`.

        Args:
            params: what `validate` saw; `seed` is the number that the engine draws the request's tokens with, also for
                a request that brought none.

        Returns:
            Whether there is work for it. If not, the row is never shown to the processor: `apply` does not get it, and
            `release` is not called for it.
        """
        ...

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Change `logits` [num_logits, vocab_size] float32, in place or not, and return them.

        If this raises, or returns something of another shape, dtype or device, it is called again for
        each row of logits alone. A request whose logits fail again, or come out with NaN or plus infinity, or as minus
        infinity throughout, ends with finish reason `error`. So a call must not count on being the only one for its
        tokens.
        """
        ...

    def release(self, row: int) -> None:
        """The request left its row, which may be given to another. Called only if `admit` returned True for it."""
        ...

    def floor(self, params: Mapping[str, Any]) -> float:
        """With `floors`: the least log-probability of a kept token less that of the most likely one.

        Both at the request's temperature, which the largest logit and that of the token are divided by. `admit` and
        `apply` are the definition that the conformance suite holds this against.

        Args:
            params: as `admit` gets them.

        Returns:
            A number of 0 or below; minus infinity keeps all tokens.
        """
        ...

    def companion(self, params: Mapping[str, Any], prompt_token_ids: list[int]) -> Companion | None:
        """With `companions`: what is computed beside a request, asked once, after `validate`.

        Returns:
            None for nothing; then `admit` says that there is no work, and else that there is.
        """
        ...
