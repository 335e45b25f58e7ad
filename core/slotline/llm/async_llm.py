"""`AsyncLLM`: the front end for event loops. Prompts in, outputs as they come, and an engine on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import finalize

from slotline.core.api.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from slotline.core.api.prompts import Prompt, as_params, of_task
from slotline.core.batch.request import Request
from slotline.core.engine.engine import Engine
from slotline.llm.best_of import best_of, check_best_of
from slotline.llm.chat_reader import chat_readers, shown_tools
from slotline.llm.deliveries import Deliveries
from slotline.llm.engine_thread import EngineThread
from slotline.llm.output_stream import OutputKind, OutputStream, Part
from slotline.llm.pooled_texts import with_prompt
from slotline.llm.rewards import rewarding
from slotline.llm.scoring import Scoring, scoring
from slotline.llm.settings import load_settings
from slotline.llm.submitter import Submitter
from slotline.llm.transcription import Transcription, TranscriptionOptions, transcription
from slotline.llm.truncation import truncated
from slotline.media.reader import with_opened_items
from slotline.ranks.replicas.front import Front, engine_of, failure_of, scale_front, start_front
from slotline.ranks.replicas.growth import ScaleReport
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import PoolingParams
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.registry.lora_request import AdapterChoice, LoRARequest
from slotline.registry.negotiation import Plan
from slotline.registry.safe_repr import safe_repr
from slotline.text.messages import as_conversations
from slotline.text.template import ChatOptions, chat_options
from slotline.text.tokenizer import Tokenizer

R = TypeVar("R")
_KINDS = ("cumulative", "delta", "final_only")
_MUCH = 256
"""Tokens of an output from which on it is decoded on another thread than the loop's."""
_LONG = 512
"""Characters of a prompt from which on it is tokenized on another thread than the loop's."""


