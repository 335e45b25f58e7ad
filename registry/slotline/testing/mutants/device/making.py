"""Making of broken devices."""

from __future__ import annotations

from typing import Any

import attrs

from slotline.core.device import TorchOps
from slotline.registry.contracts.device import TransferBuffer
from slotline.testing.check import Level
from slotline.testing.mutants import Mutant
from slotline.testing.reference import device as reference
from slotline.testing.reference.device import Factory, HostDevice


def mutant(name: str, summary: str, level: Level, factory: Any, **offer: Any) -> Mutant:
    """Return the mutant of a factory, with some capabilities changed."""
    changed = attrs.evolve(
        reference.descriptor,
        name=f"mutant_{name.replace('-', '_')}",
        summary=summary,
        factory=factory,
        capabilities=attrs.evolve(reference.descriptor.capabilities, **offer),
    )
    return Mutant(name, summary, level, changed)


def of_device(name: str, summary: str, level: Level, device: type[HostDevice], **offer: Any) -> Mutant:
    """Return the mutant of a class of devices."""
    return mutant(name, summary, level, Factory(device), **offer)


def of_ops(name: str, summary: str, level: Level, ops: type[TorchOps]) -> Mutant:
    """Return the mutant of a table of operations."""
    return of_device(name, summary, level, type("Device", (HostDevice,), {"make_ops": ops}))


def of_buffer(name: str, summary: str, level: Level, buffer: type[Any]) -> Mutant:
    """Return the mutant of a class of transfer buffers."""

    def transfer_buffer(self: HostDevice) -> TransferBuffer:
        made: TransferBuffer = buffer(self.torch_device)
        return made

    return of_device(name, summary, level, type("Device", (HostDevice,), {"transfer_buffer": transfer_buffer}))
