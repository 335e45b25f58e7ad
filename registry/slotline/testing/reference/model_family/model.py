"""Loaded model of the reference family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from slotline.registry.contracts.model_family import ModelContext, ProcessedItem
from slotline.registry.contracts.pooling import PoolingParams
from slotline.registry.errors import RequestError
from slotline.testing.reference.model_family.family import SOUND, read_config, read_weights

LONGEST_SOUND = 12


class UnitPooler:
    """Gives the last token's state at length 1."""

    method = "last"

    def adjust(self, params: PoolingParams) -> PoolingParams:
        """See `slotline.registry.contracts.pooling.Pooler.adjust`."""
        return params

    def pool(self, states: Tensor, params: Sequence[PoolingParams]) -> Tensor:
        """See `slotline.registry.contracts.pooling.Pooler.pool`."""
        return torch.nn.functional.normalize(states.float(), dim=-1)


class ReferenceModel:
    """Implements `slotline.registry.contracts.MultimodalModel`."""

    notes: tuple[str, ...] = ()

    def __init__(self, context: ModelContext) -> None:
        self.facts, self.context = context.facts, context
        self.config = read_config(context.facts.path)
        self.pooler = None if context.task == "generate" else UnitPooler()
        read = read_weights(context.facts.path, self.config, context.dtype)
        self.weights = {name: tensor.to(context.device) for name, tensor in read.items()}
        half = torch.arange(self.config.head_size // 2, device=context.device, dtype=torch.float32)
        self.speeds = 100.0 ** (-half / half.numel())

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Any,
        wanted: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        tap: Any = None,
        fast_prefill: bool = False,
    ) -> Tensor:
        """See `slotline.registry.contracts.model_family.MultimodalModel.forward`."""
        hidden = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        rest = wanted
        for index in range(self.config.num_layers):
            if tap is not None:
                tap(index, hidden)
            if fast_prefill and wanted is not None and index == self.config.owner + 1:
                hidden, positions, rest = hidden[wanted], positions[wanted], None
            if not len(hidden):
                continue
            hidden = self.layer(index, hidden, positions, attend)
        hidden = hidden if rest is None else hidden[rest]
        return self.norm(hidden, "norm")

    def layer(self, index: int, hidden: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """Return the residual stream after a layer."""
        hidden = hidden + self.attention(index, self.norm(hidden, f"layers.{index}.norm"), positions, attend)
        gate, up = linear(self.norm(hidden, f"layers.{index}.norm_mlp"), self.of(index, "up")).chunk(2, -1)
        return hidden + linear(silu(gate) * up, self.of(index, "down"))

    def attention(self, index: int, x: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """Return what a layer's attention adds."""
        layer = self.facts.layers[index]
        query = linear(x, self.of(index, "query"), self.of(index, "query_bias"))
        query = self.rotated(query.view(len(x), -1, self.config.head_size), positions)
        if layer.shares_kv_with is None:
            key = linear(x, self.of(index, "key")).view(len(x), -1, self.config.head_size)
            key = self.rotated(key, positions)
            value = linear(x, self.of(index, "value"), self.of(index, "value_bias"))
            value = value.view(len(x), -1, self.config.head_size)
        else:
            key = value = query.new_zeros(len(x), layer.num_kv_heads, layer.head_size)
        sinks = self.of(index, "sinks") if layer.sinks else None
        out = self.attended(attend, layer, query, key, value, sinks)
        return linear(out.flatten(1), self.of(index, "out"))

    def attended(self, attend: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Any) -> Tensor:
        """Return the attention of a layer, whose keys the model stores itself where it may."""
        slots = attend.slots(layer, key) if hasattr(attend, "slots") else None
        if slots is None:
            out: Tensor = attend(layer, query, key, value, sinks)
            return out
        block, place = slots.slot_mapping // slots.cache.key.shape[1], slots.slot_mapping % slots.cache.key.shape[1]
        kept = slots.slot_mapping >= 0
        slots.cache.key[block[kept], place[kept]] = key[kept]
        slots.cache.value[block[kept], place[kept]] = value[kept]
        written: Tensor = attend(layer, query, key, value, sinks, written=True)
        return written

    def of(self, index: int, name: str) -> Tensor:
        """Return a weight of a layer."""
        return self.weights[f"layers.{index}.{name}"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Return x at unit root mean square, times a weight."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return wide.to(x.dtype) * self.weights[name]

    def rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Return heads [n, heads, size] after rotary embedding by positions."""
        angles = positions[:, None, None].float() * self.speeds
        one, other = heads.float().chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((one * cos - other * sin, other * cos + one * sin), -1).to(heads.dtype)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """See `slotline.registry.contracts.model_family.Model.compute_logits`."""
        return linear(hidden_states, self.weights["embedding" if self.config.tied else "head"]).float()

    def embed(self, input_ids: Tensor) -> Tensor:
        """See `slotline.registry.contracts.model_family.Model.embed`."""
        return self.weights["embedding"][input_ids]

    def reload_weights(self, path: Path | None = None) -> None:
        """See `slotline.registry.contracts.model_family.Model.reload_weights`."""
        path = self.facts.path if path is None else path
        if read_config(path) != self.config:
            from slotline.registry.errors import ModelError

            raise ModelError(f"{str(path)!r} has other sizes than the loaded model", fix="build the engine again")
        new = read_weights(path, self.config, self.context.dtype)
        for name, tensor in self.weights.items():
            tensor.copy_(new[name])
        from attrs import evolve

        self.facts = evolve(self.facts, path=path)

    def process(self, modality: str, item: Any) -> ProcessedItem:
        """See `slotline.registry.contracts.model_family.MultimodalModel.process`."""
        good = isinstance(item, list) and 0 < len(item) <= LONGEST_SOUND and all(type(one) is float for one in item)
        if not good:
            raise RequestError(f"{item!r:.60} is no sound", fix=f"give a list of 1 to {LONGEST_SOUND} numbers")
        return ProcessedItem(
            modality=modality, token_ids=[2, *[SOUND] * len(item), 2], inputs={"s": torch.tensor(item)}
        )

    def example(self, modality: str) -> ProcessedItem:
        """See `slotline.registry.contracts.model_family.MultimodalModel.example`."""
        return self.process(modality, [0.5] * LONGEST_SOUND)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """See `slotline.registry.contracts.model_family.MultimodalModel.encode`."""
        ear = self.weights["ear"]
        return [torch.outer(item["s"].to(ear), ear) for item in items]