class AsyncLLM:
    """A model that answers on an event loop.

    The engine runs on a thread of its own. Long prompts are tokenized, and long outputs decoded, on another. Between
    two outputs of a stream the loop is free, and what a slow reader has not taken is merged into one output.

    Example:
        >>> async with AsyncLLM() as llm:  # the small model that ships with slotline
        ...     async for output in llm.generate("def main(", SamplingParams(max_tokens=8), output_kind="delta"):
        ...         print(output.outputs[0].text, end="")

    Ending the iteration early, or cancelling its task, aborts the request.

    Args:
        config, overrides, settings: as for `LLM`.

    Raises:
        SlotlineError: of the kind that fits: configuration, plugin, negotiation, model or capacity.
    """

    def __init__(
        self, config: str | Path | LoadedConfig | None = None, *, overrides: Sequence[str] = (), **settings: Any
    ) -> None:
        self.loaded: LoadedConfig = load_settings(config, overrides, settings)
        loaded = self.loaded  # the thread does not hold this object, so that it can be collected
        self._deliveries = Deliveries()
        self._thread = EngineThread(lambda: start_front(loaded), self._deliveries)
        self.front: Front = self._thread.front
        self.submitter = Submitter(self.front)
        self._text = ThreadPoolExecutor(1, "slotline-text")
        self._end = finalize(self, _end, self._thread, self._text)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queued: set[OutputStream] = set()  # that the engine's thread has not begun

    @property
    def engine(self) -> Engine:
        """Return the engine, see `LLM.engine`."""
        return engine_of(self.front)

    @property
    def plan(self) -> Plan:
        """Return the plan: the parts that run, with reasons."""
        return self.front.plan

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer.

        Raises:
            RequestError: if the model has none.
        """
        return self.submitter.tokenizer

    @property
    def error(self) -> BaseException | None:
        """Return what ended the engine, None while it takes requests."""
        if self._deliveries.fatal is None and not self._thread.alive:
            return RequestError("the engine is closed", fix="make a new AsyncLLM")
        return self._deliveries.fatal or failure_of(self.front)

    @property
    def num_unfinished(self) -> int:
        """Return the number of prompts whose outputs are not complete."""
        return self._deliveries.num_streams + len(self._queued)

    @property
    def num_generated(self) -> int:
        """Return the number of tokens generated so far, for all requests."""
        return self._deliveries.num_generated

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: AdapterChoice = None,
        output_kind: OutputKind = "cumulative",
    ) -> AsyncGenerator[RequestOutput]:
        """Generate for one prompt and yield its outputs as they come.

        Args:
            prompt: as for `LLM.generate`.
            sampling_params: None for the model's defaults.
            lora_request: an adapter, or the name of a loaded one.
            output_kind: what each `RequestOutput` holds: ``cumulative`` everything so far, ``delta`` only what is new,
                ``final_only`` everything, once, at the end.

        Raises:
            RequestError: if the prompt or the parameters are wrong, or the loop is another one than before.
            SlotlineError: what ended the engine while the request ran.
        """
        params = self._checked(sampling_params, output_kind)
        fields = await self._fields(prompt)
        async with aclosing(self._streamed(fields, params, lora_request, output_kind)) as streams:
            async for stream in streams:
                much = stream.num_unread > _MUCH
                output = await self._on_text_thread(stream.take) if much else stream.take()
                yield best_of(output, params)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: AdapterChoice = None,
        output_kind: OutputKind = "cumulative",
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        tools: Sequence[Any] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """Generate the assistant's turn of one conversation and yield its outputs as they come.

        Args:
            messages: the conversation. The other arguments are those of `generate` and `LLM.chat`. With `tool_choice`
                the last part of each output has its `message`.
            request_id, priority, cache_salt: as in a prompt for `generate`.

        Raises:
            RequestError: as for `generate`, or if the template refuses the messages.
        """
        options = chat_options(
            chat_template_kwargs,
            template_options,
            chat_template=chat_template,
            content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=shown_tools(tools, tool_choice, parallel_tool_calls),
            documents=documents,
        )
        more = {"request_id": request_id, "priority": priority, "cache_salt": cache_salt}
        prompt, reader = await self.chat_prompt(messages, options), None
        if tool_choice is not None:
            given = as_params(sampling_params, 1, SamplingParams())
            (reader,) = chat_readers(
                self.front, [prompt], given, tools=tools, choice=tool_choice, parallel=parallel_tool_calls
            )
            sampling_params = reader.params
        async with aclosing(
            self.generate(prompt | more, sampling_params, lora_request=lora_request, output_kind=output_kind)
        ) as outputs:
            async for output in outputs:
                yield output if reader is None else reader.read(output, deltas=output_kind == "delta")

    async def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None
    ) -> dict[str, Any]:
        """Return the prompt of one conversation, for `generate`.

        Raises:
            RequestError: if the messages cannot be read, or the template refuses them.
        """
        conversations = as_conversations(messages)
        if len(conversations) != 1:
            raise RequestError(f"{len(conversations)} conversations in one call", fix="make a call for each")
        given = options or ChatOptions()
        return await self._on_text_thread(lambda: self.submitter.chat_prompt(conversations[0], given))

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        prompt_name: str | None = None,
        lora_request: AdapterChoice = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput]]:
        """Pool the hidden states of one prompt and yield its one output.

        Args:
            prompt, pooling_params, pooling_task, prompt_name, lora_request: as for `LLM.encode`.

        Raises:
            RequestError: if the prompt or its parameters are wrong, or the engine runs another task.
        """
        params = of_task(pooling_params or PoolingParams(), pooling_task)
        given = truncated(self.submitter, with_prompt(self.submitter, prompt, params.task, prompt_name), params)
        fields = await self._fields(given)
        async with aclosing(self._streamed(fields, params, lora_request, "final_only")) as streams:
            async for stream in streams:
                yield self.front.extension("pooling").output(stream.parts[0].request)

    async def embed(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, *, lora_request: AdapterChoice = None
    ) -> AsyncGenerator[EmbeddingRequestOutput]:
        """Yield the embedding of one prompt, see `encode`. Needs an engine whose task is ``embed``."""
        async for output in self.encode(prompt, pooling_params, pooling_task="embed", lora_request=lora_request):
            yield cast(EmbeddingRequestOutput, output)

    async def classify(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, *, lora_request: AdapterChoice = None
    ) -> AsyncGenerator[ClassificationRequestOutput]:
        """Yield the class scores of one prompt, see `encode`. Needs an engine whose task is ``classify``."""
        async for output in self.encode(prompt, pooling_params, pooling_task="classify", lora_request=lora_request):
            yield cast(ClassificationRequestOutput, output)

    async def scoring(self, first: str | list[str], second: str | list[str], **options: Any) -> Scoring:
        """Return the prompts that score pairs of texts, for `encode`, and what makes scores of their outputs.

        Args:
            first, second, options: as for `LLM.score`.

        Raises:
            RequestError: if a text is wrong, or the model scores no pairs.
        """
        return await self._on_text_thread(lambda: scoring(self.submitter, first, second, **options))

    async def score(
        self,
        first: str | list[str],
        second: str | list[str],
        pooling_params: PoolingParams | None = None,
        *,
        lora_request: AdapterChoice = None,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each pair of texts, see `LLM.score`.

        Args:
            first, second, pooling_params, lora_request: as for `LLM.score`.
            options: its `score_type`, `prompt_name` and `instruction`.

        Raises:
            RequestError: if a text is wrong, or the model scores no pairs. The requests of the call end then.
        """
        asked = await self.scoring(first, second, pooling_params=pooling_params, **options)
        params = asked.params(pooling_params)
        return asked.outputs(await self._encode_all(asked.prompts, params, lora_request))

    async def reward(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        *,
        step_token: str | int | None = None,
        lora_request: AdapterChoice = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Return the reward of one prompt [1], or of each of its steps [num_steps], see `LLM.reward`."""
        asked = rewarding(self.submitter, pooling_params, step_token)
        (output,) = asked.outputs(await self._encode_all([prompt], asked.params, lora_request))
        return output

    async def _encode_all(
        self, prompts: Sequence[Prompt], params: PoolingParams, lora_request: AdapterChoice
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the output of each prompt. If one fails, the others are aborted."""

        async def one(prompt: Prompt) -> PoolingRequestOutput[PoolingOutput]:
            (output,) = [output async for output in self.encode(prompt, params, lora_request=lora_request)]
            return output

        tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def transcription(self, recording: Any, options: TranscriptionOptions) -> Transcription:
        """Return the prompts that transcribe a recording, for `generate`, and what makes a transcript of their outputs.

        Raises:
            RequestError: as for `LLM.transcribe`.
        """
        return await self._on_text_thread(lambda: transcription(self.submitter, recording, options))

    async def abort(self, request_id: str) -> bool:
        """End a request now, by its id. Its stream ends with what it has. Return False if none has this id."""
        return await self.on_engine(lambda: self._deliveries.abort(self.front, request_id))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before it is needed, see `LLM.add_lora`. Return False if it was already known."""
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(f"{safe_repr(lora_request)} is no adapter", fix="give LoRARequest(name, number, path)")
        return not await self.on_engine(lambda: self.submitter.know(lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter, see `LLM.remove_lora`. Return False if none has this number."""
        return await self.on_engine(lambda: bool(self.submitter.change_adapters("remove", lora_id)))

    async def list_loras(self) -> set[int]:
        """Return the numbers of the known adapters."""
        return await self.on_engine(lambda: set(self.submitter.adapters.numbers))

    async def scale(self, data: int, *, timeout: float | None = None) -> ScaleReport:
        """Let so many replicas take requests, see `LLM.scale`. Requests are served meanwhile."""
        return await self._bind_loop().run_in_executor(None, scale_front, self.front, data, timeout)

    async def on_engine(self, function: Callable[[], R]) -> R:
        """Call a function on the engine's thread between two steps, to use the engine's parts.

        Raises:
            RequestError: if the engine is closed.
        """
        self._bind_loop()

        def call() -> R:
            with self.front.plugins.naming():
                return function()

        return await asyncio.wrap_future(self._thread.call(call))

    async def drain(self) -> None:
        """Wait until every request has ended. Requests that come meanwhile are served as well."""
        while self.num_unfinished and self.error is None:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Abort all requests, end the engine's thread and wait for its end. May be called again."""
        self._end()

    async def __aenter__(self) -> AsyncLLM:
        """Return itself, to be closed at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it without blocking the loop."""
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def _checked(self, given: SamplingParams | None, kind: OutputKind) -> SamplingParams:
        """Return the parameters with the model's defaults."""
        if kind not in _KINDS:
            raise RequestError(f"output_kind={safe_repr(kind)}", fix=f"give one of {', '.join(_KINDS)}")
        (params,) = self.submitter.params(given, 1)
        check_best_of([params], self.loaded.config.sampling.logprobs_mode)
        if (params.best_of or 1) > params.n and kind != "final_only":
            raise RequestError(
                f"best_of={params.best_of} in a stream: which outputs are best is known at the end",
                fix='leave best_of out, or give output_kind="final_only"',
            )
        return params

    async def _fields(self, prompt: Prompt) -> dict[str, Any]:
        """Return the arguments of `Engine.add` for a prompt."""
        if _is_short(prompt):
            return self.submitter.fields(prompt)
        opened = await asyncio.to_thread(with_opened_items, prompt, self.loaded.config.multimodal)  # may wait for a URL
        return await self._on_text_thread(lambda: self.submitter.fields(opened))

    async def _streamed(
        self, fields: dict[str, Any], params: SamplingParams | PoolingParams, adapter: AdapterChoice, kind: OutputKind
    ) -> AsyncGenerator[OutputStream]:
        """Queue a prompt and yield its stream whenever there is something to take from it."""
        loop = self._bind_loop()
        engine_params, readers = params, None
        if isinstance(params, SamplingParams) and params.detokenize and not params.stop and self.front.tokenizer:
            engine_params = _without_text(params)  # decoded here, and not on the engine's thread
            readers = lambda request: self.tokenizer.detokenizer(request.known_prompt, params)  # noqa: E731
        group: list[Request] = []
        stream = OutputStream(kind, self.front.tokenizer)

        def submit() -> None:
            with self.front.plugins.naming():
                self.submitter.submit(fields, engine_params, adapter, group, stream=True)
            stream.begin([Part(request=one, detokenizer=readers and readers(one)) for one in group])
            self._deliveries.add(loop, stream)

        def submitted(future: Future[None]) -> None:
            self._queued.discard(stream)
            if (error := future.exception()) is not None:
                with suppress(RuntimeError):  # if the loop was closed
                    loop.call_soon_threadsafe(stream.fail, error)

        submission: Future[None] | None = None
        self._queued.add(stream)
        try:
            submission = self._thread.call(submit)
            submission.add_done_callback(submitted)
            ended = False
            while not ended:
                await stream.arrival()
                ended = stream.ended
                yield stream
        finally:
            self._queued.discard(stream)
            if submission is not None:
                self._give_up(submission, group)

    def _give_up(self, submitted: Future[Any], group: Sequence[Request]) -> None:
        """Abort what is left of a prompt whose reader has gone, even if it is only now being queued."""
        if not (submitted.done() and all(one.finished for one in group)):
            with suppress(RequestError):  # if the thread has ended
                self._thread.call(lambda: self._deliveries.drop(self.front, group))

    async def _on_text_thread(self, function: Callable[[], R]) -> R:
        return await self._bind_loop().run_in_executor(self._text, function)

    def _bind_loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop.

        Raises:
            RequestError: if requests came from another loop that is still open.
            BaseException: what ended the engine.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed():
                raise RequestError(
                    "this AsyncLLM serves another event loop", fix="use it on one loop, or make one for each loop"
                )
            self._loop = loop
        if (error := self.error) is not None:
            raise error
        return loop


def _end(thread: EngineThread, text: ThreadPoolExecutor) -> None:
    thread.close()
    text.shutdown(wait=False)


def _is_short(prompt: Prompt) -> bool:
    """Return whether a prompt is only text, or tokens, and read in no time."""
    given: Any = prompt
    if isinstance(prompt, Mapping):
        if prompt.get("multi_modal_data"):
            return False
        given = prompt.get("prompt") if prompt.get("prompt_token_ids") is None else prompt["prompt_token_ids"]
    return isinstance(given, str | list) and len(given) < _LONG


def _without_text(params: SamplingParams) -> SamplingParams:
    """Return parameters for an engine that decodes nothing. They have been validated."""
    copied = object.__new__(SamplingParams)
    copied.__dict__.update(params.__dict__, detokenize=False)
    return copied
