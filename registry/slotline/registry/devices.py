"""From the device that a configuration names to the device that its plugin makes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import evolve

from slotline.registry.built import DEVICE_OPS, misfits_of
from slotline.registry.config import LoadedConfig
from slotline.registry.config.faults import similar
from slotline.registry.contracts.device import Device, DeviceContext
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import ConfigError, ContractError, PluginError
from slotline.registry.loading import bind_contract, one_line, remedy_for

AUTO = "auto"


class Devices:
    """The devices of one configuration. Each is made once.

    Args:
        registry: finds the plugins.
        loaded: holds the plugins' own options; None for none.
    """

    def __init__(self, registry: PluginRegistry, loaded: LoadedConfig | None = None) -> None:
        self._registry, self._loaded = registry, loaded
        self._made: dict[str, tuple[Device, Descriptor[Any]]] = {}
        self._explicit: set[str] = set()

    def named(self, asked: str, *, key: str = "device") -> Device:
        """Return the device that a configuration key names; `auto` is that of the highest priority that is there.

        Raises:
            ConfigError: if no plugin has the name, or if the machine lacks the device.
            PluginError: if the plugin does not load or fails.
        """
        if asked == AUTO:
            asked = self._best(key).name
        name, colon, index = asked.partition(":")
        names = self._registry.names(Kind.DEVICE)
        if name not in names or (colon and not index.isdigit()):
            raise ConfigError(
                f"{key} = {asked!r} is not known{similar(name, names) if name not in names else ''}",
                fix=f"use 'auto' or one of {_texts(names)}, with ':N' for number N; a package brings another by the "
                f"entry-point group {Kind.DEVICE.entry_point_group!r}",
            )
        descriptor = self._registry.load(Kind.DEVICE, name, required=True)
        if (number := int(index or 0)) >= (there := self.count(name)):
            unit = "device" if there == 1 else "devices"
            raise ConfigError(
                f"{key} = {asked!r} is not there: {there} {called(name)} {unit}",
                fix="use one that `slotline doctor` lists, 'cpu' or 'auto'",
            )
        return self._make(descriptor, number if colon else None)

    def count(self, name: str) -> int:
        """Return the number of devices of a kind that the machine has.

        Raises:
            PluginError: if the plugin does not load, or does not say it.
        """
        descriptor = self._registry.load(Kind.DEVICE, name, required=True)
        counted: Any = getattr(self._registry.factory(descriptor), "count", None)
        if counted is None:
            return 1
        try:
            found = counted()
        except Exception as error:
            raise PluginError(
                f"{self._registry.full_name(descriptor)}: count() failed: {one_line(error)}",
                fix=f"report it to its authors, or {remedy_for(Kind.DEVICE)}",
            ) from error
        if not isinstance(found, int) or found < 0:
            raise ContractError(
                f"{self._registry.full_name(descriptor)}: count() is {found!r}, expected a number of devices",
                fix=f"correct the plugin, or {remedy_for(Kind.DEVICE)}",
            )
        return found

    def there(self) -> list[str]:
        """Return every device that this machine has, by priority: `cuda:0`, `cuda:1`, `cpu`."""
        found: list[str] = []
        for descriptor in self._by_priority():
            try:
                count = self.count(descriptor.name)
            except PluginError:
                continue
            single = count == 1 and bool(descriptor.capabilities.host_memory.support)
            found += [descriptor.name] if single else [f"{descriptor.name}:{index}" for index in range(count)]
        return found

    def descriptor(self, device: Device) -> Descriptor[Any]:
        """Return the descriptor of a device that was made here."""
        return self._made[device.name][1]

    def info(self, device: Device) -> DeviceInfo:
        """Return a device's facts, with what its descriptor declares of graphs and of other devices' plugins."""
        descriptor = self.descriptor(device)
        offer, found = descriptor.capabilities, device.info()
        wrong = [] if found.type == descriptor.name else [f"its type is {found.type!r}, expected {descriptor.name!r}"]
        self._registry.fit(descriptor, "what info() gives", wrong)
        return evolve(found, graphs=offer.graphs, compatible_with=offer.compatible_with)

    def numbered(self, device: Device) -> Device:
        """Return the same device by its number, so that one device has one name."""
        descriptor = self.descriptor(device)
        if ":" in device.name or descriptor.capabilities.host_memory.support:
            return device
        return self.named(f"{descriptor.name}:{torch_index(device)}")

    def made(self) -> list[Device]:
        """Return the devices that were made."""
        return [device for device, _ in self._made.values()]

    def is_explicit(self, device: Device) -> bool:
        """Return whether the configuration named the device by its number."""
        return device.name in self._explicit

    def _best(self, key: str) -> Descriptor[Any]:
        """Return the plugin of the highest priority that has a device here."""
        for descriptor in self._by_priority():
            if self.count(descriptor.name):
                return descriptor
        raise ConfigError(f"{key} = 'auto' finds no device", fix="install a package with a device, or slotline again")

    def _by_priority(self) -> list[Descriptor[Any]]:
        found = self._registry.candidates(Kind.DEVICE)
        return sorted(found, key=lambda descriptor: (-descriptor.capabilities.priority, descriptor.name))

    def _make(self, descriptor: Descriptor[Any], index: int | None) -> Device:
        asked = descriptor.name if index is None else f"{descriptor.name}:{index}"
        if asked in self._made:
            return self._made[asked][0]
        options = None if self._loaded is None else self._registry.options(self._loaded, descriptor)
        context = DeviceContext(contract=bind_contract(descriptor), name=descriptor.name, index=index, options=options)
        device: Device = self._registry.build(descriptor, context)
        self._registry.fit(descriptor, "its table of operations", misfits_of(DEVICE_OPS, None, device.ops))
        self._registry.fit(descriptor, "its device", _misnamed(device, descriptor.name))
        self._made[asked] = device, descriptor
        self._made.setdefault(device.name, self._made[asked])
        if index is not None:
            self._explicit.add(device.name)
        return device


def _misnamed(device: Device, name: str) -> Iterable[str]:
    if not isinstance(device.name, str) or device.name.partition(":")[0] != name:
        yield f"its name is {device.name!r}, expected {name!r} or '{name}:N'"
    if not isinstance(device.torch_device, str):
        yield f"its torch_device is {device.torch_device!r:.60}, expected a torch device string"


def torch_index(device: Device) -> int:
    """Return the number that torch has for the device, which is the current one if its string names none."""
    import torch

    index = torch.device(device.torch_device).index
    if index is None:
        index = torch.get_device_module(device.torch_device).current_device()
    return index if isinstance(index, int) else 0


def _texts(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def called(name: str) -> str:
    """Return a kind of device as a sentence names it."""
    return name.upper() if name in ("cpu", "cuda") else name
