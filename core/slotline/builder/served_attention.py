"""Attention served otherwise than in a plain step: with its outputs checked, or for a capture."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from attrs import define

from slotline.core.batch.fast_prefill_batch import FastPrefillBatch
from slotline.core.model_runner.attention_dispatcher import (
    AttentionDispatcher,
    AttentionGroup,
    DispatchedAttention,
    StepPlans,
)
from slotline.kernels.attention_edges import new_output
from slotline.kernels.graph_capture_state import is_captured
from slotline.registry.contracts import AttentionBatch, AttentionLayer, CacheSlots
from slotline.registry.output_checks import OutputChecks, ShownBatch


@define(eq=False)
class ServedAttention(DispatchedAttention):
    """Attention callable with a function of its own, which checks outputs or breaks a capture.

    Attributes:
        serve: computes a layer's output.
        broken: indices of layers that end a capture.
    """

    serve: Callable[..., torch.Tensor]
    broken: Container[int] = ()

    def __call__(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        *,
        written: bool = False,
        wanted: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        """Compute the attention of one layer under the step's plans: [num_tokens, num_heads, head_size_v]."""
        if wanted:
            return self.router.attend_wanted(layer, query, key, value, sinks, written)
        return self.serve(layer, query, key, value, sinks, written, **more)

    def slots(self, layer: AttentionLayer, key: torch.Tensor) -> CacheSlots | None:
        """See `slotline.registry.contracts.model_family.StoringAttend.slots`.

        Return None if a graph is broken at the layer, since the inputs of its attention may move in each replay.
        """
        return None if layer.index in self.broken else self.router.slots(layer, key)

    def edges(self) -> dict[int, tuple[str, ...]]:
        """See `slotline.registry.contracts.model_family.StoringAttend.edges`. Layers of broken graphs are left out."""
        return {index: names for index, names in super().edges().items() if index not in self.broken}


class CheckedDispatcher(AttentionDispatcher):
    """Dispatcher that checks what backends write in eager steps.

    Attributes:
        checks: of the outputs of backends.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        caches: dict[int, Any],
        checks: OutputChecks,
        is_capturing: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(groups, caches, is_capturing)
        self.checks = checks

    def plans(
        self,
        batches: Sequence[AttentionBatch],
        wanted: FastPrefillBatch | None = None,
        precomputed: Container[str] = (),
    ) -> StepPlans:
        """As `AttentionDispatcher.plans`, and check that no backend changed its batch."""
        shown = [ShownBatch.of(batch) for batch in batches]
        plans = super().plans(batches, wanted, precomputed)
        for group in self.groups:
            shown[group.batch].check(group.plugin, "plan")
        return plans

    def bind_plans(self, plans: StepPlans) -> ServedAttention:
        """Return checked attention under plans that were made before."""
        self.step = plans
        return ServedAttention(self, self._attend)

    def serve_batch(
        self,
        layer: AttentionLayer,
        inputs: tuple[torch.Tensor, ...],
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        batch: AttentionBatch,
    ) -> object:
        """As `AttentionDispatcher.serve_batch`, and check the backend's output."""
        if is_captured():
            return super().serve_batch(layer, inputs, sinks, out, batch)
        returned = super().serve_batch(layer, inputs, sinks, out.fill_(torch.nan), batch)
        self.checks.attention(self._group(layer).plugin, layer, inputs, batch, out, returned)
        return returned

    def _attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        written: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        """Compute the attention of one layer, and check the backend's output and batch.

        The output is filled with NaN before, to find elements that the backend does not write.
        """
        if is_captured():
            return DispatchedAttention(self)(layer, query, key, value, sinks, written=written, **more)
        group = self._group(layer)
        batch = self.step.batches[group.batch]
        if self.step.wanted is not None and group.fast_prefill:
            batch = self.step.wanted.batch(batch)
        out = new_output(layer, query, **more)
        if out.is_floating_point():
            out.fill_(torch.nan)
        shown = ShownBatch.of(batch)
        returned = self.serve(layer, query, key, value, sinks, out, written, **more)
        shown.check(group.plugin, "forward")
        self.checks.attention(group.plugin, layer, (query, key, value), batch, out, returned)
        return out

    def _group(self, layer: AttentionLayer) -> AttentionGroup:
        return self.groups[self.routes[layer.index][3]]

    def _over(self, groups: Sequence[AttentionGroup], caches: dict[int, Any]) -> AttentionDispatcher:
        return CheckedDispatcher(groups, caches, self.checks, self._is_capturing)
