"""Outputs on their way from the engine's thread to a reader on an event loop.

What a reader has not taken yet is merged, so that a slow reader holds one output and not a queue of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal, NamedTuple

from attrs import define, field, frozen

from slotline.core.api.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from slotline.core.batch.request import Request
from slotline.core.engine.output_builder import with_token_texts
from slotline.text.detokenizer import Detokenizer
from slotline.text.tokenizer import Tokenizer

OutputKind = Literal["cumulative", "delta", "final_only"]
"""What each output of a stream holds: everything so far, what is new, or everything, once, at the end."""


@frozen(kw_only=True, eq=False)
class Ending:
    """The end of a request.

    Attributes:
        reason, cause: `finish_reason` and `stop_reason` of the output.
        outside_text: whether the last token is not part of the text.
    """

    reason: str | None
    cause: str | int | None
    outside_text: bool


class Update(NamedTuple):
    """What a step gave to a request.

    Attributes:
        stream, part: where it goes.
        token_ids: the new tokens.
        logprobs: their log-probabilities, None unless asked for.
        text: all text so far that no later token can change, None if the reader decodes the tokens.
        ending: None while the request runs.
    """

    stream: OutputStream
    part: Part
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    text: str | None = None
    ending: Ending | None = None


@define(kw_only=True, eq=False)
class Part:
    """One of the outputs of a prompt, as its reader sees it.

    Attributes:
        request: the engine's request. Only what never changes is read from it while it runs.
        detokenizer: decoder of its tokens. None if the engine decodes them, or nobody does.
        token_ids, logprobs, text: what arrived since the last output.
        ending: None while the request runs.
        cumulative_logprob: sum over all tokens so far.
    """

    request: Request
    detokenizer: Detokenizer | None = None
    token_ids: list[int] = field(factory=list)
    logprobs: list[TokenLogprobs] = field(factory=list)
    text: str | None = None
    ending: Ending | None = None
    cumulative_logprob: float = 0.0
    _shown: int = 0
    _ended: bool = False

    def put(self, update: Update) -> None:
        """Add what a step gave."""
        self.token_ids += update.token_ids
        if update.logprobs is not None:
            self.logprobs += update.logprobs
        if update.text is not None:
            self.text = update.text
        if update.ending is not None:
            self.ending = update.ending

    @property
    def news(self) -> bool:
        """Return whether anything arrived since the last output."""
        return bool(self.token_ids) or (self.ending is not None and not self._ended)

    def take(self, tokenizer: Tokenizer | None) -> CompletionOutput:
        """Return what arrived since the last call."""
        tokens, self.token_ids = self.token_ids, []
        entries, self.logprobs = self.logprobs, []
        ending, first = self.ending, not self._ended
        self._ended = ending is not None
        logprobs = None
        if self.request.params.logprobs is not None:
            logprobs = [entry for entry in with_token_texts(entries, tokenizer) if entry is not None]
            self.cumulative_logprob += sum(next(iter(entry.values())).logprob for entry in entries)
        return CompletionOutput(
            index=self.request.index,
            text=self._new_text(tokens, ending if first else None),
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=None if ending is None else ending.reason,
            stop_reason=None if ending is None else ending.cause,
            cumulative_logprob=None if logprobs is None else self.cumulative_logprob,
        )

    def _new_text(self, tokens: Sequence[int], ending: Ending | None) -> str:
        """Return the text of new tokens, with that of the end if it has just come."""
        reader = self.detokenizer
        if reader is None:
            text = self.text or ""
        else:
            for token in tokens[:-1] if ending is not None and ending.outside_text else tokens:
                reader.append(token)
            if ending is not None and not isinstance(ending.cause, str):
                reader.finish()
            text = reader.text
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new


class OutputStream:
    """The outputs of a prompt's requests, one for each of the n outputs. All methods but `begin` belong to the loop.

    Args:
        kind: what each output holds.
        tokenizer: gives log-probabilities the text of their tokens. None for a model without one.

    Attributes:
        parts: one for each output. None before `begin`.
    """

    def __init__(self, kind: OutputKind, tokenizer: Tokenizer | None) -> None:
        self.parts: Sequence[Part] = ()
        self._kind = kind
        self._tokenizer = tokenizer
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()
        self._sofar: dict[int, CompletionOutput] = {}

    def begin(self, parts: Sequence[Part]) -> None:
        """Take the parts, before the first update comes."""
        self.parts = parts
        self._sofar = {part.request.index: CompletionOutput(index=part.request.index) for part in parts}

    def put(self, update: Update) -> None:
        """Add what a step gave to one of the parts."""
        update.part.put(update)
        if self._kind != "final_only" or self.ended:
            self._arrived.set()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, which the reader gets once it has read everything."""
        self._error = error
        self._arrived.set()

    @property
    def ended(self) -> bool:
        """Return whether every request has ended. What it gave may be unread."""
        return all(part.ending is not None for part in self.parts)

    @property
    def num_unread(self) -> int:
        """Return the number of tokens that the next output takes."""
        return sum(len(part.token_ids) for part in self.parts)

    async def arrival(self) -> None:
        """Wait until there is something to take.

        Raises:
            BaseException: what ended the stream, if nothing is left to take.
        """
        await self._arrived.wait()
        self._arrived.clear()
        if self._error is not None:
            raise self._error

    def take(self) -> RequestOutput:
        """Return the next output. It may be called on another thread while the loop's waits for it."""
        ended = self.ended
        new = [part.take(self._tokenizer) for part in self.parts if self._kind != "delta" or part.news]
        if self._kind != "delta":
            new = [self._added(one) for one in new]
        first = self.parts[0].request
        return RequestOutput(
            request_id=first.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs and with_token_texts(first.prompt_logprobs, self._tokenizer),
            outputs=new,
            finished=ended,
            metrics=first.metrics,
        )

    def _added(self, new: CompletionOutput) -> CompletionOutput:
        """Return an output with everything before it."""
        before = self._sofar[new.index]
        new.text = before.text + new.text
        new.token_ids = before.token_ids + new.token_ids
        if new.logprobs is not None:
            new.logprobs = (before.logprobs or []) + new.logprobs
        self._sofar[new.index] = new
        return new
