"""Extension of a plan whose cache has scales: their table, and the step that they are calculated from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import define

from slotline.builder.parts import Parts
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.model_runner.attention_dispatcher import DispatchedAttention
from slotline.core.model_runner.model_runner import ComputedPass, ForwardPass, ModelRunner
from slotline.plugins.kv_scales.table import KVScaleTable
from slotline.registry.contracts import AttentionLayer, CacheSlots, ExtensionContext, KVScales


class KVScaling:
    """Scales of all layers that own a cache.

    Attributes:
        pending: whether the scales are to be calculated from the keys and values of the first step of requests.
    """

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        planned = parts.planned
        self.pending = any(group.kv_scales == "calculate" for group in planned.plan.groups)
        self._table = KVScaleTable(
            planned.layers,
            planned.facts.kv_scales,
            device_of=planned.stages.device_of,
            dtype=getattr(torch, planned.plan.kv_dtype),
            calculate=self.pending,
        )

    @property
    def by_layer(self) -> Mapping[int, KVScales]:
        """Return the scales that backends get, by layer index."""
        return self._table.by_layer

    def needs_eager(self, scheduled: SchedulerOutput) -> bool:
        """Return True while the scales are to be calculated."""
        return self.pending

    def wrap_forward(self, runner: ModelRunner, forward: ForwardPass) -> ForwardPass:
        """Return a forward pass whose first step of requests gives the scales. That step is not cut."""
        if not self.pending:
            return forward

        def compute(inputs: ModelInputs, *, whole: bool) -> ComputedPass:
            if not self.pending or inputs.made_up:
                return forward(inputs, whole=whole)
            with runner.profiler.scope("plan"):
                attend = runner.plan(inputs)
            assert isinstance(attend, DispatchedAttention)
            with runner.profiler.scope("forward"):
                found = runner.forward_or_replay(inputs, CalculatingAttention(attend, self._table), whole=whole)
            self.pending = False
            return ComputedPass(attend, *found)

        return compute


@define(eq=False)
class CalculatingAttention:
    """Attention callable that sets the scales of each layer before the layer's keys and values are stored."""

    _attend: DispatchedAttention
    _table: KVScaleTable

    def __call__(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        *,
        wanted: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        """Compute the attention of one layer: [num_tokens, num_heads, head_size_v]."""
        self._table.calculate(layer, key, value)
        return self._attend(layer, query, key, value, sinks, wanted=wanted, **more)

    def takes_wanted(self, layer: AttentionLayer) -> bool:
        """See `slotline.registry.contracts.model_family.StoringAttend.takes_wanted`."""
        return self._attend.takes_wanted(layer)

    def slots(self, layer: AttentionLayer, key: torch.Tensor) -> CacheSlots | None:
        """Return None: the model stores no keys itself, since they have to be scaled."""
        return None
