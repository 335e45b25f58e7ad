"""Choice of one plugin of a kind: the one that the configuration names, or the best of those that fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve, frozen

from slotline.planner.component_selection import refusal_of
from slotline.registry.config import LoadedConfig
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Need, Part, Setting, candidates


@frozen(kw_only=True)
class BestPlugin:
    """The chosen plugin.

    Attributes:
        descriptor: the plugin's, with the capabilities that its probe left.
        setting: the configuration key, asked and resolved, with every reason against the others.
        part: the plugin for the plan.
    """

    descriptor: Descriptor[Any]
    setting: Setting
    part: Part


def best_plugin(
    loaded: LoadedConfig,
    registry: PluginRegistry,
    info: DeviceInfo,
    kind: Kind,
    key: str,
    asked: str,
    needs: Sequence[Need],
    *,
    none: str,
    fix: str,
) -> BestPlugin:
    """Return the plugin that `asked` names, or for ``auto`` the one of the highest priority that covers the needs.

    Args:
        key: the configuration key that names it.
        none: what it means that none fits, and `fix` the remedy.

    Raises:
        NegotiationError: with every reason, if none fits.
    """
    origin = loaded.origins[key].where
    if asked != "auto":
        registry.load(kind, asked, required=True)
    found = [(one, refusal_of(one, needs)) for one in candidates(registry, kind, info)]
    against = [f"{one.name}: {why}" for one, why in found if why is not None]
    usable = [one for one, why in found if why is None and asked in ("auto", one.name)]
    if not usable:
        raise NegotiationError(f"{key} = {asked!r} ({origin}): {none}: {'; '.join(against)}", fix=fix)
    best = max(usable, key=lambda one: (one.capabilities.priority, one.name))
    assert best.descriptor is not None  # otherwise there would be a reason against it
    others = "".join(f"; not {text}" for text in against)
    record = registry.record(kind, best.name)
    return BestPlugin(
        descriptor=evolve(best.descriptor, capabilities=best.capabilities),
        setting=Setting(
            key=key,
            asked=asked,
            resolved=best.name,
            origin=f"{origin if asked != 'auto' else 'auto: the one that fits'}{others}",
            explicit=asked != "auto",
        ),
        part=Part(
            kind=kind.value,
            name=best.name,
            distribution=record.distribution,
            version=record.version,
            origin="default" if asked == "auto" else f"{origin} {key}",
        ),
    )
