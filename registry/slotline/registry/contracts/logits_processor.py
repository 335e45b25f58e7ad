"""The logits-processor contract, version 1.

A processor keeps its state by permanent row: `admit` when a request takes the row, `release` when it leaves. `apply`
gets the rows that the logits belong to, in any order. Under speculation a row may occur more than once.

A processor may also declare that the sampler can do its work (`floors`), and that its requests have a second prompt
computed with them (`companions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """Capabilities that a logits processor declares.

    Attributes:
        devices: device types.
        parameters: names in `SamplingParams` (or keys of its `extra_args`) that it consumes.
        output_parameters: those of `parameters` whose effect does not depend on the prompt's tokens, of a processor
            that `needs_history`. Its other parameters are refused for prompts of embeddings, whose tokens nobody knows.
        argmax_invariant: never changes the most likely token, so greedy requests may skip it.
        needs_history: reads the output tokens so far.
        sequential: its effect at a position also depends on the logits that it saw at earlier positions of the row. It
            sees every position of a row at which a token is sampled, in order. If a step is repeated, it sees the last
            position again, possibly with other logits. `admit` resets it. It cannot be combined with `speculation`,
            because the logits before a draft may arrive in a later call than those after it.
        speculation: correct at each draft position.
        floors: it only drops tokens that are too unlikely compared with the most likely token, and implements `floor`.
            The engine does not call `apply`: the sampler does the same in its own pass over the logits, after the
            grammars.
        keeps_finite: no logit becomes infinite or NaN, or ceases to be, except that numbers above 1e20 may overflow. If
            `apply` raises, no logit has changed. A step with no other processor needs no copy of the logits and no
            search for spoiled rows then.
        companions: its requests may have a companion, a second prompt followed by the same output, and it reads the
            companion's logits. It implements `companion` and sees the rows of requests that have one.
        default: part of every run unless the configuration says otherwise.
        order: processors apply in ascending order. Ties are ordered by name.
        examples: settings of sampling parameters that are accepted and change the logits of some request, one mapping
            for each. The conformance suite tests the processor with them. Token ids in them are below 32, and the
            requests are shorter than 64 tokens. Parameters that go into `extra_args` are given next to the others.
        bad_examples: settings that are refused with `RequestError`, in the same form.
        oracle: a slow and simple form of the processor for the conformance suite, or its dotted path. It is called with
            the request's parameters, its prompt, its output, each a list of token ids, and one row of logits as floats,
            and returns the row that `apply` should give. None for none; not for sequential processors and companions.
    """

    devices: Set[str] = Set(None)
    parameters: tuple[str, ...] = ()
    output_parameters: tuple[str, ...] = ()
    argmax_invariant: bool = False
    needs_history: bool = False
    sequential: bool = False
    speculation: Flag = Flag(False)
    floors: bool = False
    keeps_finite: bool = False
    companions: bool = False
    default: bool = False
    order: int = 100
    examples: tuple[Mapping[str, Any], ...] = field(default=(), eq=False)
    bad_examples: tuple[Mapping[str, Any], ...] = field(default=(), eq=False)
    oracle: Callable[..., Any] | str | None = None


@frozen(kw_only=True)
class LogitsProcessorContext:
    """Input of a processor's factory.

    Attributes:
        eos_token_ids: the model's end-of-sequence tokens.
        tokenizer: transformers' fast tokenizer of the model, None if there is none.
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
    """Description of the logits that a processor gets.

    Attributes:
        rows: [num_logits] int64 on the host, the permanent row of each logits row.
        draft_positions: [num_logits] int64 on the host, draft tokens assumed before this row. 0 without speculation.
        token_table: [max_requests, max_model_len] int32 on the host, tokens by row, drafts excluded. Read-only.
        num_tokens: [num_logits] int64 on the host, tokens known for each row, drafts excluded.
        num_prompt_tokens: [num_logits] int64 on the host.
        draft_token_ids: [num_logits, max_draft] int64 on the host, the drafts assumed: the first `draft_positions` of
            each row, then -1. None without speculation.
        companion_logits: [num_logits, vocab_size] float32, the model's logits for each row's companion. They must not
            be changed. None for processors without `companions`.
    """

    rows: npt.NDArray[np.int64]
    draft_positions: npt.NDArray[np.int64]
    token_table: npt.NDArray[np.int32]
    num_tokens: npt.NDArray[np.int64]
    num_prompt_tokens: npt.NDArray[np.int64]
    draft_token_ids: npt.NDArray[np.int64] | None = None
    companion_logits: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        *,
        spec_positions: npt.NDArray[np.int64],
        spec_token_ids: npt.NDArray[np.int64] | None,
        **fields: Any,
    ) -> LogitsBatch:
        """Build a batch from the tokens that a step verifies: `draft_positions` and `draft_token_ids`."""
        return cls(draft_positions=spec_positions, draft_token_ids=spec_token_ids, **fields)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens before each logits row, [num_logits] int64: prompt, output and assumed drafts."""
        return self.num_tokens + self.draft_positions

    def tail(self, width: int | None = None) -> npt.NDArray[np.int64]:
        """Return the last `width` tokens before each logits row, its assumed drafts included. None means all.

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
    """Second prompt, computed along with a request's own. Both are followed by the same output, token by token.

    Attributes:
        prompt: text for the model's tokenizer, or one or more token ids.
        name: the parameter that the prompt came from, used in error messages.
        asked: the parameter that asks for a companion, and its value, used in error messages.
    """

    prompt: str | Sequence[int]
    name: str
    asked: str


