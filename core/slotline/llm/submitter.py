"""From a user's prompts and parameters to queued requests. `LLM` and `AsyncLLM` share it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from attrs import define, evolve, field

from slotline.core.api.prompts import Prompt, as_params
from slotline.core.batch.request import Request
from slotline.llm.best_of import single
from slotline.llm.prompt_fields import prompt_fields
from slotline.ranks.replicas.front import Front
from slotline.ranks.replicas.replica_front import ReplicaFront
from slotline.registry.contracts import PoolingForm, PoolingParams
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.errors import RequestError
from slotline.registry.lora_request import AdapterChoice, LoRARequest
from slotline.text.items import items_of, refuse_items, with_plain_parts
from slotline.text.template import ChatOptions
from slotline.text.tokenizer import Tokenizer

READERS = 16
"""Most threads that read the items of one call's prompts. Processors of images leave Python for most of their time."""


@define(eq=False)
class Submitter:
    """Reader of prompts, which queues their requests in an engine or with the front of its replicas."""

    front: Front
    _ids: Iterator[int] = field(factory=itertools.count, init=False)

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer.

        Raises:
            RequestError: if the model has none.
        """
        if self.front.tokenizer is None:
            raise RequestError("this model has no tokenizer, so text prompts cannot be read", fix="give token ids")
        return self.front.tokenizer

    @property
    def adapters(self) -> Any:
        """Return the engine's adapters.

        Raises:
            RequestError: if it has none.
        """
        if (adapters := self.front.extension("adapters")) is None:
            raise RequestError("this engine takes no adapters", fix='name a LoRA plugin, as in lora.name = "torch"')
        return adapters

    @property
    def pooling_form(self) -> PoolingForm:
        """Return what is known of the engine's pooling.

        Raises:
            RequestError: if the engine generates.
        """
        if (pooling := self.front.extension("pooling")) is None:
            raise RequestError(
                "a request for the task 'score' cannot run: this engine runs 'generate'",
                fix='build an engine with task = "embed", or take a model that serves it',
            )
        form: PoolingForm = pooling.form
        return form

    def know(self, lora_request: LoRARequest) -> bool:
        """Load an adapter. Return True if it was already known."""
        return self.front.exclusively(self._know, lora_request)

    def _know(self, lora_request: LoRARequest) -> bool:
        known = lora_request.lora_int_id in self.adapters.numbers
        self.change_adapters("add", lora_request)
        return known

    def change_adapters(self, method: str, given: Any) -> Any:
        """Call a method of the engine's adapters, on all ranks.

        Raises:
            RequestError: if the engine has none.
        """
        assert self.adapters is not None
        return self.front.everywhere(f"adapters.{method}", given)

    def params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
        """Return the parameters of each of `count` prompts, with the model's defaults for those left out.

        Raises:
            RequestError: if there are more or fewer parameters than prompts.
        """
        params, defaults = as_params(given, count, SamplingParams()), self.front.sampling_defaults
        if not defaults or not all(isinstance(one, SamplingParams) for one in params):
            return params
        return [one.with_defaults(defaults) for one in params]

    def fields(self, prompt: Prompt) -> dict[str, Any]:
        """Return the arguments of `Engine.add` for a prompt. A text is tokenized here.

        Raises:
            RequestError: if the prompt cannot be read.
        """
        with self.front.plugins.naming():
            return prompt_fields(prompt, lambda: self.tokenizer, self._reader, text_only=self._text_only)

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Return the tokens of a text, at most `limit` if it is a number.

        Raises:
            RequestError: if it is empty, or cannot be read.
        """
        if text and limit is not None:
            return self.tokenizer.encode(text, limit)
        token_ids: list[int] = self.fields(text)["prompt_token_ids"]
        return token_ids

    def chat_prompt(self, conversation: Sequence[Mapping[str, Any]], options: ChatOptions) -> dict[str, Any]:
        """Return the prompt of a conversation, with its items besides text.

        Raises:
            RequestError: if the template refuses it, or if it has items and encoders are left out.
        """
        reader, conversation = self._reader, [with_plain_parts(message) for message in conversation]
        if self._text_only:
            refuse_items(items_of(conversation), left_out=True)
        items = {} if reader is None else reader.placeholders
        cross = frozenset[str]() if reader is None else reader.cross
        return {
            "prompt_token_ids": self.tokenizer.chat_prompt(conversation, options, items=items, cross=cross),
            "multi_modal_data": items_of(conversation),
        }

    def adapter(self, choice: AdapterChoice) -> LoRARequest | None:
        """Return the adapter, which may be given by the name of a loaded one.

        Raises:
            RequestError: if none has this name.
        """
        if not isinstance(choice, str):
            return choice
        named: LoRARequest = self.front.exclusively(self.adapters.named, choice)
        return named

    def submit_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        adapters: Sequence[AdapterChoice],
        *,
        stream: bool = False,
    ) -> list[list[Request]]:
        """Queue every prompt, or none if any is wrong. Return the requests of each.

        Raises:
            RequestError: naming the prompt if there are several.
        """
        groups: list[list[Request]] = []
        wrong: int | None = None
        try:
            with self._reading(prompts) as read:
                for fields, one, adapter in zip(read, params, adapters, strict=True):
                    groups.append([])
                    self.submit(fields(), one, adapter, groups[-1], stream=stream)
            if isinstance(self.front, ReplicaFront):
                wrong, refusal = self._refused(self.front, groups)
                if refusal is not None:
                    raise refusal
        except BaseException as error:
            self.abort(itertools.chain.from_iterable(groups))
            if wrong is not None and isinstance(self.front, ReplicaFront):
                self.front.withdraw(groups[wrong])
            if isinstance(error, RequestError) and len(prompts) > 1:
                number = len(groups) - 1 if wrong is None else wrong
                raise RequestError(f"prompt {number}: {error.message}", fix=error.fix) from error
            raise
        return groups

    @contextmanager
    def _reading(self, prompts: Sequence[Prompt]) -> Iterator[Iterator[Callable[[], dict[str, Any]]]]:
        """Hand out what returns the fields of each prompt, and begin to read several of them together.

        Plain texts are tokenized in one call. Prompts with items, which take much longer, are read by threads.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str) and prompt]
        known = dict[str, list[int]]()
        if len(texts) > 1 and self._reader is None and self.front.tokenizer is not None:
            with suppress(RequestError):  # the one that cannot be read is named when its turn comes
                known = dict(zip(texts, self.tokenizer.encode_all(texts), strict=True))
        large = [isinstance(prompt, Mapping) and bool(prompt.get("multi_modal_data")) for prompt in prompts]
        with ThreadPoolExecutor(READERS, "slotline-items") as pool:

            def reader(prompt: Any, apart: bool) -> Callable[[], dict[str, Any]]:
                if apart:
                    return pool.submit(self.fields, prompt).result
                if isinstance(prompt, str) and prompt in known:
                    prompt = {"prompt": prompt, "prompt_token_ids": known[prompt]}
                return partial(self.fields, prompt)

            apart = sum(large) > 1
            try:
                yield iter([reader(prompt, apart and one) for prompt, one in zip(prompts, large, strict=True)])
            finally:
                pool.shutdown(cancel_futures=True)

    @staticmethod
    def _refused(front: ReplicaFront, groups: Sequence[Sequence[Request]]) -> tuple[int | None, BaseException | None]:
        """Wait until replicas have checked all prompts. Return the number of the first that is refused, and why."""
        for number, group in enumerate(groups):
            if (refusal := front.confirm(group)) is not None:
                return number, refusal
        return None, None

    def submit(
        self,
        fields: dict[str, Any],
        params: SamplingParams | PoolingParams,
        adapter: AdapterChoice,
        group: list[Request],
        *,
        stream: bool = False,
    ) -> None:
        """Queue one prompt and put its requests into `group`.

        A sampling prompt is queued `params.n` times, each with its own seed.

        Args:
            fields: of the prompt, see `fields`.
            stream: whether its text is read while it runs.

        Raises:
            RequestError: if the prompt or the parameters are wrong. Requests that are in `group` then are queued.
        """
        if adapter is not None:
            fields["lora_request"] = self.adapter(adapter)
        given = fields.pop("request_id", None)
        request_id = f"request-{next(self._ids)}" if given is None or given == "" else given
        if isinstance(params, PoolingParams):
            group.append(self.front.add(request_id, params=params, **fields))
            return
        for index in range(count := params.best_of or params.n):
            seed = None if params.seed is None else (params.seed + index + 2**63) % 2**64 - 2**63
            one = evolve(single(params), seed=seed) if count > 1 else params
            name = f"{request_id}/{index}" if index else request_id
            group.append(self.front.add(name, params=one, index=index, stream=stream, **fields))

    def abort(self, requests: Iterable[Request]) -> None:
        """Abort the requests that have not ended."""
        for request in requests:
            if self.front.requests.get(request.request_id) is request:
                self.front.abort(request.request_id)

    @property
    def _reader(self) -> Any:
        """The reader of inputs besides text, None for a model of text alone."""
        return getattr(self.front.extension("multimodal"), "reader", None)

    @property
    def _text_only(self) -> bool:
        """Whether the model's encoders are left out by `multimodal.text_only`."""
        return any(setting.key == "multimodal.text_only" for setting in self.front.plan.settings)
