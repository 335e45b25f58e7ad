"""Faults of a configuration: collected while loading, raised together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from attrs import frozen

from slotline.registry.config.tree import KeyPath, Origin, OriginKind
from slotline.registry.errors import ConfigError

MOST_SHOWN = 100
_SURELY = 0.8


@frozen
class Fault:
    """Fault in a configuration: its place, its dotted key, a description, and a fix if that takes a sentence."""

    origin: Origin
    key: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin.where, self.key, self.message) if part)


def raise_faults(faults: Sequence[Fault]) -> None:
    """Raise one ConfigError that lists `faults` in the order of the layers and lines, if there are any.

    The message lists the first `MOST_SHOWN`. The error's attribute `faults` has all of them.
    """
    if not faults:
        return
    ordered = sorted(faults, key=_position)
    count = "1 error" if len(ordered) == 1 else f"{len(ordered)} errors"
    lines = "".join(f"\n  {fault}" for fault in ordered[:MOST_SHOWN])
    more = f"\n  and {len(ordered) - MOST_SHOWN:,} more" if len(ordered) > MOST_SHOWN else ""
    fixes = dict.fromkeys(fault.fix for fault in ordered[:MOST_SHOWN] if fault.fix)
    raise ConfigError(f"{count} in the configuration:{lines}{more}", fix="; ".join(fixes) or None, faults=ordered)


def _position(fault: Fault) -> tuple[int, str, int]:
    origin = fault.origin
    return get_args(OriginKind).index(origin.kind), origin.where.rpartition(":")[0], origin.line


def suggestion(path: KeyPath, known: Iterable[KeyPath]) -> str:
    """Return `; did you mean ...?` for an unknown key, or an empty string.

    Candidates in this order: a similar path if the table does not exist either, a similar name in the same table, the
    same name in other tables, a similar name anywhere.
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


def is_near(path: KeyPath, known: Iterable[KeyPath]) -> bool:
    """Return True if an unknown key is most likely a misspelt key, or a key of another table."""
    known = tuple(known)
    near = _close(".".join(path), {".".join(other): (other,) for other in known}, _SURELY)
    return bool(near or (len(path) == 1 and _close(path[0], _by_name(known), _SURELY)))


def _by_name(paths: Iterable[KeyPath]) -> dict[str, tuple[KeyPath, ...]]:
    names: dict[str, tuple[KeyPath, ...]] = {}
    for path in paths:
        names[path[-1]] = (*names.get(path[-1], ()), path)
    return names


def _close(name: str, known: Mapping[str, tuple[KeyPath, ...]], cutoff: float) -> tuple[KeyPath, ...]:
    found = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return known[found[0]] if found else ()


def similar(name: str, names: Iterable[str]) -> str:
    """Return `; did you mean ...?` for a name in a list, or an empty string."""
    close = difflib.get_close_matches(name, sorted(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
