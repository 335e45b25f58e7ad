"""Mixtures whose experts ranks share: how many each has, and the plugin that places them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import evolve, frozen

from slotline.planner.component_selection import texts_of
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import ModelFacts
from slotline.registry.contracts.model_family import Shard
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Need, Part, Setting, candidates, part_reasons

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
        raise NegotiationError(
            f"{KEY} = {parallel.expert} ({loaded.origins[KEY].where}) cannot hold: {'; '.join(texts)}",
            fix=f"remove what it cannot hold beside, or set {KEY} = 1",
        )


def _against(loaded: LoadedConfig, whole: ModelFacts, family: Descriptor[Any]) -> Iterator[str]:
    parallel = loaded.config.parallel
    if parallel.expert != parallel.tensor:
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
    asked, origin = parallel.expert_placement, loaded.origins[PLACEMENT].where
    if asked != "auto":
        registry.load(Kind.EXPERT_PLACEMENT, asked, required=True)
    needs = [Need(capability="max_ranks", value=parallel.expert, origin=f"{KEY} = {parallel.expert}")]
    if parallel.redundant_experts:
        text = f"parallel.redundant_experts = {parallel.redundant_experts}"
        needs.append(Need(capability="redundant", value=True, origin=text))
    usable, against = [], list[str]()
    for one in candidates(registry, Kind.EXPERT_PLACEMENT, info):
        reason = one.blocked or one.load_error or one.probe_refusal
        if reason is None and one.contract is None:
            reason = one.contract_error or "no common contract version"
        reason = reason or "; ".join(texts_of(part_reasons(one.capabilities, needs)))
        if reason:
            against.append(f"{one.name}: {reason}")
        elif asked in ("auto", one.name):
            usable.append(one)
    if not usable:
        raise NegotiationError(
            f"{PLACEMENT} = {asked!r} ({origin}): no plugin places these experts: {'; '.join(against)}",
            fix=f"name or install one that fits, or set {KEY} = 1",
        )
    best = max(usable, key=lambda one: (one.capabilities.priority, one.name))
    assert best.descriptor is not None  # otherwise there would be a reason against it
    others = "".join(f"; not {text}" for text in against)
    record = registry.record(Kind.EXPERT_PLACEMENT, best.name)
    return PlacementChoice(
        descriptor=evolve(best.descriptor, capabilities=best.capabilities),
        settings=(
            _setting(loaded, whole),
            Setting(
                key=PLACEMENT,
                asked=asked,
                resolved=best.name,
                origin=f"{origin if asked != 'auto' else 'auto: the one that fits'}{others}",
                explicit=asked != "auto",
            ),
        ),
        part=Part(
            kind=Kind.EXPERT_PLACEMENT.value,
            name=best.name,
            distribution=record.distribution,
            version=record.version,
            origin="default" if asked == "auto" else f"{origin} {PLACEMENT}",
        ),
    )


def _setting(loaded: LoadedConfig, whole: ModelFacts) -> Setting:
    """Return the record of the division of mixtures."""
    parallel = loaded.config.parallel
    texts = [
        f"{whole.mixtures.count(experts)} mixtures of {experts} experts -> "
        f"{(experts + parallel.redundant_experts) // parallel.expert} on a rank"
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
