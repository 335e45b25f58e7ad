"""Source of a model's weights: a folder or a model of the Hub, and the form in which they are read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from slotline.planner.hub import HubModel, find_hub_model
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts.model_family import SAVED_WEIGHTS
from slotline.registry.descriptor import Descriptor
from slotline.registry.errors import ModelError, NegotiationError
from slotline.registry.json_file import read_object
from slotline.registry.negotiation import Setting

logger = logging.getLogger("slotline")

KEY = "load.format"


@frozen(kw_only=True)
class WeightSource:
    """Folder of a model's files and the form of its weights.

    Attributes:
        path: the folder.
        loaded: the configuration.
        hub: the model of the Hub that the folder is of, or None.
        format: ``hf``, ``sharded`` or ``dummy``.
        quantized: what saved weights were quantized to by `weights.quantize`, "" for plain weights.
    """

    path: Path
    loaded: LoadedConfig = field(repr=False)
    hub: HubModel | None = None
    format: str = "hf"
    quantized: str = ""

    @property
    def facts(self) -> dict[str, str]:
        """Rows for the plan: where the model is from, if it is from the Hub."""
        return {} if self.hub is None else self.hub.facts

    @property
    def read(self) -> bool:
        """Whether the weights are files of a Hugging Face checkpoint that are there."""
        return self.format == "hf" and not (self.hub is not None and self.hub.missing)

    @property
    def quantizable(self) -> bool:
        """Whether the weights may be quantized: as files, or while a model is loaded."""
        return self.read or bool(self.quantized or (self.format == "dummy" and self.loaded.config.weights.quantize))

    @property
    def look(self) -> dict[str, Any]:
        """Arguments of `ModelFamily.inspect`: `weights` is False for a folder that needs no weights now."""
        return {} if self.read else {"weights": False}

    @property
    def setting(self) -> Setting | None:
        """Record for the plan, None for the usual form that was not asked for."""
        asked, origin = self.loaded.config.load.format, self.loaded.origins[KEY]
        if origin.kind == "default" and self.format == "hf":
            return None
        return Setting(
            key=KEY, asked=asked, resolved=self.format, origin=origin.where, explicit=origin.kind != "default"
        )

    def of_family(self, descriptor: Descriptor[Any], hint: Callable[[], str] = str) -> WeightSource:
        """Return the same source if a model family reads it, with the weights downloaded if it needs them to look.

        Args:
            descriptor: of the family.
            hint: returns what to add to the fix if it does not read the source's form.

        Raises:
            NegotiationError: if the family does not read this form, or weights of this form cannot be quantized.
            ModelError: if they cannot be downloaded.
        """
        formats = descriptor.capabilities.load_formats
        if formats.refusal(self.format) is not None:
            raise NegotiationError(
                f"load.format = {self.format!r}: model family {descriptor.name!r} reads {formats.describe()}",
                fix=f"set load.format to one of {formats.describe()}, or name a Hugging Face checkpoint{hint()}",
            )
        asked = self.loaded.config.weights.quantize
        if self.format == "sharded" and asked not in ("", self.quantized):
            raise NegotiationError(
                f"weights.quantize = {asked!r}: the weights in {self.path} were saved "
                + (f"as {self.quantized!r}" if self.quantized else "in full precision, and are read as they are"),
                fix='set weights.quantize = "", or name the checkpoint that they were made from',
            )
        if self.format == "hf" and not self.read and formats.refusal("dummy") is not None:
            return evolve(self, hub=find_hub_model(self.loaded))
        return self


def find_source(loaded: LoadedConfig, default: Path, *, weights: bool = True) -> WeightSource:
    """Return the source of the model that a configuration names.

    Args:
        default: the folder of the model if none is named.
        weights: False to download no weights.

    Raises:
        ModelError: if a model of the Hub is not available, or the folder does not hold the form that is asked for.
        CapacityError: if the disk has too little room for it.
    """
    asked = loaded.config.load.format
    hub = find_hub_model(loaded, weights=weights and asked != "dummy")
    path = hub.folder if hub is not None else loaded.path("model") or default
    form = _form(path, asked)
    if hub is not None and hub.missing and form == "hf":
        logger.warning(
            "the weights of %s are not in the cache yet: %d files, the first is %s; a run downloads them",
            hub.repo,
            len(hub.missing),
            hub.missing[0],
        )
    quantized = str(read_object(path / SAVED_WEIGHTS).get("quantize", "")) if form == "sharded" else ""
    return WeightSource(path=path, loaded=loaded, hub=hub, format=form, quantized=quantized)


def _form(path: Path, asked: str) -> str:
    """Return the form of a folder's weights, if it is the one that is asked for."""
    saved = os.path.isfile(path / SAVED_WEIGHTS)  # a path too long is no file, and no error here
    if asked == "sharded" and not saved:
        raise ModelError(
            f"load.format = 'sharded', and {path} has no {SAVED_WEIGHTS}",
            fix="name a folder that `LLM.save_weights` wrote, or leave load.format out",
        )
    if asked == "hf" and saved:
        raise ModelError(
            f"load.format = 'hf', and {path} holds weights that `LLM.save_weights` wrote",
            fix="leave load.format out, or name the checkpoint that they were made from",
        )
    return ("sharded" if saved else "hf") if asked == "auto" else asked
