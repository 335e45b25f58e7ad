"""`/v1/completions`: continue one prompt or several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from attrs import frozen
from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from slotline.core.api.outputs import CompletionOutput, RequestOutput
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.registry.lora_request import AdapterChoice
from slotline.server.embedded_prompts import as_embedded_prompts
from slotline.server.errors import as_http_error, unsupported
from slotline.server.fields import SamplingFields, as_prompts, prompt_options, sampling_params
from slotline.server.http import DONE, EventStream, begun, event, gather_or_cancel, json_response
from slotline.server.outputs import CompletionLogprobs, Counter, Usage, completion_logprobs, merged, refuse_failed
from slotline.server.ranges import EmbeddedPrompts, Natural, PromptsOrNone
from slotline.server.state import ServerState, new_id, within_time


class CompletionFields(SamplingFields, kw_only=True):
    """The body of a request."""

    prompt: PromptsOrNone
    prompt_embeds: EmbeddedPrompts | None = None
    model: str | None = None
    max_tokens: Natural | None = None
    logprobs: Natural | None = None
    echo: bool | None = None
    suffix: str | None = None


class Choice(Struct):
    """An output."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Completion(Struct, kw_only=True):
    """An answer, or a chunk of one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


@frozen(kw_only=True)
class Asked:
    """A request as it was understood.

    Attributes:
        name: of the model, in the answer.
        prompts: for `AsyncLLM.generate`.
        params: with at least one token, also if only the prompt is wanted.
        empty: whether no token is wanted.
        transfer: what another engine needs to continue.
    """

    state: ServerState
    id: str
    name: str
    created: int
    adapter: AdapterChoice
    prompts: list[dict[str, Any]]
    params: SamplingParams
    echo: bool
    empty: bool
    transfer: dict[str, Any] | UnsetType

    def outputs(self, kind: Any) -> list[AsyncGenerator[RequestOutput]]:
        """Return the streams of the prompts."""
        return [self.state.generate(prompt, self.params, self.adapter, kind) for prompt in self.prompts]

    def choice(self, prompt: int, output: RequestOutput, one: CompletionOutput, *, first: bool, before: int) -> Choice:
        """Return the choice of an output, or of what is new of it.

        Args:
            prompt: number of the prompt.
            first: whether it is the first part of the output, which begins with an echo.
            before: characters before it.
        """
        refuse_failed(one)
        if self.empty:
            reason = one.finish_reason and "length"
            one = CompletionOutput(index=one.index, finish_reason=reason, logprobs=[])
        echo = self.echo and first
        text = (self._prompt_text(output) if echo else "") + one.text
        return Choice(
            index=prompt * self.params.n + one.index,
            text=text,
            logprobs=self._logprobs(output, one, echo=echo, before=before),
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
        )

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self.state.llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True)

    def _logprobs(
        self, output: RequestOutput, one: CompletionOutput, *, echo: bool, before: int
    ) -> CompletionLogprobs | None:
        if self.params.logprobs is None:
            return None
        tokens, entries = list(one.token_ids), list(one.logprobs or ())
        if echo:
            tokens, entries = [*output.prompt_token_ids, *tokens], [*(output.prompt_logprobs or ()), *entries]
        decode = self.state.llm.tokenizer.decode
        texts = [
            decode([token]) if entry is None else entry[token].decoded_token or ""
            for token, entry in zip(tokens, entries, strict=True)
        ]
        return completion_logprobs(entries, tokens, texts, self.params.logprobs, before)


async def create_completion(state: ServerState, request: Request) -> Response:
    """Answer a request.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if it is wrong.
    """
    fields = await state.read(request, CompletionFields)
    embedded = await asyncio.to_thread(as_embedded_prompts, fields.prompt_embeds, state.llm.front.limits)
    asked = _understood(state, fields, embedded)
    state.admit(len(asked.prompts), asked.params)
    if fields.stream:
        return EventStream(await state.answer(request, begun(_events(asked, fields))))
    return json_response(await state.answer(request, _whole(asked)))


def _understood(state: ServerState, fields: CompletionFields, embedded: list[dict[str, Any]]) -> Asked:
    """Return what a request means. The prompts that are embeddings come first."""
    if fields.suffix:
        raise unsupported("suffix")
    name, adapter = state.model(fields.model)
    echo, empty = bool(fields.echo), fields.max_tokens == 0
    if empty and not echo:
        raise RequestError("max_tokens=0 without echo", fix="ask for at least one token, or set echo to true")
    if echo and embedded:
        raise RequestError("echo beside prompt_embeds, whose tokens are not known", fix="leave echo out")
    params = sampling_params(
        fields,
        max_tokens=1 if empty else fields.max_tokens,
        logprobs=fields.logprobs,
        prompt_logprobs=fields.logprobs if echo and fields.prompt_logprobs is None else fields.prompt_logprobs,
    )
    given = (fields.prompt or None) if embedded else fields.prompt  # OpenAI's clients send "" for none
    if given is None and not embedded:
        raise RequestError("prompt is null", fix="give a prompt, or prompt_embeds beside it")
    others = [] if given is None else as_prompts("prompt", given)
    prompts = [{**prompt, **prompt_options(fields)} for prompt in (*embedded, *others)]
    if fields.request_id:
        for index, prompt in enumerate(prompts):
            prompt["request_id"] = f"{fields.request_id}-{index}" if index else fields.request_id
    return Asked(
        state=state,
        id=fields.request_id or new_id("cmpl"),
        name=name,
        created=int(time.time()),
        adapter=adapter,
        prompts=prompts,
        params=params,
        echo=echo,
        empty=empty,
        transfer=state.transfer_answer(fields.kv_transfer_params),
    )


async def _whole(asked: Asked) -> Completion:
    """Return the answer once everything is there."""

    async def last(stream: AsyncGenerator[RequestOutput]) -> RequestOutput:
        async with aclosing(stream) as outputs:
            return [output async for output in outputs][-1]

    found = await gather_or_cancel([last(stream) for stream in asked.outputs("final_only")])
    counter, choices = Counter(), []
    for prompt, output in enumerate(found):
        choices += [asked.choice(prompt, output, one, first=True, before=0) for one in output.outputs]
        counter.add(prompt, output, empty=asked.empty)
    return Completion(
        id=asked.id,
        created=asked.created,
        model=asked.name,
        choices=choices,
        usage=counter.usage(),
        kv_transfer_params=asked.transfer,
    )


async def _events(asked: Asked, fields: CompletionFields) -> AsyncGenerator[bytes]:
    """Yield the chunks of the answer as events."""
    options = fields.stream_options
    continuous = bool(options and options.continuous_usage_stats)
    unknown = None if options and options.include_usage else UNSET
    counter, before = Counter(), dict[int, int]()
    going, last = len(asked.prompts), b""
    streams = within_time(merged(asked.outputs("delta")), asked.state.config.request_timeout)
    try:
        async with aclosing(streams) as outputs:
            async for prompt, output in outputs:
                counter.add(prompt, output, empty=asked.empty)
                chunks = []
                for one in output.outputs:
                    index = prompt * asked.params.n + one.index
                    choice = asked.choice(prompt, output, one, first=index not in before, before=before.get(index, 0))
                    before[index] = before.get(index, 0) + len(choice.text)
                    chunks.append(event(_chunk(asked, [choice], counter.usage() if continuous else unknown)))
                going -= output.finished
                if going:
                    yield b"".join(chunks)
                else:
                    last = b"".join(chunks)  # sent with the end
    except Exception as error:
        if not before:
            raise
        yield event(as_http_error(error).openai())
        return
    if options and options.include_usage:
        last += event(_chunk(asked, [], counter.usage()))
    yield last + DONE


def _chunk(asked: Asked, choices: list[Choice], usage: Usage | UnsetType | None) -> Completion:
    return Completion(id=asked.id, created=asked.created, model=asked.name, choices=choices, usage=usage)
