"""Probes of plugins: the part of an offer that is available on the machine at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from slotline.registry.capability import Choice, Flag, Level, Max, Set
from slotline.registry.descriptor import Descriptor, DeviceInfo
from slotline.registry.errors import PluginError
from slotline.registry.loading import import_dotted, label_of, one_line


def probe(descriptor: Descriptor[Any], device: DeviceInfo) -> Any:
    """Return the plugin's capabilities on `device`, or a sentence with the reason why it cannot run.

    The capabilities are never wider than those declared. A probe that raises counts as a refusal: the plugin cannot be
    used there, and the plan shows the reason.
    """
    if descriptor.probe is None:
        return descriptor.capabilities
    try:
        what = f"the probe of {label_of(descriptor)}"
        function = import_dotted(descriptor.probe, what) if isinstance(descriptor.probe, str) else descriptor.probe
        offer = function(_as_declared(descriptor.capabilities, device))
    except PluginError as error:
        return f"probe failed: {error.message}"
    except (Exception, SystemExit) as error:
        return f"probe failed: {one_line(error)}"
    if isinstance(offer, str):
        return offer or "its probe refuses without a reason"
    if not isinstance(offer, type(descriptor.capabilities)):
        return f"probe returned {type(offer).__name__}, not {type(descriptor.capabilities).__name__}"
    wider = list(widened(offer, descriptor.capabilities))
    return f"probe claims more than the descriptor: {'; '.join(wider)}" if wider else offer


def _as_declared(capabilities: Any, device: DeviceInfo) -> DeviceInfo:
    """Return the machine as one of a kind that the plugin declares, if the machine's own kind is not among these."""
    kinds = getattr(getattr(capabilities, "devices", None), "values", None)
    if kinds is None or device.type in kinds:
        return device
    compatible = next((kind for kind in device.compatible_with if kind in kinds), device.type)
    return attrs.evolve(device, type=compatible)


def widened(offer: Any, declared: Any) -> Iterator[str]:
    """Yield, in words, each capability of `offer` that exceeds `declared`. Both are of one attrs class."""
    for item in attrs.fields(type(declared)):
        new, old = getattr(offer, item.name), getattr(declared, item.name)
        if type(new) is type(old) and _wider(new, old):
            yield f"{item.name} is {new.describe()}, declared {old.describe()}"


def _wider(new: Any, old: Any) -> bool:
    if isinstance(new, Flag):
        return bool(new.support) and not old.support
    if isinstance(new, Set):
        return old.values is not None and (new.values is None or not new.values <= old.values)
    if isinstance(new, Level):
        return bool(new.value > old.value)
    if isinstance(new, Max):
        return old.limit is not None and (new.limit is None or new.limit > old.limit)
    return isinstance(new, Choice) and not set(new.options) <= set(old.options)
