"""Steps in which tokens of an image see later ones, for backends whose kernels are causal. Imports torch when built."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from slotline.registry.capability import Flag, Limit
from slotline.registry.contracts.attention import AttentionBackend, AttentionBatch, AttentionContext, AttentionLayer

if TYPE_CHECKING:
    import torch

    from slotline.registry.contracts.attention import KVCache

KEYS_AHEAD = Flag(True, "steps with such images are computed as `torch` does")
TREES = Limit(
    when="keys_ahead", capability="tree_mask", offer=Flag(False), note="a step has masks of trees or of images"
)
LIMITS: tuple[Limit, ...] = (
    TREES,
    Limit(
        when="keys_ahead",
        capability="batch_invariant",
        offer=Flag(False),
        note="a step with an image is computed in another way than one without",
    ),
)


class _Planned(NamedTuple):
    """Plan of a step and the backend that made it."""

    backend: Any
    plan: Any

    @property
    def takes_edges(self) -> bool:
        """See `slotline.registry.contracts.attention.AttentionBackend.plan`."""
        return bool(getattr(self.plan, "takes_edges", True))


class ThroughTorch:
    """Backend that has the `torch` backend compute the steps with keys ahead, over the same cache.

    Args:
        own: computes all other steps. It stores keys in `write` as `torch` does.
        context: of both.
    """

    def __init__(self, own: AttentionBackend, context: AttentionContext) -> None:
        from slotline.backends.torch_sdpa.backend import TorchBackend

        self._own, self._torch = own, TorchBackend(context)
        if hasattr(own, "use_cascade"):
            self.use_cascade = own.use_cascade

    def plan(self, batch: AttentionBatch) -> _Planned:
        backend = self._own if batch.keys_ahead is None else self._torch
        return _Planned(backend, backend.plan(batch))

    def write(
        self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: _Planned
    ) -> None:
        plan.backend.write(layer, key, value, cache, plan.plan)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: _Planned,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        **edges: Any,
    ) -> torch.Tensor | None:
        lse: torch.Tensor | None = plan.backend.forward(layer, query, key, value, cache, plan.plan, out, sinks, **edges)
        return lse


def through_torch(factory: Callable[[AttentionContext], Any]) -> Callable[[AttentionContext], Any]:
    """Return a factory whose backends also serve layers with keys ahead."""

    def build(context: AttentionContext) -> Any:
        own = factory(context)
        return ThroughTorch(own, context) if context.layers[0].keys_ahead else own

    return build
