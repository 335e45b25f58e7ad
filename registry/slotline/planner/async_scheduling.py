"""Choice of asynchronous scheduling: `scheduler.async`, asked and resolved, with the reason."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from slotline.planner.offers import Offers
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts.device import DeviceCapabilities
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Plan, Setting

KEY = "scheduler.async"


def choose_async(loaded: LoadedConfig, device: DeviceCapabilities, drafter: Descriptor[Any] | None) -> Setting:
    """Choose from the configuration and the device. With a drafter, `overlap_drafts` decides last.

    Raises:
        NegotiationError: if it was asked for together with a drafter that reads tokens on the host.
    """
    asked, origin = loaded.config.scheduler.async_, loaded.origins[KEY].where
    refusal = None if drafter is None else _of_drafter(drafter)
    if asked is True and refusal is not None:
        raise _refused(origin, [refusal])
    resolved, because = asked, origin
    if asked == "auto":
        resolved = bool(device.streams.support) and refusal is None
        because = "auto: the host works while the device does"
        if not resolved:
            because = f"auto: {refusal}" if refusal else "auto: the device's cores are the host's"
    return Setting(
        key=KEY,
        asked="auto" if asked == "auto" else str(asked).lower(),
        resolved=str(resolved).lower(),
        origin=because,
        explicit=asked != "auto",
    )


def overlap_drafts(
    loaded: LoadedConfig,
    setting: Setting,
    drafter: Descriptor[Any],
    plan: Plan,
    offers: Offers,
    *,
    stages: int,
) -> Setting:
    """Return the setting for the chosen backends. Some cannot prepare a step before the previous tokens are known.

    Raises:
        NegotiationError: if it was asked for, with every reason why it cannot hold.
    """
    if setting.resolved == "false":
        return setting
    texts = []
    for name in dict.fromkeys(group.backend for group in plan.groups):
        if not offers[Kind.ATTENTION, name].capabilities.bounded_lengths:
            texts.append(f"attention backend {name!r} plans with exact lengths (bounded_lengths is not declared)")
    if stages > 1:
        texts.append(f"the model runs over {stages} pipeline stages")
    if texts and setting.explicit:
        raise _refused(loaded.origins[KEY].where, [f"drafter.name = {drafter.name!r}", *texts])
    if texts:
        return evolve(setting, resolved="false", origin=f"auto: beside drafter {drafter.name!r}, {'; '.join(texts)}")
    return evolve(setting, origin=f"{setting.origin}; drafter {drafter.name!r} proposes there")


def _of_drafter(drafter: Descriptor[Any]) -> str | None:
    """Return the drafter's own reason against overlapping steps, or None."""
    name = f"drafter.name = {drafter.name!r}"
    if not drafter.capabilities.on_device:
        return f"{name}: drafts are made from the step before's tokens (on_device is not declared)"
    if drafter.capabilities.needs_history:
        return f"{name}: it reads the text on the host (needs_history)"
    if drafter.capabilities.tree.support:
        return f"{name}: it proposes trees, and the host finds the path that stands"
    if drafter.capabilities.probabilities.support:
        return f"{name}: it draws with numbers of the host's"
    return None


def _refused(origin: str, texts: list[str]) -> NegotiationError:
    return NegotiationError(
        f"{KEY} = true ({origin}) cannot hold beside {'; '.join(texts)}",
        fix=f'set {KEY} to "auto" or false, name what can, or remove [drafter]',
    )
