"""What the endpoints of a server share: the engine, the names of models, limits and counts."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from attrs import define, field
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from slotline.core.api.outputs import RequestOutput
from slotline.llm.async_llm import AsyncLLM
from slotline.llm.output_stream import OutputKind
from slotline.ranks.replicas.front import model_folder
from slotline.registry.config.schema import MultimodalConfig, ServerConfig
from slotline.registry.config.validators import size_in_bytes
from slotline.registry.contracts.sampling_params import SamplingParams
from slotline.registry.lora_request import AdapterChoice
from slotline.server.errors import HttpError
from slotline.server.http import decode, read_body, until_disconnect
from slotline.server.metrics import Metrics
from slotline.server.profiler import Profiler
from slotline.server.request_record import current_record

if TYPE_CHECKING:
    from slotline.server.tracing import Tracing

T = TypeVar("T")
SMALL = "slotline-small"
"""Name of the model that ships."""


@define(kw_only=True, eq=False)
class ServerState:
    """The engine behind a server, and what its endpoints keep.

    Attributes:
        media: limits of images and videos in requests.
        names: of the model. Requests may give any of them, or none.
        adapters: numbers of the adapters that requests may name as their model.
        started: seconds since the epoch.
        labels: names of a classifier's classes by number, empty for other models.
        max_body: bytes of the largest body.
        tracing: makes the spans of requests, None if they are not traced.
        profiler: of the engine's steps.
        changing: held while an adapter is loaded or unloaded, or replicas come or go.
        draining: whether new requests are refused, since the server ends.
        view, view_made: the last answer of `/v1/engine`, and the seconds of the clock when it was made.
    """

    llm: AsyncLLM
    config: ServerConfig
    media: MultimodalConfig
    names: tuple[str, ...]
    metrics: Metrics
    adapters: dict[str, int] = field(factory=dict)
    started: int = field(factory=lambda: int(time.time()))
    draining: bool = False
    tracing: Tracing | None = None
    view: bytes = b""
    view_made: float = -inf
    changing: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    labels: dict[int, str] = field(init=False)
    max_body: int = field(init=False)
    profiler: Profiler = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.profiler = Profiler(self.llm)
        self.max_body = size_in_bytes(self.config.max_body)
        self.labels = _labels(model_folder(self.llm.front))

    async def read(self, request: Request, kind: type[T]) -> T:
        """Return the body of a request as an object of a kind.

        Raises:
            HttpError: if it is too large or empty.
            msgspec.DecodeError: if it is no JSON or not of this kind.
        """
        return await decode(await read_body(request, self.max_body), kind)

    def admit(self, prompts: int, params: SamplingParams | None = None) -> None:
        """Check that there is room for more prompts. Each output that is sampled for one counts as a prompt.

        Raises:
            HttpError: with status 429 if there is none, or 503 if the server ends or its engine failed.
        """
        if (error := self.llm.error) is not None:
            raise error
        if self.draining:
            raise HttpError(503, "the server ends", "server_error", code="draining", headers=(("retry-after", "10"),))
        outputs = 1 if params is None else max(params.n, params.best_of or 1)
        if self.llm.num_unfinished + prompts * outputs > self.config.max_unfinished:
            raise HttpError(
                429,
                f"{self.llm.num_unfinished} prompts are unfinished and server.max_unfinished is "
                f"{self.config.max_unfinished}; try again later",
                "rate_limit_error",
                code="too_many_requests",
                headers=(("retry-after", "1"),),
            )

    def model(self, name: str | None) -> tuple[str, AdapterChoice]:
        """Return the model's name in the answer, and the adapter that a name stands for.

        Raises:
            HttpError: with status 404 if there is no such model.
        """
        name = name or self.names[0]
        if name not in self.names and name not in self.adapters:
            known = ", ".join([*self.names, *self.adapters])
            raise HttpError(
                404,
                f"the model {name!r} does not exist; this server has {known}",
                param="model",
                code="model_not_found",
            )
        current_record().model = name
        return name, None if name in self.names else name

    def transfer_answer(self, params: Mapping[str, Any] | None) -> dict[str, Any] | UnsetType:
        """Return what another engine needs to continue a request with these parameters, if this one keeps blocks."""
        transfer = self.llm.front.extension("kv_transfer") if params else None
        found = None if transfer is None else transfer.answer(params)
        return UNSET if found is None else dict(found)

    async def generate(
        self, prompt: dict[str, Any], params: SamplingParams, adapter: AdapterChoice, kind: OutputKind
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the outputs of a prompt, and count its end."""
        counts: dict[int, int] = {}
        record = current_record()
        outputs = self.llm.generate(prompt, params, lora_request=adapter, output_kind=kind)
        with record.prompt(prompt, self.llm.front.tokenizer, params, stream=kind == "delta"):
            async with aclosing(outputs):
                async for output in outputs:
                    for one in output.outputs:
                        counts[one.index] = counts.get(one.index, 0) + len(one.token_ids)
                        if one.finish_reason is not None:
                            self.metrics.ended(one.finish_reason)
                            record.finish_reasons.append(one.finish_reason)
                    if output.finished:
                        self.metrics.count(output, counts)
                        record.end(output, sum(counts.values()))
                    yield output

    async def answer(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Return what some work returns. It is cancelled if the client goes away.

        Raises:
            TimeoutError: if it takes longer than `request_timeout`.
            HttpError: if the client has gone. Nobody reads it.
        """
        found = await until_disconnect(request.receive, asyncio.wait_for(work, self.config.request_timeout or None))
        if found is None:
            raise HttpError(499, "the client has gone", code="client_gone")
        return found


def within_time(stream: AsyncGenerator[T], seconds: float) -> AsyncGenerator[T]:
    """Return a stream that ends after so many seconds, 0 for no limit.

    It raises:
        TimeoutError: if it takes longer.
    """
    return _ending(stream, time.monotonic() + seconds) if seconds else stream


async def _ending(stream: AsyncGenerator[T], end: float) -> AsyncGenerator[T]:
    """Yield what a stream yields, until a time."""
    async with aclosing(stream):
        with suppress(StopAsyncIteration):
            while True:
                if (left := end - time.monotonic()) <= 0:
                    raise TimeoutError
                async with asyncio.timeout(left):
                    item = await anext(stream)
                yield item


def _labels(folder: Path) -> dict[int, str]:
    """Return the names of a classifier's classes, as config.json has them."""
    try:
        named = json.loads((folder / "config.json").read_text()).get("id2label") or {}
    except (OSError, ValueError):
        return {}
    return {int(number): str(name) for number, name in named.items()}


def new_id(kind: str) -> str:
    """Return a new id of an answer."""
    return f"{kind}-{uuid4().hex}"


def model_names(config: ServerConfig, model: str) -> tuple[str, ...]:
    """Return the names of the model: those of the configuration, or its own."""
    given = config.served_model_name
    names = (given,) if isinstance(given, str) else given
    names = tuple(name for name in names if name)
    return names or ((model, Path(model).name) if model and Path(model).name != model else (model or SMALL,))
