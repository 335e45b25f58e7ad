"""Faults of a configuration: collected while loading, raised together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import get_args

from attrs import frozen

from slotline.registry.config.tree import KeyPath, Origin, OriginKind
from slotline.registry.errors import ConfigError


@frozen
class Fault:
    """One thing that is wrong: where, at which dotted key, and what."""

    origin: Origin
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin.where, self.key, self.message) if part)


def raise_faults(faults: Sequence[Fault]) -> None:
    """Raise one ConfigError that lists all `faults` in the order of the layers and lines; nothing if there are none."""
    if not faults:
        return
    ordered = sorted(faults, key=_position)
    count = "1 error" if len(ordered) == 1 else f"{len(ordered)} errors"
    lines = "".join(f"\n  {fault}" for fault in ordered)
    raise ConfigError(f"{count} in the configuration:{lines}", faults=ordered)


def _position(fault: Fault) -> tuple[int, str, int]:
    origin = fault.origin
    return get_args(OriginKind).index(origin.kind), origin.where.rpartition(":")[0], origin.line


def suggestion(path: KeyPath, known: Iterable[KeyPath]) -> str:
    """`; did you mean ...?` for a key that does not exist, or nothing.

    Tried in turn: a similar path if the table does not exist either, the same name in another table, a similar one in
    the same table, a similar one anywhere.
    """
    known = tuple(known)
    if len(path) > 1 and path[:-1] not in known:
        close = difflib.get_close_matches(".".join(path), map(".".join, known), n=1, cutoff=0.7)
        if close:
            return f"; did you mean {close[0]!r}?"
    same_table = tuple(other for other in known if other[:-1] == path[:-1])
    for names, cutoff in ((known, 1.0), (same_table, 0.6), (known, 0.75)):
        close = difflib.get_close_matches(path[-1], {other[-1] for other in names}, n=1, cutoff=cutoff)
        if close:
            meant = sorted(".".join(other) for other in names if other[-1] == close[0])
            return f"; did you mean {' or '.join(map(repr, meant))}?"
    return ""


def similar(name: str, names: Iterable[str]) -> str:
    """`; did you mean ...?` for a name in a list, or nothing."""
    close = difflib.get_close_matches(name, sorted(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
