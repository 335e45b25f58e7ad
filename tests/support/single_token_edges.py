"""The `torch` attention backend, which leaves the edges of all steps with more than single tokens to the model."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen

from slotline.backends.torch_sdpa import descriptor as torch_descriptor
from slotline.backends.torch_sdpa.backend import TorchBackend
from slotline.registry.contracts.attention import AttentionBatch, AttentionContext


@frozen
class Planned:
    """A plan of `torch`, and whether it takes the edges of its step."""

    plan: Any
    takes_edges: bool


class SingleTokenEdges:
    """`torch` behind plans that decline."""

    def __init__(self, context: AttentionContext) -> None:
        self._torch = TorchBackend(context)

    def plan(self, batch: AttentionBatch) -> Planned:
        return Planned(self._torch.plan(batch), batch.max_query_len == 1)

    def write(self, layer: Any, key: Any, value: Any, cache: Any, plan: Planned, **inputs: Any) -> None:
        self._torch.write(layer, key, value, cache, plan.plan, **inputs)

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, cache: Any, plan: Planned, out: Any, sinks: Any = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        assert plan.takes_edges or "edges" not in more, "the plan left them to the model"
        return self._torch.forward(layer, query, key, value, cache, plan.plan, out, sinks, **more)


descriptor = evolve(torch_descriptor, name="single_token_edges", factory=SingleTokenEdges)
