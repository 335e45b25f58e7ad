"""The plugin under test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, field, frozen

from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.loading import bind_contract, label_of, resolve_factory, resolve_options, to_descriptor


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
        target: the text that names it again on a command line; empty for an object that has none.
        settings: what its own table was given.
        seed: moves every random choice; 0 for those of the suite.
    """

    descriptor: Descriptor[Any]
    device: DeviceInfo
    capabilities: Any
    contract: int
    options: Any = None
    distribution: str = ""
    version: str = ""
    exhaustive: bool = False
    target: str = ""
    settings: Mapping[str, Any] = field(factory=dict)
    seed: int = 0

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
    device: DeviceInfo | str | None = None,
    options: Mapping[str, Any] | None = None,
    distribution: str = "",
    version: str = "",
    exhaustive: bool = False,
    seed: int = 0,
) -> Subject:
    """The subject for a descriptor, a class with one, or a text.

    Args:
        target: the plugin; a text is ``NAME``, ``kind:NAME``, ``module:attribute`` or ``./file.py:attribute``.
        device: what to test on, ``cpu`` and ``cuda`` among it; None for the GPU where the plugin takes one.
        options: the plugin's own table.
        distribution, version: who brings the plugin, where `target` does not tell.
        exhaustive: all combinations instead of one case for each value.
        seed: moves every random choice.

    Raises:
        PluginError: if a text names no plugin or several, or if the probe says that it cannot run on the device.
        PluginLoadError: if the target is no plugin.
        ContractError: if host and plugin share no contract version.
        ConfigError: if `options` do not fit the plugin's own table, or the device is not there.
    """
    from slotline.registry.errors import PluginError
    from slotline.registry.probing import probe
    from slotline.testing.target import Target, find_target

    found = find_target(target) if isinstance(target, str) else target
    if not isinstance(found, Target):
        found = Target("", to_descriptor(found, "the plugin under test"), distribution, version)
    descriptor = found.descriptor
    info = _device(device, getattr(descriptor.capabilities, "devices", None))
    offer = probe(descriptor, info)
    if isinstance(offer, str):
        raise PluginError(
            f"{label_of(descriptor)} cannot run on {info.name or info.type}: {offer}",
            fix="run the suite on a machine that the plugin supports",
        )
    return Subject(
        descriptor,
        info,
        offer,
        bind_contract(descriptor),
        _options(descriptor, options or {}),
        found.distribution,
        found.version,
        exhaustive,
        found.name,
        dict(options or {}),
        seed,
    )


def _device(asked: DeviceInfo | str | None, devices: Any) -> DeviceInfo:
    """The machine that was asked for; one that the plugin does not declare is refused like a probe would."""
    from slotline.core.planning.device import describe_device, resolve_device
    from slotline.registry.errors import PluginError

    if asked is None:
        return default_device(devices)
    info = describe_device(resolve_device(asked)) if isinstance(asked, str) else asked
    refusal = None if devices is None else devices.refusal(info.type)
    if refusal is not None:
        raise PluginError(f"the plugin does not declare the device: {refusal}", fix="ask for another device")
    return info


def default_device(devices: Any = None) -> DeviceInfo:
    """The machine as the engine sees it: a GPU if there is one and `devices` (a capability) takes it, else the CPU."""
    from slotline.core.planning.device import describe_device, resolve_device

    found = resolve_device("auto")
    takes = devices is None or devices.refusal(found.partition(":")[0]) is None
    return describe_device(found if takes else "cpu")


def _options(descriptor: Descriptor[Any], given: Mapping[str, Any]) -> Any:
    """The plugin's own table, read as the configuration reads it."""
    from slotline.registry.config.load import load_config
    from slotline.registry.config.plugin_tables import options_path

    values = {".".join((*options_path(descriptor.kind, descriptor.name), key)): value for key, value in given.items()}
    loaded = load_config(values=values, environ={})
    return loaded.options(descriptor.kind, descriptor.name, resolve_options(descriptor))
