"""Attention as the model sees it: one callable that routes each layer to its group's backend and cache."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import torch
from attrs import define, evolve

from slotline.core.batch.attend import Attend
from slotline.core.batch.fast_prefill_batch import FastPrefillBatch
from slotline.kernels.attention_edges import new_output
from slotline.kernels.device_scope import device_scope
from slotline.registry.contracts import AttentionBackend, AttentionBatch, AttentionLayer, CacheSlots
from slotline.registry.errors import ModelError


@define(kw_only=True, eq=False)
class AttentionGroup:
    """Layers with equal needs on one device, and the backend that was built for them.

    Attributes:
        name: as in the plan.
        plugin: the backend's name and package.
        backend: the built object.
        writes_cache: whether `forward` stores the new keys and values itself.
        batch: index of its batch among a step's batches. The batch holds the tables of its cache group on its device.
        layers: in call order.
        device: torch device string.
        cascade: whether it serves common prefixes apart. `cascade_captured` says whether that can be inside a graph,
            `cascade_prefixes` which prefixes, see `AttentionCapabilities`.
        plain_writes: whether the model may store new keys and values in the backend's place.
        fast_prefill: whether its layers get only a step's wanted tokens, if the step names them.
        last_queries: whether a layer may get only the queries of the wanted tokens, with all keys and values.
        any_captured: whether the attention of any step may be inside a graph, independent of the plan.
        plan_once: whether the plan made at a capture serves every replay, common prefixes aside.
        edges: computations at the edges of attention that the backend takes over.
    """

    name: str
    backend: AttentionBackend
    writes_cache: bool
    batch: int
    layers: tuple[AttentionLayer, ...]
    device: str = "cpu"
    cascade: bool = False
    cascade_captured: bool = False
    cascade_prefixes: str = "one"
    plain_writes: bool = False
    fast_prefill: bool = False
    last_queries: bool = False
    any_captured: bool = False
    plan_once: bool = False
    edges: tuple[str, ...] = ()
    plugin: str = ""


class StepPlans(NamedTuple):
    """Plans of the groups for a step's batches, and the wanted tokens of the step.

    A plan is None if it was not wanted. Some layers may attend for only the `wanted` tokens.
    """

    plans: list[Any]
    batches: Sequence[AttentionBatch]
    wanted: FastPrefillBatch | None = None


@define(eq=False)
class DispatchedAttention:
    """Attention callable that a model gets as `attend`.

    It implements `slotline.registry.contracts.model_family.StoringAttend`.
    """

    router: AttentionDispatcher

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
        **more: Any,  # `inputs` for layers that have some, and `edges`
    ) -> torch.Tensor:
        """Compute the attention of one layer under the step's plans: [num_tokens, num_heads, head_size_v]."""
        router = self.router
        if wanted:
            return router.attend_wanted(layer, query, key, value, sinks, written)
        out = new_output(layer, query, **more)
        write, forward, cache, position = router.routes[layer.index]  # as `serve`, without a call for each layer
        plan = router.step.plans[position]
        if write is not None and not written:
            write(layer, key, value, cache, plan, **more)
        forward(layer, query, key, value, cache, plan, out, sinks, **more)
        return out

    def takes_wanted(self, layer: AttentionLayer) -> bool:
        """See `slotline.registry.contracts.model_family.StoringAttend.takes_wanted`."""
        return self.router.takes_wanted(layer)

    def edges(self) -> dict[int, tuple[str, ...]]:
        """See `slotline.registry.contracts.model_family.StoringAttend.edges`."""
        plans, routes = self.router.step.plans, self.router.routes
        taken = self.router.edges.items()
        return {index: names for index, names in taken if getattr(plans[routes[index][3]], "takes_edges", True)}

    def slots(self, layer: AttentionLayer, key: torch.Tensor) -> CacheSlots | None:
        """See `slotline.registry.contracts.model_family.StoringAttend.slots`."""
        return self.router.slots(layer, key)


