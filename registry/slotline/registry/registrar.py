"""Conversion of offered descriptors to rows, and the check that an entry point and its descriptor agree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import PluginLoadError
from slotline.registry.loading import label_of, to_descriptor
from slotline.registry.records import PluginRecord


class Collected:
    """Registrar passed to a hook plugin's `slotline_register`."""

    def __init__(self, row: PluginRecord) -> None:
        self._row = row
        self.rows: list[PluginRecord] = []

    def add(self, descriptor: Descriptor[Any]) -> None:
        """Add a row for one descriptor."""
        found = to_descriptor(descriptor, f"what hook plugin {self._row.label!r} registers")
        self.rows.append(attrs.evolve(self._row, kind=found.kind, name=found.name, descriptor=found))

    def extend(self, kind: Kind, offers: Iterable[Any]) -> None:
        """Add rows for the result of a slot's hook.

        Raises:
            PluginLoadError: if an offer is not a descriptor, or belongs to another slot.
        """
        what = f"what {kind.hook} of {self._row.label!r} offers"
        for offer in offers:
            found = to_descriptor(offer, what)
            if found.kind is not kind:
                raise PluginLoadError(
                    f"{what}: {label_of(found)!r} is a descriptor of another slot",
                    fix=f"return it from {found.kind.hook}",
                )
            self.add(found)


def check_identity(row: PluginRecord, descriptor: Descriptor[Any], what: str) -> None:
    """Raise PluginLoadError unless the descriptor is of the row's kind and name."""
    if descriptor.kind != row.kind or descriptor.name != row.name:
        raise PluginLoadError(
            f"{what}: its descriptor says {label_of(descriptor)!r}",
            fix="give the entry point and the descriptor one group and one name",
        )
