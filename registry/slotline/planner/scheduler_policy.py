"""Choice of the scheduler policy: checks that the configured plugin can be used."""

from __future__ import annotations

from typing import Any

from slotline.planner.component_selection import device_need, texts_of
from slotline.planner.offers import narrowed
from slotline.registry.config import LoadedConfig
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Need, part_reasons
from slotline.registry.ranks import Place

KEY = "scheduler.policy"
_FIX = 'name another in scheduler.policy, for instance "fcfs"'


def choose_scheduler_policy(
    loaded: LoadedConfig, registry: PluginRegistry, info: DeviceInfo, place: Place
) -> Descriptor[Any]:
    """Return the scheduler policy that the configuration names, with the capabilities that its probe left.

    Raises:
        NegotiationError: with every reason why it cannot be used.
    """
    name = loaded.config.scheduler.policy
    descriptor = registry.load(Kind.SCHEDULER_POLICY, name, required=True)
    descriptor = narrowed(descriptor, info, f"scheduler policy {name!r}", _FIX)
    needs = [device_need(info)]
    if place.size > 1:
        needs.append(Need(capability="ranks", value=True, origin=f"{place.size} ranks schedule alike"))
    if texts := texts_of(part_reasons(descriptor.capabilities, needs)):
        where = loaded.origins[KEY].where
        raise NegotiationError(f"{KEY} = {name!r} ({where}) cannot be used: {'; '.join(texts)}", fix=_FIX)
    return descriptor
