"""Extension of a model that reads items alone: their inputs go to its forward pass as they are, and nothing is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from slotline.builder.parts import Parts
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.plugins.multimodal.features import features_of
from slotline.plugins.multimodal.prompt_reader import PromptReader
from slotline.registry.contracts import MultimodalModel
from slotline.registry.errors import RequestError


class RawInputs:
    """Items of requests, one for each, from the prompt to the forward pass.

    Attributes:
        reader: reads prompts.
        notes: what is special, in words.
    """

    notes = ("inputs: items alone, given to each forward pass as they are, without an encoder cache",)

    def __init__(self, parts: Parts) -> None:
        model: MultimodalModel = parts.model  # type: ignore[assignment]  # a model with modalities is one
        self.reader = PromptReader(model, parts.planned.facts, parts.planned.loaded.config.multimodal)
        self._rows = parts.rows
        first = next(modality for modality in parts.planned.facts.modalities if modality.raw)
        self._example = model.example(first.name).inputs

    def validate(self, request: Request) -> None:
        """Refuse a request that is not one item.

        Raises:
            RequestError: with the counts.
        """
        items, tokens = len(features_of(request)), len(request.known_prompt)
        if (items, tokens) != (1, 1):
            names = ", ".join(sorted(self.reader.placeholders))
            raise RequestError(
                f"the prompt has {items} items and {tokens} tokens, and this model reads one item alone",
                fix=f"give multi_modal_data with exactly one {names}, and no text",
            )

    def needs_eager(self, scheduled: SchedulerOutput) -> bool:
        """Return True: no graph holds the inputs of items."""
        return True

    def forward_kwargs(self, inputs: ModelInputs) -> Mapping[str, Sequence[Mapping[str, torch.Tensor]]]:
        """Return the inputs of the item that each token of a step stands for."""
        if inputs.made_up:
            return {"raw_inputs": (self._example,) * inputs.num_padded_tokens}
        return {"raw_inputs": tuple(features_of(self._rows.request(row))[0].inputs for row in inputs.rows.tolist())}

    def capture_kwargs(self, *_: object) -> Mapping[str, torch.Tensor]:
        """Return nothing: all steps with items run eagerly."""
        return {}
