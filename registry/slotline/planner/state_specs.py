"""State memory of a plan: slots and checkpoints as the state cache specs define them. Nothing is allocated here."""

from __future__ import annotations

from math import lcm

import torch
from attrs import evolve, frozen

from slotline.planner.offers import Offers
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import StateLayer, StateSpec, StateSpecContext, StateTensorSpec
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import ContractError
from slotline.registry.negotiation import Plan, StateCachePlan
from slotline.registry.negotiation.state_memory import StateMemory


@frozen(eq=False)
class HeldStates:
    """A built cache spec of states and the layers that it holds."""

    name: str
    spec: StateSpec
    layers: tuple[StateLayer, ...]


class StateSpecBuilder:
    """Builder of the cache specs of a plan's states."""

    def __init__(self, loaded: LoadedConfig, registry: PluginRegistry, offers: Offers, max_model_len: int) -> None:
        self._loaded = loaded
        self._registry = registry
        self._offers = offers
        self._max_model_len = max_model_len

    def build(self, plan: Plan) -> list[HeldStates]:
        """Build the spec of each state cache of a plan.

        Raises:
            ContractError: if a spec gives impossible figures.
        """
        return [self._build(cache, prefix_unit(plan)) for cache in plan.state_caches]

    def _build(self, cache: StateCachePlan, unit: int) -> HeldStates:
        descriptor = self._offers[Kind.KV_SPEC, cache.kv_spec]
        context = StateSpecContext(
            contract=cache.contract,
            layers=cache.layers,
            prefix_unit=unit,
            max_model_len=self._max_model_len,
            options=self._registry.options(self._loaded, descriptor),
        )
        spec: StateSpec = self._registry.build(descriptor, context)
        _refuse_unfit(spec, cache, unit)
        return HeldStates(cache.kv_spec, spec, cache.layers)


def prefix_unit(plan: Plan) -> int:
    """Return the tokens of a prefix unit. Shared prefixes are multiples of it."""
    return lcm(*(group.block_size for group in plan.cache_groups)) if plan.cache_groups else plan.block_size


def with_state_memory(plan: Plan, held: list[HeldStates], num_rows: int, checkpoints: int | str) -> Plan:
    """Return the plan with the memory of its states, if the model keeps any.

    Args:
        held: the specs of the plan's state caches.
        num_rows: rows of the scheduler.
        checkpoints: the value of `state.checkpoints`.
    """
    if not held:
        return plan
    of_layers = [(states.spec, layer) for states in held for layer in states.layers]
    memory = StateMemory(
        slot_bytes=sum(spec.page_bytes(layer) for spec, layer in of_layers),
        used_bytes=sum(num_bytes(layer) for _, layer in of_layers),
        num_layers=len(of_layers),
        num_rows=num_rows,
        alignment=max(states.spec.alignment for states in held),
        checkpoints=checkpoints if plan.prefix_caching else 0,
        unit=prefix_unit(plan),
        interval=lcm(*(states.spec.interval for states in held)),
        rollback_bytes=num_rows
        * sum(num_bytes(layer) for group in plan.state_groups if group.rollback_copy for layer in group.layers),
    )
    return evolve(plan, states=memory)


def num_bytes(layer: StateLayer) -> int:
    """Return the bytes of one state of a layer, without padding."""
    return sum(_num_bytes(tensor) for tensor in layer.tensors)


def _num_bytes(tensor: StateTensorSpec) -> int:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return tensor.num_elements * dtype.itemsize


def _refuse_unfit(spec: StateSpec, cache: StateCachePlan, unit: int) -> None:
    """Refuse a spec whose figures are impossible.

    Raises:
        ContractError: naming the figure.
    """
    if not isinstance(spec.interval, int) or spec.interval < 1 or spec.interval % unit:
        raise _unfit(cache, f"says that its interval is {spec.interval!r}, which is no multiple of {unit} tokens")
    for layer in cache.layers:
        size = spec.page_bytes(layer)
        if not isinstance(size, int) or size < num_bytes(layer):
            raise _unfit(
                cache,
                f"says that a slot of layer {layer.name!r} has {size!r} bytes, and its state takes {num_bytes(layer)}",
            )


def _unfit(cache: StateCachePlan, text: str) -> ContractError:
    return ContractError(
        f"kv_spec {cache.kv_spec!r} {text}",
        fix=f"tell the author of the plugin, or name another kv_spec in cache.kv_spec.{cache.kinds[0]}",
    )