class LogitsProcessor(Protocol):
    """Protocol of a built logits processor. `floor` and `companion` are only called on processors that declare them."""

    def validate(self, params: Mapping[str, Any]) -> None:
        """Check a request's sampling parameters at admission.

        Raises:
            slotline.registry.errors.RequestError: naming the parameter, its value and the allowed values.
        """
        ...

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Start a new request in `row`.

        Args:
            row: the request's permanent row.
            params: the parameters passed to `validate`. `seed` is the seed that the engine samples the request with,
                also if the request did not set one.
            prompt_token_ids: the request's prompt. Empty for a prompt of embeddings.

        Returns:
            True if the processor has work for the request. If False, `apply` does not get the row, and `release` is not
            called for it.
        """
        ...

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Change `logits` [num_logits, vocab_size] float32, in place or not, and return them.

        If this raises, or returns a tensor of another shape, dtype or device, it is called again for each row of logits
        separately. A request ends with finish reason `error` if its logits fail again, contain NaN or plus infinity, or
        are all minus infinity. A call must therefore not assume that it is the only one for its tokens.
        """
        ...

    def release(self, row: int) -> None:
        """End the request in `row`, which may be reused. Called only if `admit` returned True for it."""
        ...

    def floor(self, params: Mapping[str, Any]) -> float:
        """Return the least log-probability of a kept token minus that of the most likely token.

        Called only if `floors` is declared. Both logits are divided by the request's temperature first. `admit` and
        `apply` are the definition that the conformance suite compares this with.

        Args:
            params: as `admit` gets them.

        Returns:
            A number of 0 or below. Minus infinity keeps all tokens.
        """
        ...

    def companion(self, params: Mapping[str, Any], prompt_token_ids: list[int]) -> Companion | None:
        """Return the companion of a request. Called once, after `validate`, if `companions` is declared.

        Returns:
            None for no companion. `admit` must return True exactly if there is a companion.
        """
        ...


class BatchFields(Protocol):
    """Further fields of the batches of some processors, which `processor_fields` of an extension returns."""

    def has(self, rows: npt.NDArray[np.int64], which: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of the places `which` [m] among a step's `rows` [n] have these fields."""
        ...

    def of(self, raw: torch.Tensor, rows: npt.NDArray[np.int64], which: npt.NDArray[np.int64]) -> Mapping[str, Any]:
        """Return the fields of `LogitsBatch` for the places `which` [m], by name.

        Args:
            raw: [n, vocab_size] float32, the step's logits before any processor.
            rows: [n] permanent rows.
            which: [m] places among them.
        """
        ...
