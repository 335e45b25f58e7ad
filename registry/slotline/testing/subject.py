"""The plugin under test."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen

from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.loading import bind_contract, resolve_factory, resolve_options, to_descriptor


@frozen
class Subject:
    """A plugin, the device it is tested on, and what it declares there.

    Attributes:
        descriptor: the plugin's.
        device: the machine.
        capabilities: what is declared, after the probe narrowed it.
        contract: the bound contract version.
        options: the plugin's own table, or None.
        distribution, version: what brings it, for reports.
        exhaustive: whether checks take all combinations instead of one case for each value.
    """

    descriptor: Descriptor[Any]
    device: DeviceInfo
    capabilities: Any
    contract: int
    options: Any = None
    distribution: str = ""
    version: str = ""
    exhaustive: bool = False

    @property
    def kind(self) -> Kind:
        return self.descriptor.kind

    @property
    def name(self) -> str:
        return self.descriptor.name

    def build(self, context: Any) -> Any:
        """What the plugin's factory makes of a build context; contract and options are filled in here."""
        return resolve_factory(self.descriptor)(evolve(context, contract=self.contract, options=self.options))

    def refusal(self, needs: Mapping[str, Any]) -> str | None:
        """Why the descriptor does not cover some needs, in a sentence, or None. Limits between features count.

        A need of None or False is none; an attribute that is not a capability class is compared by equality.
        """
        active = {name for name, value in needs.items() if value is not None and value is not False}
        for name in sorted(active):
            offers = [getattr(self.capabilities, name, None)]
            limits = getattr(self.capabilities, "limits", ())
            offers += [limit.offer for limit in limits if limit.capability == name and limit.when in active]
            for offer in offers:
                if offer is None:
                    return f"not declared: {name}"
                text = offer.refusal(needs[name]) if hasattr(offer, "refusal") else _unequal(offer, needs[name])
                if text is not None:
                    return f"not declared: {name.replace('_', ' ')} {text}"
        return None


def _unequal(offer: Any, need: Any) -> str | None:
    return None if offer == need else f"needs {need}, offers {offer}"


def subject_of(
    target: Any,
    *,
    device: DeviceInfo | None = None,
    options: Mapping[str, Any] | None = None,
    distribution: str = "",
    version: str = "",
    exhaustive: bool = False,
) -> Subject:
    """The subject for a descriptor, a class with one, or a dotted path ``"module:attribute"``.

    Raises:
        PluginLoadError: if the target is no plugin.
        ContractError: if host and plugin share no contract version.
        PluginError: if the probe says that the plugin cannot run on the device.
        ConfigError: if `options` do not fit the plugin's own table.
    """
    from slotline.registry.errors import PluginError
    from slotline.registry.probing import probe

    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        target = getattr(importlib.import_module(module), attribute or "descriptor")
    descriptor = to_descriptor(target, "the plugin under test")
    info = device or default_device(getattr(descriptor.capabilities, "devices", None))
    offer = probe(descriptor, info)
    if isinstance(offer, str):
        raise PluginError(
            f"{descriptor.kind.value} plugin {descriptor.name!r} cannot run on {info.name or info.type}: {offer}",
            fix="run the suite on a machine that the plugin supports",
        )
    return Subject(
        descriptor,
        info,
        offer,
        bind_contract(descriptor),
        _options(descriptor, options),
        distribution,
        version,
        exhaustive,
    )


def default_device(devices: Any = None) -> DeviceInfo:
    """The machine as the engine sees it: a GPU if there is one and `devices` (a capability) takes it, else the CPU."""
    from slotline.core.device import describe_device, resolve_device

    found = resolve_device("auto")
    takes = devices is None or devices.refusal(found.partition(":")[0]) is None
    return describe_device(found if takes else "cpu")


def _options(descriptor: Descriptor[Any], given: Mapping[str, Any] | None) -> Any:
    declared = resolve_options(descriptor)
    return None if declared is None else declared(**dict(given or {}))
