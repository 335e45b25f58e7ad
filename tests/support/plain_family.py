"""The decoder family with what adapters asked of a model at first: no embeddings, no room, no steps of one adapter."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from attrs import evolve

from slotline.plugins.model_families.decoder import descriptor as decoder
from slotline.plugins.model_families.transformers_model import TransformersDecoder
from slotline.registry.capability import Flag
from slotline.registry.contracts import ModelContext

LATER = ("embeddings", "extend")


class PlainModel:
    """A model without what came later."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        if name in LATER:
            raise AttributeError(name)
        return getattr(self._model, name)

    def adapt(self, add: Any, names: Collection[str] = ()) -> None:
        self._model.adapt(add, names)


class PlainFamily(TransformersDecoder):
    def load(self, context: ModelContext) -> Any:
        return PlainModel(super().load(context))


descriptor = evolve(
    decoder,
    name="plain_decoder",
    capabilities=evolve(decoder.capabilities, single_adapter=Flag(False), staged_adapters=Flag(False)),
    factory=PlainFamily,
)
