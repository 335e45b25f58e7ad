"""Conversion of a tree of values to a frozen class, key by key, so that one wrong value hides no other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import attrs

from slotline.registry.config.convert import convert
from slotline.registry.config.faults import Fault, suggestion
from slotline.registry.config.fields import is_table, rest_field, table_fields
from slotline.registry.config.toml_text import brief_value, toml_key
from slotline.registry.config.tree import KeyPath, Leaf, Node, Table, plain

T = TypeVar("T")

_MOST_SUGGESTIONS = 100


def structure(cls: type[T], tree: Node, known: Iterable[KeyPath], path: KeyPath = ()) -> tuple[T | None, list[Fault]]:
    """Return the object of class `cls` that `tree` describes, or None with the faults that prevent it.

    Args:
        cls: a frozen attrs class. Its attributes are the keys.
        tree: the values.
        known: every key of the whole configuration, for suggestions.
        path: the key path of `tree` in the configuration.
    """
    if isinstance(tree, Leaf):
        message = f"{brief_value(tree.value)} is not a table: write [{dotted(path)}] and keys below it"
        return None, [Fault(tree.origin, dotted(path), message)]
    known = tuple(known)
    shape: type = cls
    faults = [] if not tree.items else _unknown_keys(cls, tree, known, path)
    arguments: dict[str, Any] = {}
    for key, item in table_fields(shape).items():
        if key in tree.items:
            value, found = _value(item, tree.items[key], known, (*path, key))
            arguments[item.alias or item.name] = value
            faults += found
        elif item.default is attrs.NOTHING:
            faults.append(Fault(tree.origin, dotted((*path, key)), "is missing and has no default"))
    rest = rest_field(shape)
    if rest is not None:
        arguments[rest.alias or rest.name] = {key: plain(node) for key, node in _rest(cls, tree)}
    return (None, faults) if faults else _construct(cls, arguments, tree, path)


def dotted(path: KeyPath) -> str:
    """Return a key path in TOML notation."""
    return ".".join(map(toml_key, path))


def _rest(cls: type, tree: Table) -> list[tuple[str, Node]]:
    fields = table_fields(cls)
    return [(key, node) for key, node in tree.items.items() if key not in fields and isinstance(node, Table)]


def _unknown_keys(cls: type, tree: Table, known: tuple[KeyPath, ...], path: KeyPath) -> list[Fault]:
    fields = table_fields(cls)
    unknown = {key: node for key, node in tree.items.items() if key not in fields}
    if rest_field(cls) is not None:
        unknown = {key: node for key, node in unknown.items() if isinstance(node, Leaf)}
    place = f"in [{dotted(path)}]" if path else "at the top level"
    faults = []
    for number, (key, node) in enumerate(unknown.items()):
        # A file with more unknown keys is the wrong file, and a search for each would take minutes.
        meant = (suggestion((*path, key), known) or _all_keys(fields)) if number < _MOST_SUGGESTIONS else ""
        faults.append(Fault(node.origin, dotted((*path, key)), f"there is no key {key!r} {place}{meant}"))
    return faults


def _all_keys(fields: Iterable[str]) -> str:
    return f"; it has {', '.join(fields)}" if fields else ""


def _value(
    item: attrs.Attribute[Any], node: Node, known: tuple[KeyPath, ...], path: KeyPath
) -> tuple[Any, list[Fault]]:
    if is_table(item.type):
        return structure(item.type, node, known, path)  # type: ignore[arg-type]
    try:
        value = convert(plain(node), item.type)
        _validate(item, value)
    except (ValueError, TypeError) as error:
        return None, [Fault(node.origin, dotted(path), str(error))]
    return value, []


def _validate(item: attrs.Attribute[Any], value: Any) -> None:
    """Run the key's own validator now: attrs would only do so once every key of the table is right."""
    if item.validator is None or item.converter is not None:
        return
    try:
        item.validator(None, item, value)
    except (ValueError, TypeError):
        raise
    except Exception:  # the validator reads other keys, so the constructor runs it again with them
        return


def _construct(cls: type[T], arguments: dict[str, Any], tree: Table, path: KeyPath) -> tuple[T | None, list[Fault]]:
    try:
        return cls(**arguments), []
    except (ValueError, TypeError) as error:
        return None, [Fault(tree.origin, dotted(path), str(error))]
