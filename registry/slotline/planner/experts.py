"""Mixtures whose experts ranks share: how many each has, and the plugin that places them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import evolve, frozen

from slotline.planner.best_plugin import best_plugin
from slotline.planner.refusals import cannot_hold
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import ModelFacts
from slotline.registry.contracts.model_family import Shard
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Need, Part, Setting

KEY = "parallel.expert"
PLACEMENT = "parallel.expert_placement"
_WITH_EXPERTS = ("redundant_experts", "expert_loads", "rebalance_steps")


def with_experts(loaded: LoadedConfig, shard: Shard | None) -> Shard | None:
    """Return a rank's part of each layer with what the configuration says of experts."""
    parallel = loaded.config.parallel
    if shard is None or parallel.expert == 1:
        return shard
    return evolve(
        shard,
        experts=True,
        redundant_experts=parallel.redundant_experts,
        count_experts=counts_experts(loaded),
    )


def replicas_share_experts(loaded: LoadedConfig) -> bool:
    """Return True if replicas with requests of their own share the experts of mixtures, more than a tensor group."""
    parallel = loaded.config.parallel
    return parallel.data > 1 and parallel.expert > parallel.tensor


def counts_experts(loaded: LoadedConfig) -> bool:
    """Return True if the tokens of each expert are counted."""
    parallel = loaded.config.parallel
    return parallel.expert > 1 and (parallel.expert_loads or parallel.rebalance_steps > 0)


def refuse_experts(loaded: LoadedConfig, whole: ModelFacts, family: Descriptor[Any]) -> None:
    """Refuse numbers of ranks and experts that do not fit.

    Args:
        whole: facts of the whole model.

    Raises:
        NegotiationError: with every reason.
    """
    parallel = loaded.config.parallel
    if parallel.expert == 1:
        for name in _WITH_EXPERTS:
            if getattr(parallel, name):
                where = loaded.origins[f"parallel.{name}"].where
                raise NegotiationError(
                    f"parallel.{name} = {_toml(getattr(parallel, name))} ({where}): no ranks share whole experts "
                    f"({KEY} = 1)",
                    fix=f"set {KEY} to the number of ranks, or remove parallel.{name}",
                )
        return
    if texts := list(_against(loaded, whole, family)):
        raise cannot_hold(loaded, KEY, parallel.expert, texts, 1)


def _against(loaded: LoadedConfig, whole: ModelFacts, family: Descriptor[Any]) -> Iterator[str]:
    parallel = loaded.config.parallel
    if replicas_share_experts(loaded):
        yield from _against_replicas(loaded, whole, family)
    elif parallel.expert != parallel.tensor:
        yield f"parallel.tensor = {parallel.tensor}: the ranks of a tensor group share the experts"
    if not whole.mixtures:
        yield f"{whole.architecture} has no mixture whose experts ranks can share"
    elif refusal := family.capabilities.experts.refusal(True):
        yield f"model family {family.name!r}: experts {refusal}"
    for experts in sorted(set(whole.mixtures)):
        if (experts + parallel.redundant_experts) % parallel.expert:
            least = -experts % parallel.expert
            yield (
                f"{experts} experts and {parallel.redundant_experts} redundant ones are no multiple of it "
                f"(parallel.redundant_experts = {least} is)"
            )
        if parallel.redundant_experts > experts * (parallel.expert - 1):
            yield f"parallel.redundant_experts = {parallel.redundant_experts}: ranks would have an expert twice"
    if counts_experts(loaded) and any(module.experts for module in whole.weight_modules):
        yield "parallel.expert_loads or parallel.rebalance_steps: experts with quantized weights do not move"
    if loaded.config.batch_invariant and (parallel.redundant_experts or parallel.rebalance_steps):
        yield "batch_invariant = true: the order of sums hangs on the place of an expert"


def _against_replicas(loaded: LoadedConfig, whole: ModelFacts, family: Descriptor[Any]) -> Iterator[str]:
    parallel = loaded.config.parallel
    if parallel.expert != parallel.data * parallel.tensor:
        yield f"parallel.data = {parallel.data}: all replicas share the experts, or only the ranks of each"
    name = "expert_replicas" if parallel.tensor == 1 else "expert_groups"
    if whole.mixtures and (refusal := getattr(family.capabilities, name).refusal(True)):
        yield f"model family {family.name!r}: {name} {refusal}"
    if parallel.tensor > 1 and parallel.rebalance_steps:
        yield f"parallel.rebalance_steps = {parallel.rebalance_steps}: with parallel.tensor above 1, experts stay"
    if parallel.expert_loads:
        yield "parallel.expert_loads = true: replicas place experts anew by parallel.rebalance_steps alone"
    if loaded.config.batch_invariant:
        yield "batch_invariant = true: the sums of a token's experts hang on the tokens of other replicas"


@frozen(kw_only=True)
class PlacementChoice:
    """The plugin that places experts.

    Attributes:
        descriptor: the plugin's, None without shared experts.
        settings: the records for the plan.
        part: the plugin for the plan.
    """

    descriptor: Descriptor[Any] | None = None
    settings: tuple[Setting, ...] = ()
    part: Part | None = None


def choose_expert_placement(
    loaded: LoadedConfig, registry: PluginRegistry, info: DeviceInfo, whole: ModelFacts
) -> PlacementChoice:
    """Return the expert placement that the configuration names, or the one of the highest priority that fits.

    Raises:
        NegotiationError: with every reason, if none fits.
    """
    parallel = loaded.config.parallel
    if parallel.expert == 1:
        return PlacementChoice()
    needs = [Need(capability="max_ranks", value=parallel.expert, origin=f"{KEY} = {parallel.expert}")]
    if parallel.redundant_experts:
        text = f"parallel.redundant_experts = {parallel.redundant_experts}"
        needs.append(Need(capability="redundant", value=True, origin=text))
    best = best_plugin(
        loaded,
        registry,
        info,
        Kind.EXPERT_PLACEMENT,
        PLACEMENT,
        parallel.expert_placement,
        needs,
        none="no plugin places these experts",
        fix=f"name or install one that fits, or set {KEY} = 1",
    )
    return PlacementChoice(descriptor=best.descriptor, settings=(_setting(loaded, whole), best.setting), part=best.part)


def _setting(loaded: LoadedConfig, whole: ModelFacts) -> Setting:
    """Return the record of the division of mixtures."""
    parallel = loaded.config.parallel
    holder = "replica" if parallel.tensor == 1 else "rank"
    if replicas_share_experts(loaded):
        holder += ", which sends each token to its experts"
    texts = [
        f"{whole.mixtures.count(experts)} mixtures of {experts} experts -> "
        f"{(experts + parallel.redundant_experts) // parallel.expert} on a {holder}"
        for experts in sorted(set(whole.mixtures))
    ]
    if parallel.redundant_experts:
        texts.append(f"{parallel.redundant_experts} of all are copies")
    if parallel.rebalance_steps:
        texts.append(f"placed anew every {parallel.rebalance_steps} steps")
    elif parallel.expert_loads:
        texts.append("placed anew when asked")
    return Setting(
        key=KEY,
        asked=str(parallel.expert),
        resolved=str(parallel.expert),
        origin=f"{loaded.origins[KEY].where}: {'; '.join(texts)}",
        explicit=True,
    )


def _toml(value: bool | int) -> str:
    return str(value).lower()
