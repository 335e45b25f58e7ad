"""What answers of several endpoints share: counts of tokens, ends, log-probabilities, and several prompts at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from msgspec import Struct

from slotline.core.api.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from slotline.registry.errors import RequestError
from slotline.server.errors import HttpError


class PromptDetails(Struct):
    """Details of a prompt's tokens."""

    cached_tokens: int = 0


class Usage(Struct):
    """Counts of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Counter:
    """Counts of the tokens of an answer, over all its prompts and outputs."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion = 0

    def add(self, prompt: int, output: RequestOutput, *, empty: bool = False) -> None:
        """Count an output of a prompt by its number: a whole output once, or each delta.

        Args:
            empty: whether the output's tokens are not wanted.
        """
        self._prompts[prompt] = output.num_prompt_tokens, output.metrics.num_cached_tokens
        if not empty:
            self._completion += sum(len(one.token_ids) for one in output.outputs)

    def usage(self) -> Usage:
        """Return the counts."""
        prompt = sum(count for count, _ in self._prompts.values())
        cached = sum(cached for _, cached in self._prompts.values())
        return Usage(prompt, self._completion, prompt + self._completion, PromptDetails(cached))


_FAULT = f"{RequestError.__name__}: "
"""Begins the cause of an output that failed for what the request asks, as a grammar that no text follows."""


def refuse_failed(output: CompletionOutput) -> None:
    """Refuse to answer with an output that failed.

    Raises:
        HttpError: with the cause, and status 400 if the request caused it.
    """
    if output.finish_reason == "error":
        cause = str(output.stop_reason)
        if cause.startswith(_FAULT):
            raise HttpError(400, cause.removeprefix(_FAULT), code="invalid_value")
        raise HttpError(500, f"the request failed: {output.stop_reason}", "server_error", code="request_failed")


class TokenLogprob(Struct):
    """A token with its log-probability, in the form of chats."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """A sampled token, with the most likely ones in its place."""

    top_logprobs: list[TokenLogprob] = []


class ChatLogprobs(Struct):
    """Log-probabilities of an output, in the form of chats."""

    content: list[ContentLogprob]


class CompletionLogprobs(Struct):
    """Log-probabilities of an output, in the form of completions: lists with an entry for each token."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(entries: Iterable[TokenLogprobs], top: int) -> ChatLogprobs:
    """Return log-probabilities in the form of chats, with the `top` most likely tokens of each place."""
    content = []
    for entry in entries:
        (first, *_), ranked = entry.items(), sorted(entry.items(), key=lambda one: one[1].rank)
        token = _token(first[1])
        most_likely = [_token(one) for _, one in ranked if one.rank <= top]
        content.append(ContentLogprob(token.token, token.logprob, token.bytes, most_likely))
    return ChatLogprobs(content)


def completion_logprobs(
    entries: Iterable[TokenLogprobs | None], token_ids: Sequence[int], texts: Sequence[str], top: int, offset: int
) -> CompletionLogprobs:
    """Return log-probabilities in the form of completions.

    Args:
        entries: one for each token, None for the first of a prompt.
        token_ids, texts: the tokens.
        top: how many of the most likely tokens of each place are shown.
        offset: characters before the first token.
    """
    found = CompletionLogprobs([], [], [], [])
    for entry, token, text in zip(entries, token_ids, texts, strict=True):
        found.text_offset.append(offset)
        offset += len(text)
        found.tokens.append(text)
        found.token_logprobs.append(None if entry is None else _finite(entry[token].logprob))
        found.top_logprobs.append(None if entry is None else _most_likely(entry, top))
    return found


def _most_likely(entry: TokenLogprobs, top: int) -> dict[str, float]:
    return {_text(token, one): _finite(one.logprob) for token, one in entry.items() if one.rank <= top}


def _token(value: Logprob) -> TokenLogprob:
    text = value.decoded_token or ""
    return TokenLogprob(text, _finite(value.logprob), list(text.encode()))


def _text(token: int, value: Logprob) -> str:
    return f"token_id:{token}" if value.decoded_token is None else value.decoded_token


def _finite(number: float) -> float:
    return max(number, _LEAST)


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Yield the outputs of several streams as they come, each with the number of its stream."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(len(streams))

    async def read(index: int, stream: AsyncGenerator[RequestOutput]) -> None:
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(read(*one)) for one in enumerate(streams)]
    try:
        going = len(tasks)
        while going:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            going -= item is None
            if item is not None:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
