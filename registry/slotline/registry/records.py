"""Rows of the plugin list: what is known of each plugin without, or after, loading it."""

from __future__ import annotations

from enum import StrEnum
from importlib.metadata import Distribution, entry_points
from typing import Any, Final, Literal

from attrs import frozen

from slotline.registry.descriptor import Descriptor, Kind

HOOKS: Final = "hooks"
"""Kind of the rows of packages with hook implementations."""

HOOK_GROUPS: Final = ("slotline", "slotline.hooks")
"""Entry-point groups of modules with hook implementations. The second is that of contract 1's first packages."""

RecordKind = Kind | Literal["hooks"]
PROJECT = "slotline"


class PluginState(StrEnum):
    """Where a plugin stands."""

    AVAILABLE = "available"  # known from metadata or from a package's hooks, not asked for yet
    LOADED = "loaded"
    SELECTED = "selected"  # part of a plan
    FAILED = "failed"
    INCOMPATIBLE = "incompatible"  # no contract version in common
    BLOCKED = "blocked"  # by the configuration
    SHADOWED = "shadowed"  # another distribution's plugin of that name was chosen


@frozen(kw_only=True)
class PluginRecord:
    """One plugin.

    Attributes:
        kind: its slot, or ``hooks``.
        name: the name that a configuration uses.
        value: ``module:attribute`` that it is loaded from.
        distribution: the installed distribution that brings it; empty for an inline plugin.
        version: of the distribution.
        path: where the distribution lies, or the file of an inline plugin.
        state: where it stands.
        error: why it failed, is incompatible, blocked or shadowed, in one line.
        descriptor: once loaded, or as a package's hook offers it.
        inline: whether the configuration names its file.
    """

    kind: RecordKind
    name: str
    value: str
    distribution: str = ""
    version: str = ""
    path: str = ""
    state: PluginState = PluginState.AVAILABLE
    error: str = ""
    descriptor: Descriptor[Any] | None = None
    inline: bool = False

    @property
    def label(self) -> str:
        """``kind:name``."""
        return f"{self.kind.value if isinstance(self.kind, Kind) else self.kind}:{self.name}"

    @property
    def source(self) -> str:
        """Who brings it, for messages."""
        return f"{self.distribution} {self.version}" if self.distribution else f"the inline plugin {self.value}"


def installed_records() -> list[PluginRecord]:
    """A row for each entry point of our groups, read from metadata without importing anything.

    A distribution that is on the path twice (an editable install beside its source, stale metadata) counts once: the
    first one on the path, as for imports.
    """
    rows: dict[tuple[str, str], PluginRecord] = {}
    points = entry_points()  # once for all groups: each call reads the metadata of everything that is installed
    known: dict[int, tuple[str, str, str]] = {}
    groups: list[tuple[RecordKind, str]] = [(kind, kind.entry_point_group) for kind in Kind]
    for kind, group in (*groups, *((HOOKS, group) for group in HOOK_GROUPS)):
        for point in points.select(group=group):
            facts = known.get(id(point.dist))
            if facts is None:
                facts = known[id(point.dist)] = _facts_of(point.dist)
            name, version, path = facts
            record = PluginRecord(
                kind=kind, name=point.name, value=point.value, distribution=name, version=version, path=path
            )
            rows.setdefault((record.label, canonical(record.distribution)), record)
    return sorted(rows.values(), key=lambda row: (row.label, row.distribution))


def canonical(distribution: str) -> str:
    """A distribution's name in the form that compares equal for all its spellings (PEP 503)."""
    from packaging.utils import canonicalize_name

    return canonicalize_name(distribution)


def _facts_of(dist: Distribution | None) -> tuple[str, str, str]:
    """Name, version and place of a distribution; its metadata is parsed for each of the first two."""
    return (dist.name, dist.version, str(dist.locate_file(""))) if dist else ("", "", "")
