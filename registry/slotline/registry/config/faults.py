"""Faults of a configuration: collected while loading, raised together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
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

    Tried in turn: a similar path if the table does not exist either; a similar name in the same table and the same name
    in others; a similar name anywhere.
    """
    known = tuple(known)
    meant: Iterable[KeyPath] = ()
    if len(path) > 1 and path[:-1] not in known:
        meant = _close(".".join(path), {".".join(other): (other,) for other in known}, 0.7)
    if not meant:
        same_name = [other for other in known if other[-1] == path[-1]]
        meant = {*same_name, *_close(path[-1], _by_name(other for other in known if other[:-1] == path[:-1]), 0.6)}
    names = sorted(".".join(other) for other in meant or _close(path[-1], _by_name(known), 0.75))
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""


def _by_name(paths: Iterable[KeyPath]) -> dict[str, tuple[KeyPath, ...]]:
    names: dict[str, tuple[KeyPath, ...]] = {}
    for path in paths:
        names[path[-1]] = (*names.get(path[-1], ()), path)
    return names


def _close(name: str, known: Mapping[str, tuple[KeyPath, ...]], cutoff: float) -> tuple[KeyPath, ...]:
    found = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return known[found[0]] if found else ()


def similar(name: str, names: Iterable[str]) -> str:
    """`; did you mean ...?` for a name in a list, or nothing."""
    close = difflib.get_close_matches(name, sorted(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
