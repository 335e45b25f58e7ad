"""Plugin under test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, field, frozen

from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.loading import bind_contract, label_of, resolve_factory, resolve_options, to_descriptor


@frozen
class Subject:
    """Plugin, the device that it is tested on, and its capabilities there.

    Attributes:
        descriptor: the plugin's descriptor.
        device: the device.
        capabilities: the declared capabilities, narrowed by the probe.
        contract: the bound contract version.
        options: the plugin's own table, or None.
        distribution, version: source of the plugin, for reports.
        exhaustive: True to run all combinations instead of one case for each value.
        target: the text that names it on a command line, empty for an object without one.
        settings: the values given for its own table.
        seed: changes every random choice. 0 for the suite's own choices.
        companion: the spec that lays out an attention backend's cache, if the backend came with one.
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
    companion: Descriptor[Any] | None = None

    @property
    def kind(self) -> Kind:
        """Kind of the plugin."""
        return self.descriptor.kind

    @property
    def name(self) -> str:
        """Name of the plugin."""
        return self.descriptor.name

    def build(self, context: Any) -> Any:
        """Build the plugin with its factory. Contract and options of the context are filled in here.

        A context of None is for a factory that takes no argument.
        """
        if context is None:
            return resolve_factory(self.descriptor)()
        context = evolve(context, contract=self.contract, options=self.options)
        return resolve_factory(self.descriptor)(self.with_workspace(context))

    def with_workspace(self, context: Any) -> Any:
        """Return a context with the workspace that an attention backend declares for it. It holds garbage."""
        declared = getattr(self.capabilities, "workspace", None)
        if declared is None or context.workspace is not None:
            return context
        import torch

        size = declared(context)  # more lies behind it, so that a check catches a backend that goes too far
        whole = torch.full((size + 4096,), 0xFF, dtype=torch.uint8, device=context.device)
        return evolve(context, workspace=whole[:size])

    def refusal(self, needs: Mapping[str, Any]) -> str | None:
        """Return the reason why the descriptor does not cover some needs, or None. Limits between features count.

        Needs of None or False are ignored. An attribute that is not a capability class is compared by equality.
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
    """Return the subject for a descriptor, a class with one, or a text.

    Args:
        target: the plugin. A text is one that `find_target` takes.
        device: the device to test on, e.g. ``cpu`` or ``cuda``. None for the GPU if the plugin supports it.
        options: the plugin's own table.
        distribution, version: source of the plugin, if `target` does not name it.
        exhaustive: True to run all combinations instead of one case for each value.
        seed: changes every random choice.

    Raises:
        PluginError: if a text names no plugin or several, or if the probe reports that it cannot run on the device.
        PluginLoadError: if the target is not a plugin.
        ContractError: if host and plugin share no contract version.
        ConfigError: if `options` do not fit the plugin's own table, or the device does not exist.
    """
    from slotline.registry.errors import PluginError
    from slotline.registry.probing import probe
    from slotline.testing.target import Target, find_target

    found = find_target(target) if isinstance(target, str) else target
    if not isinstance(found, Target):
        found = Target("", to_descriptor(found, "the plugin under test"), distribution, version)
    descriptor = found.descriptor
    own = descriptor.kind is Kind.DEVICE
    info = _own(descriptor, device) if own else _device(device, getattr(descriptor.capabilities, "devices", None))
    _refuse_carrier(descriptor)
    offer = probe(descriptor, info)
    if isinstance(offer, str):
        raise PluginError(
            f"{label_of(descriptor)} cannot run on {info.name or info.type}: {offer}",
            fix="run the suite on a machine that the plugin supports",
        )
    subject = Subject(
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
        found.companion,
    )
    return evolve(subject, device=_described(subject)) if own else subject


def _refuse_carrier(descriptor: Descriptor[Any]) -> None:
    """Refuse an extension that carries a feature of the plan, or uses the pool: it needs the parts of an engine."""
    from slotline.registry.contracts.extension import CARRIED
    from slotline.registry.errors import PluginError

    if descriptor.kind is Kind.EXTENSION and descriptor.name in CARRIED:
        raise PluginError(
            f"{label_of(descriptor)} carries a feature of the plan, and cannot be built outside of an engine",
            fix="test it in an engine whose plan has the feature",
        )
    pool = [name for name in ("prefix_events", "frees_tokens") if getattr(descriptor.capabilities, name, False)]
    if descriptor.kind is Kind.EXTENSION and pool:
        raise PluginError(
            f"{label_of(descriptor)} declares {' and '.join(pool)}, and needs an engine's pool of blocks",
            fix="test it in an engine",
        )


def _own(descriptor: Descriptor[Any], asked: DeviceInfo | str | None) -> DeviceInfo:
    """Return the device that a device plugin is itself. It is tested on no other."""
    from slotline.registry.errors import PluginError

    kind = asked.type if isinstance(asked, DeviceInfo) else asked
    if kind not in (None, descriptor.name):
        raise PluginError(
            f"{label_of(descriptor)} is the device that is tested, and cannot be tested on {kind!r}",
            fix=f"leave the device out, or ask for {descriptor.name!r}",
        )
    offer = descriptor.capabilities
    return DeviceInfo(type=descriptor.name, graphs=offer.graphs, compatible_with=offer.compatible_with)


def _described(subject: Subject) -> DeviceInfo:
    """Return the facts that the device under test gives of itself, those of its descriptor if it gives none."""
    from slotline.registry.contracts.device import DeviceContext

    try:
        found = subject.build(DeviceContext(contract=subject.contract, name=subject.name)).info()
    except Exception:  # a check says so
        return subject.device
    return found if isinstance(found, DeviceInfo) and found.type == subject.name else subject.device


def _device(asked: DeviceInfo | str | None, devices: Any) -> DeviceInfo:
    """Return the requested device. A device that the plugin does not declare is refused like by a probe."""
    from slotline.registry.errors import PluginError

    if asked is None:
        return default_device(devices)
    info = describe_device(asked) if isinstance(asked, str) else asked
    refusal = None if devices is None else devices.refusal(info.need)
    if refusal is not None:
        raise PluginError(f"the plugin does not declare the device: {refusal}", fix="ask for another device")
    return info


def default_device(devices: Any = None) -> DeviceInfo:
    """Return the engine's default device: a GPU if there is one and `devices` (a capability) allows it, or the CPU."""
    found = describe_device("auto")
    takes = devices is None or devices.refusal(found.need) is None
    return found if takes else describe_device("cpu")


def describe_device(asked: str) -> DeviceInfo:
    """Return the facts of a device that this machine has, by the name that a configuration gives it."""
    from slotline.registry.devices import Devices
    from slotline.registry.discovery import PluginRegistry

    devices = Devices(PluginRegistry.discover(tolerant=True))
    return devices.info(devices.named(asked))


def _options(descriptor: Descriptor[Any], given: Mapping[str, Any]) -> Any:
    """Return the plugin's own table, read like in the configuration."""
    from slotline.registry.config.load import load_config
    from slotline.registry.config.plugin_tables import options_path

    values = {".".join((*options_path(descriptor.kind, descriptor.name), key)): value for key, value in given.items()}
    loaded = load_config(values=values, environ={})
    return loaded.options(descriptor.kind, descriptor.name, resolve_options(descriptor))
