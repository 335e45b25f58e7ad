"""A convolution over a series, the mean over time, and a projection to classes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from safetensors.torch import load_file

from slotline.registry.contracts import Modality, ModelContext, ModelFacts, PoolingParams, ProcessedItem
from slotline.registry.errors import RequestError

LONGEST = 512
PLACE = 0
"""The token that stands for a series."""


class SeriesPooler:
    """Implements `Pooler`."""

    method = "last"

    def __init__(self, head: torch.Tensor) -> None:
        self.head = head

    def adjust(self, params: PoolingParams) -> PoolingParams:
        return evolve(params, use_activation=params.use_activation is not False)

    def pool(self, states: torch.Tensor, params: Sequence[PoolingParams]) -> torch.Tensor:
        scores = states @ self.head
        softened = torch.tensor([bool(one.use_activation) for one in params], device=scores.device)
        return torch.where(softened[:, None], scores.softmax(-1), scores)


class SeriesModel:
    """Implements `MultimodalModel`, without what a model of raw inputs is never asked for."""

    notes: tuple[str, ...] = ()

    def __init__(self, context: ModelContext) -> None:
        self.facts, self._device = context.facts, torch.device(context.device)
        self._weights = self._read(context.facts.path)
        self.pooler = SeriesPooler(self._weights["head"])

    def process(self, modality: str, item: Any) -> ProcessedItem:
        try:
            series = torch.as_tensor(item, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestError(f"series={item!r:.60} is no list of numbers: {error}", fix="give numbers") from error
        if series.ndim != 1 or not 0 < len(series) <= LONGEST or not series.isfinite().all():
            raise RequestError(
                f"series has the shape {list(series.shape)}, or values that are not finite",
                fix=f"give 1 to {LONGEST} finite numbers",
            )
        return ProcessedItem(modality=modality, token_ids=[PLACE], inputs={"values": series})

    def example(self, modality: str) -> ProcessedItem:
        return self.process(modality, torch.zeros(LONGEST))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Any,
        wanted: torch.Tensor | None = None,
        *,
        raw_inputs: Sequence[Mapping[str, torch.Tensor]] = (),
    ) -> torch.Tensor:
        series = [item["values"].to(self._device) for item in raw_inputs]
        padded = torch.nn.utils.rnn.pad_sequence(series, batch_first=True)[:, None]  # [n, 1, time]
        lengths = torch.tensor([len(one) for one in series], device=self._device)
        known = torch.arange(padded.shape[-1], device=self._device) < lengths[:, None]
        seen = torch.nn.functional.conv1d(padded, self._weights["filters"], padding="same").relu()  # [n, hidden, time]
        hidden = (seen * known[:, None]).sum(-1) / lengths[:, None]
        return hidden if wanted is None else hidden[wanted]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def reload_weights(self, path: Path | None = None) -> None:
        for name, value in self._read(path or self.facts.path).items():
            self._weights[name].copy_(value)

    def _read(self, path: Path) -> dict[str, torch.Tensor]:
        return load_file(path / "model.safetensors", device=str(self._device))


class SeriesFamily:
    """Implements `ModelFamily`."""

    def __init__(self, context: object = None) -> None:
        """Nothing to prepare."""

    def inspect(self, path: Path) -> ModelFacts:
        config = json.loads((path / "config.json").read_text())
        return ModelFacts(
            architecture="AcmeSeriesClassifier",
            path=path,
            vocab_size=1,
            hidden_size=config["hidden_size"],
            max_model_len=2,
            dtype="float32",
            layers=(),
            num_parameters=config["hidden_size"] * (config["width"] + len(config["id2label"])),
            tasks=("classify",),
            modalities=(Modality(name="series", placeholder_token_id=PLACE, raw=True),),
        )

    def capture_refusal(self, facts: ModelFacts, device: str, dtype: str) -> str | None:
        return "its inputs have lengths of their own"

    def load(self, context: ModelContext) -> SeriesModel:
        return SeriesModel(context)
