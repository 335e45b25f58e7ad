"""Extensions of models that read more of a step than tokens, places and embeddings in the place of tokens.

One has rotary embeddings that read positions on several axes (M-RoPE).

Attention and cache go on reading one position for each token, its place in the sequence. Here are only the differences
between the two, by axis and token. After the prompt the difference is one number for each request, whatever is drafted,
rejected, repeated or computed again. So the device advances and corrects only the places, and the model adds both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.builder.parts import Parts
from slotline.core.batch.input_batch_cpu import InputBatchCPU
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.device.transfer_buffer import reserved_bytes
from slotline.plugins.multimodal.embeds import StepEmbeds
from slotline.plugins.multimodal.extension import NAME, MultimodalExtension
from slotline.plugins.multimodal.features import Int, features_of
from slotline.registry.errors import ModelError

KEY = "axis_offsets"
"""Of `Request.inputs`, where the offsets of a prompt with items are kept."""


@frozen(eq=False)
class PromptOffsets:
    """Differences between the rotary positions of a request's tokens and their places.

    Attributes:
        prompt: [position_axes, n] int64, of the prompt's tokens.
        after: of each token after the prompt.
    """

    prompt: Int
    after: int


class LayersExtension(MultimodalExtension):
    """Items of a model that adds some of their embeddings behind its first layers."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._layers = parts.planned.facts.layer_embeds

    def forward_kwargs(self, inputs: ModelInputs) -> Mapping[str, Any]:
        """Return what the first layers add in a step with items."""
        found: StepEmbeds | None = inputs.extras.get(NAME)
        if found is None or found.embeds is None or not self._layers:
            return {}
        return {"layer_embeds": found.embeds.by_layer(self._layers)}

    def capture_kwargs(self, inputs: ModelInputs, broken: frozenset[str], cut: Any) -> Mapping[str, Any]:
        """Return nothing that depends on items: steps with any run eagerly."""
        return {}


class AxesExtension(LayersExtension):
    """Items of a model with several position axes, and the offsets of each step's tokens."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._rows, self._axes = parts.rows, parts.planned.facts.position_axes
        self._after = np.zeros(parts.rows.max_requests, np.int64)
        self._prompt_ends = np.zeros(parts.rows.max_requests, np.int64)  # 0 for prompts without items
        self._sent = torch.zeros((self._axes, 0), dtype=torch.int64)

    def enter(self, request: Request) -> None:
        """Find the offsets of a prompt with items.

        Raises:
            RequestError: if the model finds no positions for it.
        """
        features = features_of(request)
        if not features:
            return
        items = [(feature.modality, feature.inputs) for feature in features]
        positions, after = self.encoder.model.axis_positions(request.prompt_token_ids, items)
        places = np.arange(len(request.prompt_token_ids))
        if positions.shape != (self._axes, len(places)):
            raise ModelError(
                f"the model gave positions {list(positions.shape)}, not {[self._axes, len(places)]}",
                fix="tell the author of the model family",
            )
        request.inputs[KEY] = PromptOffsets(positions - places, after)

    def begin_request(self, request: Request, computed: int) -> None:
        """Note what each step reads of a request."""
        offsets: PromptOffsets | None = request.inputs.get(KEY)
        self._after[request.row] = 0 if offsets is None else offsets.after
        self._prompt_ends[request.row] = 0 if offsets is None else offsets.prompt.shape[1]

    def staging_bytes(self, max_tokens: int) -> int:
        """Return the bytes of the offsets, and make room for them where graphs find them."""
        device = self.encoder.device
        self._sent = torch.zeros((self._axes, max(max_tokens, self._sent.shape[1])), dtype=torch.int64, device=device)
        return reserved_bytes((self._axes, max_tokens), np.int64)

    def gather(self, batch: InputBatchCPU, upload: Callable[[npt.NDArray[Any]], torch.Tensor]) -> StepEmbeds:
        """Upload the offsets of a step, zeros for made-up tokens and padding."""
        offsets = np.zeros((self._axes, len(batch.input_ids)), np.int64)
        if not batch.made_up:
            offsets[:, : batch.num_tokens] = self._after[batch.token_rows]
            begins = batch.seq_lens[: len(batch.rows)] - batch.counts
            for i in np.flatnonzero(begins < self._prompt_ends[batch.rows]).tolist():
                prompt = self._rows.request(int(batch.rows[i])).inputs[KEY].prompt
                part = prompt[:, int(begins[i]) : int(begins[i] + batch.counts[i])]
                start = int(batch.starts[i])
                offsets[:, start : start + part.shape[1]] = part
        return StepEmbeds(None, None, lambda: None, upload(offsets))

    def prepare_inputs(self, inputs: ModelInputs) -> ModelInputs:
        """Put a step's offsets where graphs read them."""
        found: StepEmbeds = inputs.extras[NAME]
        if found.offsets is not None:
            self._of(inputs).copy_(found.offsets)
        return super().prepare_inputs(inputs)

    def forward_kwargs(self, inputs: ModelInputs) -> Mapping[str, Any]:
        """Return the offsets of a step, and what the first layers add."""
        return {"position_offsets": self._of(inputs), **super().forward_kwargs(inputs)}

    def capture_kwargs(self, inputs: ModelInputs, broken: frozenset[str], cut: Any) -> Mapping[str, Any]:
        """Return the offsets, whose address never changes."""
        return {"position_offsets": self._of(inputs)}

    def _of(self, inputs: ModelInputs) -> torch.Tensor:
        return self._sent[:, : inputs.num_padded_tokens]
