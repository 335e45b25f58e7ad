"""What the front of replicas has in place of an engine's extensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from pickle import PicklingError
from typing import Any, Protocol

from attrs import define, field

from slotline.core.api.outputs import PoolingOutput, PoolingRequestOutput
from slotline.core.engine.engine import Engine
from slotline.ranks.replicas.front_requests import SentRequest
from slotline.registry.contracts import PoolingForm
from slotline.registry.errors import RequestError
from slotline.registry.loading import one_line
from slotline.registry.lora_request import LoRARequest


class Calls(Protocol):
    """Connections with replicas."""

    def call(
        self,
        function: Callable[..., Any],
        *given: Any,
        reads: bool = False,
        only: int | None = None,
        to: Sequence[Any] | None = None,
    ) -> list[Future[Any]]:
        """Have all replicas, or some, call a function with their engines."""
        ...


def results(futures: list[Future[Any]]) -> list[Any]:
    """Return what all replicas returned, once all have.

    Raises:
        Exception: the first of what they raised.
    """
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


@define(eq=False)
class FrontAdapters:
    """Adapters of all replicas.

    Attributes:
        requests: the front's, to tell who uses an adapter.
        changes: number of changes so far.
    """

    links: Calls
    requests: dict[int, SentRequest]
    changes: int = 0
    _given: dict[int, LoRARequest] = field(factory=dict)
    _pinned: set[int] = field(factory=set)

    @property
    def numbers(self) -> set[int]:
        """Return the numbers of the known adapters."""
        found: set[int] = set().union(*results(self.links.call(_numbers)))
        return found

    def named(self, name: str) -> LoRARequest:
        """Return the known adapter of a name.

        Raises:
            RequestError: if no known adapter has it.
        """
        found: LoRARequest = results(self.links.call(_named, name, only=0))[0]
        return found

    def add(self, request: LoRARequest) -> None:
        """Make an adapter known to all replicas.

        Raises:
            RequestError: if one cannot hold it, or another adapter has its name or number.
        """
        if self._given.get(request.lora_int_id) == request:
            return
        results(self.links.call(_add, request))
        self._given[request.lora_int_id] = request
        self.changes += 1

    def remove(self, number: int) -> bool:
        """Have all replicas forget an adapter. Return False if none has this number.

        Raises:
            RequestError: if a request uses it.
        """
        users = sum(_adapter_of(request) == number for request in self.requests.values())
        if users:
            raise RequestError(f"adapter {number} is in use by {users} requests", fix="finish or abort them first")
        self._given.pop(number, None)
        self._pinned.discard(number)
        self.changes += 1
        return any(results(self.links.call(_remove, number)))

    def pin(self, number: int) -> None:
        """Keep an adapter in its slot on all devices.

        Raises:
            RequestError: if it is not known, or if there is no slot for it.
        """
        results(self.links.call(_pin, number))
        self._pinned.add(number)
        self.changes += 1

    def teach(self, new: Sequence[Any]) -> None:
        """Have replicas that are new know the same adapters as the others.

        Raises:
            RequestError: if one cannot hold them.
        """
        known = self.numbers
        for request in [one for number, one in self._given.items() if number in known]:
            results(self.links.call(_add, request, to=new))
        for number in sorted(set().union(*results(self.links.call(_numbers, to=new))) - known):
            results(self.links.call(_remove, number, to=new))
        for number in sorted(self._pinned & known):
            results(self.links.call(_pin, number, to=new))


class FrontReader:
    """Reader of prompts with items besides text. Replicas read them in turn, since they have the model's processor.

    Attributes:
        placeholders, cross, raw, prompt, decoder_start: those of an engine's reader.
    """

    def __init__(self, links: Calls) -> None:
        self._links, self._turns = links, count()
        facts: tuple[Any, ...] = results(links.call(_placeholders, only=0))[0]
        self.placeholders, self.cross, self.raw, self.prompt, self.decoder_start = facts

    def read(self, token_ids: Sequence[int], data: Mapping[str, Any]) -> tuple[list[int], tuple[Any, ...]]:
        """Return the prompt's tokens as the model reads them, and its items in order.

        Raises:
            RequestError: if an item cannot be read, or cannot be sent to another process.
        """
        try:
            futures = self._links.call(_read, list(token_ids), dict(data), reads=True, only=next(self._turns))
        except (PicklingError, TypeError, AttributeError) as error:
            raise RequestError(
                f"multi_modal_data cannot be sent to another process: {one_line(error)}",
                fix="give images or arrays of a module that replicas can import",
            ) from error
        found: tuple[list[int], tuple[Any, ...]] = results(futures)[0]
        return found


@define(eq=False)
class FrontMultimodal:
    """What stands for the extension of a model that takes inputs besides text."""

    reader: FrontReader


class FrontPooling:
    """Answers of requests that sample nothing.

    Attributes:
        form: that of an engine's pooling.
    """

    def __init__(self, links: Calls) -> None:
        self.form: PoolingForm = results(links.call(_form, only=0))[0]

    def output(self, request: SentRequest) -> PoolingRequestOutput[PoolingOutput]:
        """Return the public form of a pooling request."""
        return PoolingRequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=request.pooled,
            finished=request.finished,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            metrics=request.metrics,
        )


def _adapter_of(request: SentRequest) -> int | None:
    adapter = request.inputs.get("lora_request")
    return None if adapter is None else adapter.lora_int_id


def _placeholders(engine: Engine) -> tuple[Any, ...]:
    reader = engine.extension("multimodal").reader
    return reader.placeholders, reader.cross, reader.raw, reader.prompt, reader.decoder_start


def _read(engine: Engine, token_ids: list[int], data: dict[str, Any]) -> tuple[list[int], tuple[Any, ...]]:
    with engine.plugins.naming():
        found: tuple[list[int], tuple[Any, ...]] = engine.extension("multimodal").reader.read(token_ids, data)
    return found


def _form(engine: Engine) -> PoolingForm:
    form: PoolingForm = engine.extension("pooling").form
    return form


def _numbers(engine: Engine) -> set[int]:
    return set(engine.extension("adapters").numbers)


def _named(engine: Engine, name: str) -> LoRARequest:
    found: LoRARequest = engine.extension("adapters").named(name)
    return found


def _add(engine: Engine, request: LoRARequest) -> None:
    engine.everywhere("adapters.add", request)


def _remove(engine: Engine, number: int) -> bool:
    return bool(engine.everywhere("adapters.remove", number))


def _pin(engine: Engine, number: int) -> None:
    engine.everywhere("adapters.pin", number)