class AttentionDispatcher:
    """Plans each group once per step and then serves the layers' calls.

    Attributes:
        fast_prefill: whether any group's layers get only a step's wanted tokens.
        routes: by layer index, its `write`, its `forward`, its cache and the place of its group. `write` is None if
            `forward` stores keys.
        step: plans in force.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        caches: dict[int, Any],
        is_capturing: Callable[[], bool] | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.fast_prefill = any(group.fast_prefill for group in groups)
        self.edges = {layer.index: group.edges for group in groups for layer in group.layers if group.edges}
        self.step = StepPlans([], ())
        self._one_device = len({group.device for group in groups}) < 2
        self.routes = {
            layer.index: (self._write(group, layer), group.backend.forward, caches[layer.index], position)
            for position, group in enumerate(groups)
            for layer in group.layers
        }
        self._is_capturing = is_capturing

    def part(self, layers: Sequence[AttentionLayer]) -> tuple[AttentionDispatcher, list[int]]:
        """Build a dispatcher of some layers over the same caches, with the indices of its batches in a step."""
        groups = [group for group in self.groups if set(group.layers) & set(layers)]
        read = sorted({group.batch for group in groups})
        groups = [
            evolve(g, layers=tuple(layer for layer in g.layers if layer in layers), batch=read.index(g.batch))
            for g in groups
        ]
        caches = {layer.index: self.routes[layer.index][2] for layer in layers}
        return self._over(groups, caches), read

    def _over(self, groups: Sequence[AttentionGroup], caches: dict[int, Any]) -> AttentionDispatcher:
        """Build a dispatcher like this one over other groups."""
        return AttentionDispatcher(groups, caches, self._is_capturing)

    def caches(self) -> list[Any]:
        """Return the caches of all layers, in the layers' order."""
        return [route[2] for _, route in sorted(self.routes.items())]

    def plan(
        self,
        batches: Sequence[AttentionBatch],
        wanted: FastPrefillBatch | None = None,
        precomputed: Container[str] = (),
    ) -> Attend:
        """Plan every group for this step on the host. Return the callable that the model's layers call.

        Args:
            batches: of the step, as the groups count them.
            wanted: the tokens whose logits are wanted, if the model may leave out the others in its last layers.
            precomputed: groups by name that the callable will not be called for.

        Raises:
            ModelError: if a graph is being captured: host work would be missing from each of its replays.
        """
        return self.bind_plans(self.plans(batches, wanted, precomputed))

    def plans(
        self,
        batches: Sequence[AttentionBatch],
        wanted: FastPrefillBatch | None = None,
        precomputed: Container[str] = (),
    ) -> StepPlans:
        """As `plan`, for `bind_plans` to use later."""
        if self._is_capturing is not None and self._is_capturing():
            raise ModelError(
                "a step was called while a graph is captured",
                fix="capture nothing around the engine: it captures its own graphs when it is built",
            )
        if wanted is not None and self.fast_prefill:
            plans = [self._plan_some(group, batches, wanted) for group in self.groups]
        else:
            plan = _plan_here if self._one_device else self._plan  # one device: the step's own
            plans = [
                None if group.name in precomputed else plan(group, _seen_by(group, batches[group.batch]))
                for group in self.groups
            ]
        return StepPlans(plans, batches, wanted)

    def bind_plans(self, plans: StepPlans) -> Attend:
        """Return attention under plans that were made before. Only the plans of the last call are in force."""
        self.step = plans
        return DispatchedAttention(self)

    def slots(self, layer: AttentionLayer, key: torch.Tensor) -> CacheSlots | None:
        """Return the slots for new keys like `key` and the values of a layer, if the model may store them itself."""
        write, _, cache, position = self.routes[layer.index]
        if write is None or not self.groups[position].plain_writes or cache.key.dtype != key.dtype:
            return None
        return CacheSlots(cache, self.step.batches[self.groups[position].batch].slot_mapping)

    def takes_wanted(self, layer: AttentionLayer) -> bool:
        """See `slotline.registry.contracts.model_family.StoringAttend.takes_wanted`."""
        return self.step.wanted is not None and self.groups[self.routes[layer.index][3]].last_queries

    def attend_wanted(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        written: bool = False,
    ) -> torch.Tensor:
        """Compute the attention of the wanted tokens [n, num_heads, head_size_v] for a layer that `takes_wanted`.

        All keys and values are stored first. For the backend it is then a step of only the wanted tokens, with the
        other tokens in the cache.
        """
        write, _, cache, position = self.routes[layer.index]
        step = self.step
        assert step.wanted is not None
        if write is not None and not written:
            write(layer, key, value, cache, step.plans[position])
        out = query.new_empty((query.shape[0], layer.num_heads, layer.head_size_v))
        if step.wanted.num_tokens:
            batch = step.wanted.batch(step.batches[self.groups[position].batch])
            inputs = query, key[step.wanted.index], value[step.wanted.index]
            self.serve_batch(layer, inputs, sinks, out, batch)
        return out

    def serve_batch(
        self,
        layer: AttentionLayer,
        inputs: tuple[torch.Tensor, ...],
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        batch: AttentionBatch,
    ) -> object:
        """Plan a batch for one layer and attend: into `out`. The inputs are its query, key and value."""
        _, forward, cache, position = self.routes[layer.index]
        query, key, value = inputs
        return forward(layer, query, key, value, cache, self._plan(self.groups[position], batch), out, sinks)

    def serve(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        written: bool = False,
        **more: Any,
    ) -> object:
        """Store a layer's new keys and values, unless they are `written`, and attend: into `out`."""
        write, forward, cache, position = self.routes[layer.index]
        plan = self.step.plans[position]
        if write is not None and not written:
            write(layer, key, value, cache, plan, **more)
        return forward(layer, query, key, value, cache, plan, out, sinks, **more)

    def _plan_some(self, group: AttentionGroup, batches: Sequence[AttentionBatch], wanted: FastPrefillBatch) -> Any:
        """Plan a group in a step with fast prefill. Return None if none of its tokens is wanted."""
        if not group.fast_prefill:
            return self._plan(group, _seen_by(group, batches[group.batch]))
        return self._plan(group, wanted.batch(batches[group.batch])) if wanted.num_tokens else None

    @staticmethod
    def _plan(group: AttentionGroup, batch: AttentionBatch) -> Any:
        with device_scope(group.device):
            return _plan_here(group, batch)

    @staticmethod
    def _write(group: AttentionGroup, layer: AttentionLayer) -> Callable[..., None] | None:
        """Return the backend's `write`, or None if `forward` writes or the layer reads another layer's cache."""
        return None if group.writes_cache or layer.shares_kv_with is not None else group.backend.write


def _plan_here(group: AttentionGroup, batch: AttentionBatch) -> Any:
    """Plan a group on the current device."""
    return group.backend.plan(batch)


def _seen_by(group: AttentionGroup, batch: AttentionBatch) -> AttentionBatch:
    """Return the batch as the group sees it, without its common prefix if the group serves none.

    This is so for layers with a window over the same cache.
    """
    if group.cascade or not (batch.common_prefix_len or batch.prefix_groups):
        return batch
    return evolve(batch, common_prefix_len=0, common_prefix=None, prefix_groups=None)
