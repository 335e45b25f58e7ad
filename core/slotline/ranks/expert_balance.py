"""Placement of experts by the tokens that they had, between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, field, frozen

from slotline.planner.experts import counts_experts
from slotline.planner.plan import Planned
from slotline.registry.contracts import ExpertPlacement, ExpertPlacementContext
from slotline.registry.contracts.model_family import MixtureModel
from slotline.registry.descriptor import Descriptor
from slotline.registry.errors import PluginError
from slotline.registry.loading import bind_contract, label_of, remedy_for

Array = np.ndarray[Any, Any]
NOT_COUNTED = "the tokens of experts are not counted"
COUNT = "set parallel.expert to the number of ranks, and parallel.expert_loads = true"
GAIN = 0.01
"""Least part of the work of the busiest ranks that must be saved by a move."""


@frozen(kw_only=True)
class BalanceReport:
    """Result of placing experts anew.

    Attributes:
        tokens: tokens that were counted since the last time, times the experts of each, over all mixtures.
        before: tokens of the busiest rank of each mixture, over those of a rank on average. 1 is even.
        after: the same with the new placement.
        moved: number of experts that came to this rank from others.
    """

    tokens: int
    before: float
    after: float
    moved: int


@define(eq=False)
class ExpertBalance:
    """The experts of an engine's mixtures, which all its ranks place anew at the same steps.

    Attributes:
        model: has the mixtures.
        descriptor: of the plugin.
        plugin: says where experts should be.
        ranks: number of ranks.
        every: steps between two placements. 0 waits until it is asked.
        last: report of the last placement.
    """

    model: MixtureModel
    descriptor: Descriptor[Any]
    plugin: ExpertPlacement
    ranks: int
    every: int
    last: BalanceReport | None = None
    _steps: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.model.expert_loads()  # those of the warm-up

    def after_step(self) -> None:
        """Count a step, and place the experts anew if it is time."""
        self._steps += 1
        if self.every and self._steps >= self.every:
            self.rebalance()

    def rebalance(self) -> BalanceReport:
        """Place the experts by the tokens since the last time. They stay if that saves too little.

        Raises:
            PluginError: if the plugin gives no placement.
        """
        self._steps = 0
        loads = [one.cpu().numpy().astype(np.float64) for one in self.model.expert_loads()]
        old = [np.asarray(one) for one in self.model.expert_placements()]
        if not old:  # as in a stage of dense layers
            self.last = BalanceReport(tokens=0, before=1.0, after=1.0, moved=0)
            return self.last
        asked = placements_of(self.descriptor, self.plugin, loads, len(old[0]) - len(loads[0]))
        new = [settled(layer, was, self.ranks) for layer, was in zip(asked, old, strict=True)]
        before, after = (self._unevenness(loads, one) for one in (old, new))
        moved = 0
        if after < before - GAIN:
            moved = self.model.place_experts(new)
        else:
            after = before
        self.last = BalanceReport(tokens=int(sum(map(np.sum, loads))), before=before, after=after, moved=moved)
        return self.last

    def _unevenness(self, loads: Sequence[Array], placements: Sequence[Array]) -> float:
        most = sum(busiest(one, placed, self.ranks) for one, placed in zip(loads, placements, strict=True))
        mean = sum(float(one.sum()) for one in loads) / self.ranks
        return most / mean if mean else 1.0


def build_expert_balance(planned: Planned, model: Any) -> ExpertBalance | None:
    """Return what places an engine's experts. None if the tokens of experts are not counted."""
    descriptor = planned.expert_placement.descriptor
    if descriptor is None or not counts_experts(planned.loaded):
        return None
    parallel = planned.loaded.config.parallel
    plugin = build_placement(planned, descriptor)
    return ExpertBalance(model, descriptor, plugin, parallel.expert, parallel.rebalance_steps)


def build_placement(planned: Planned, descriptor: Descriptor[Any]) -> ExpertPlacement:
    """Build the plugin that places an engine's experts."""
    parallel = planned.loaded.config.parallel
    context = ExpertPlacementContext(
        contract=bind_contract(descriptor),
        ranks=parallel.expert,
        redundant=parallel.redundant_experts,
        options=planned.options(descriptor),
    )
    plugin: ExpertPlacement = planned.registry.build(descriptor, context)
    return plugin


def placements_of(
    descriptor: Descriptor[Any], plugin: ExpertPlacement, loads: Sequence[Array], redundant: int
) -> list[Array]:
    """Return a plugin's placement of each mixture, [slots] int64. Mixtures of one size are asked for together.

    Args:
        loads: tokens of each expert, [experts] float64 for each mixture.
        redundant: number of slots beyond one for each expert.

    Raises:
        PluginError: if it gives no placement.
    """
    found: dict[int, Array] = {}
    for experts in dict.fromkeys(map(len, loads)):
        layers = [number for number, one in enumerate(loads) if len(one) == experts]
        placed = np.asarray(plugin.place(np.stack([loads[number] for number in layers])))
        if (fault := fault_of(placed, len(layers), experts, experts + redundant)) is not None:
            raise PluginError(f"{label_of(descriptor)}: {fault}", fix=remedy_for(descriptor.kind))
        found.update(zip(layers, placed.astype(np.int64), strict=True))
    return [found[number] for number in range(len(loads))]


def busiest(loads: Array, placement: Array, ranks: int) -> float:
    """Return the tokens of the busiest rank.

    Args:
        loads: [experts].
        placement: the expert of each slot, [slots] int64.
    """
    shares = loads / np.bincount(placement, minlength=len(loads))
    return float(shares[placement].reshape(ranks, -1).sum(1).max())


def settled(new: Array, old: Array, ranks: int) -> Array:
    """Return a placement as good as `new` that moves less: parts go to the ranks that have most of them.

    Args:
        new, old: the expert of each slot, [slots] int64.
    """
    parts, homes = new.reshape(ranks, -1), old.reshape(ranks, -1)
    common = np.array([[len(np.intersect1d(part, home)) for home in homes] for part in parts])
    result = np.empty_like(homes)
    for _ in range(ranks):
        part, rank = np.unravel_index(np.argmax(common), common.shape)
        common[part, :] = common[:, rank] = -1
        result[rank] = _in_place(parts[part], homes[rank])
    as_placed = np.array([_in_place(part, home) for part, home in zip(parts, homes, strict=True)])
    best = min((result, as_placed), key=lambda one: (one != homes).sum())  # the greedy choice may be the worse one
    return best.reshape(-1)


def fault_of(placement: Array, layers: int, experts: int, slots: int) -> str | None:
    """Return what is wrong with a plugin's placement, or None."""
    if placement.shape != (layers, slots) or placement.dtype.kind not in "iu":
        return f"place returned {placement.dtype} {placement.shape}, expected int64 ({layers}, {slots})"
    if placement.min() < 0 or placement.max() >= experts:
        return f"place returned experts outside 0 .. {experts - 1}"
    for number, layer in enumerate(placement):
        if len(missing := np.setdiff1d(np.arange(experts), layer)):
            return f"place left out experts {missing[:4].tolist()} of layer {number}"
    return None


def _in_place(part: Array, home: Array) -> Array:
    """Return the experts of a rank, those that it has in their slots."""
    left, result = list(part.tolist()), home.copy()
    free = []
    for slot, expert in enumerate(home.tolist()):
        if expert in left:
            left.remove(expert)
        else:
            free.append(slot)
    result[free] = left
    return result
