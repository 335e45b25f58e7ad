"""Rows of the plugin list: facts about each plugin before and after loading it."""

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
    """State of a plugin."""

    AVAILABLE = "available"  # known from metadata or from a package's hooks, not asked for yet
    LOADED = "loaded"
    SELECTED = "selected"  # part of a plan
    FAILED = "failed"
    INCOMPATIBLE = "incompatible"  # no contract version in common
    BLOCKED = "blocked"  # by the configuration
    SHADOWED = "shadowed"  # another distribution's plugin of that name was chosen


@frozen(kw_only=True)
class PluginRecord:
    """Row of one plugin.

    Attributes:
        kind: its slot, or ``hooks``.
        name: the name used in a configuration.
        value: ``module:attribute`` that it is loaded from.
        distribution: the installed distribution that contains it, empty for an inline plugin.
        version: version of the distribution.
        path: location of the distribution, or the file of an inline plugin.
        state: state of the plugin.
        error: the reason why it failed, is incompatible, blocked or shadowed, in one line.
        descriptor: the descriptor, once loaded or offered by a package's hook.
        inline: True if the configuration names its file.
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
        """Distribution and version, or file, for messages."""
        return f"{self.distribution} {self.version}" if self.distribution else f"the inline plugin {self.value}"


def installed_records() -> list[PluginRecord]:
    """Return a row for each entry point of our groups, read from metadata without importing anything.

    If a distribution is on the path twice (e.g. an editable install and stale metadata), the first one counts, as for
    imports.
    """
    rows: dict[tuple[str, str], PluginRecord] = {}
    points = entry_points()  # once for all groups, each call reads the metadata of all distributions
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
    _add_own_devices(rows)
    return sorted(rows.values(), key=lambda row: (row.label, row.distribution))


_OWN_DEVICES = {"cpu": "slotline.core.device.cpu_plugin:descriptor", "cuda": "slotline.backends.cuda:descriptor"}


def _add_own_devices(rows: dict[tuple[str, str], PluginRecord]) -> None:
    """Add our devices where an editable install is older than its source, and lacks their entry points."""
    own = [row for row in rows.values() if canonical(row.distribution) == PROJECT]
    if not own or any(row.kind is Kind.DEVICE for row in own):
        return
    for name, value in _OWN_DEVICES.items():
        record = PluginRecord(
            kind=Kind.DEVICE,
            name=name,
            value=value,
            distribution=own[0].distribution,
            version=own[0].version,
            path=own[0].path,
        )
        rows[record.label, canonical(record.distribution)] = record


def canonical(distribution: str) -> str:
    """Return a distribution's name in the form that compares equal for all its spellings (PEP 503)."""
    from packaging.utils import canonicalize_name

    return canonicalize_name(distribution)


def _facts_of(dist: Distribution | None) -> tuple[str, str, str]:
    """Return the name, version and location of a distribution.

    Its metadata is parsed for each of the first two.
    """
    return (dist.name, dist.version, str(dist.locate_file(""))) if dist else ("", "", "")
