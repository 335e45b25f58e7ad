"""`/v1/models`, and adapters that come and go as models."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from slotline.registry.lora_request import LoRARequest
from slotline.server.errors import HttpError
from slotline.server.fields import Fields
from slotline.server.http import json_response
from slotline.server.state import ServerState


class LoadAdapterFields(Fields):
    """The body of `/v1/load_lora_adapter`."""

    lora_name: str
    lora_path: str


class UnloadAdapterFields(Fields):
    """The body of `/v1/unload_lora_adapter`."""

    lora_name: str


class ModelCard(Struct, kw_only=True):
    """A model, or an adapter with the model that it changes as its parent."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "slotline"
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """The names that requests may give as their model."""

    object: str = "list"
    data: list[ModelCard]


class DeletedModel(Struct, kw_only=True):
    """An adapter that was unloaded."""

    id: str
    object: str = "model"
    deleted: bool = True


async def list_models(state: ServerState, _request: Request) -> Response:
    """Answer with the names that requests may give as their model."""
    return json_response(ModelList(data=[_card(state, name) for name in (*state.names, *state.adapters)]))


async def show_model(state: ServerState, request: Request) -> Response:
    """Answer with one model.

    Raises:
        HttpError: with status 404 if there is none of this name.
    """
    name = request.path_params["name"]
    if not name:
        raise HttpError(404, "the path ends without a model's name", param="model", code="model_not_found")
    name, _ = state.model(name)
    return json_response(_card(state, name))


async def load_adapter(state: ServerState, request: Request) -> Response:
    """Load an adapter, which requests may name as their model from now on.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if it cannot be loaded, or its name is taken.
    """
    fields = await state.read(request, LoadAdapterFields)
    async with state.changing:
        if fields.lora_name in (*state.names, *state.adapters):
            raise HttpError(400, f"a model has the name {fields.lora_name!r}", param="lora_name", code="name_taken")
        number = max(await state.llm.list_loras(), default=0) + 1
        await state.llm.add_lora(LoRARequest(fields.lora_name, number, fields.lora_path))
        state.adapters[fields.lora_name] = number
    return json_response(_card(state, fields.lora_name))


async def unload_adapter(state: ServerState, request: Request) -> Response:
    """Unload an adapter that no request uses.

    Raises:
        HttpError, SlotlineError, msgspec.DecodeError: if there is none of this name, or a request uses it.
    """
    fields = await state.read(request, UnloadAdapterFields)
    async with state.changing:
        if fields.lora_name not in state.adapters:
            raise HttpError(404, f"there is no adapter {fields.lora_name!r}", param="lora_name", code="model_not_found")
        await state.llm.remove_lora(state.adapters[fields.lora_name])
        del state.adapters[fields.lora_name]
    return json_response(DeletedModel(id=fields.lora_name))


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=state.started,
        root=state.names[0],
        parent=state.names[0] if name in state.adapters else None,
        max_model_len=state.llm.front.limits.max_model_len,
    )
