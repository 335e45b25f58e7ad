"""Introspection of configuration classes: their keys, types and descriptions."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from slotline.registry.config.toml_text import toml_value
from slotline.registry.config.tree import KeyPath

_SINGULAR: Mapping[Any, str] = types.MappingProxyType(
    {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Any: "a value", type(None): "none"}
)
_PLURAL: Mapping[Any, str] = types.MappingProxyType(
    {bool: "true or false", int: "whole numbers", float: "numbers", str: "texts", Any: "values"}
)


@cache
def table_fields(cls: Any) -> dict[str, attrs.Attribute[Any]]:
    """Return the keys of the table that `cls` describes, with resolved types, without the catch-all for sub-tables."""
    attrs.resolve_types(cls)
    fields = (item for item in attrs.fields(cls) if item.init and "rest" not in item.metadata)
    return {item.metadata.get("key", item.name): item for item in fields}


@cache
def rest_field(cls: Any) -> attrs.Attribute[Any] | None:
    """Return the attribute that takes all sub-tables without a key in `cls`, or None."""
    attrs.resolve_types(cls)
    return next((item for item in attrs.fields(cls) if "rest" in item.metadata), None)


def is_table(kind: Any) -> bool:
    """Return True if a type is a configuration class."""
    return isinstance(kind, type) and attrs.has(kind)


def admits_table(kind: Any) -> bool:
    """Return True if a value of this type can be a TOML table with free keys."""
    members = union_members(kind)
    return any(is_mapping(member) for member in members)


def is_mapping(kind: Any) -> bool:
    """Return True if a type is a mapping, parametrised or bare."""
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Mapping)


def is_array(kind: Any) -> bool:
    """Return True if a type is written as a TOML array."""
    origin = get_origin(kind) or kind
    array = isinstance(origin, type) and issubclass(origin, Collection)
    return array and not issubclass(origin, (str, bytes, Mapping))


def union_members(kind: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the type itself for other types."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def literal_values(kind: Any) -> tuple[Any, ...]:
    """Return all literal values that the type allows."""
    members = (member for member in union_members(kind) if get_origin(member) is Literal)
    return tuple(value for member in members for value in get_args(member))


def key_paths(cls: type, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield every key and table of `cls`, outermost first."""
    for key, item in table_fields(cls).items():
        yield (*prefix, key)
        if is_table(item.type):
            yield from key_paths(item.type, (*prefix, key))  # type: ignore[arg-type]


def describe(kind: Any) -> str:
    """Return a type in words, e.g. ``a whole number or 'auto'``."""
    return " or ".join(_describe_one(member) for member in union_members(kind) if member is not type(None))


def _describe_one(kind: Any) -> str:
    if get_origin(kind) is Literal:
        values = [toml_value(value) for value in get_args(kind)]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if is_mapping(kind):
        return f"a table of {_plural(get_args(kind)[1] if get_args(kind) else Any)}"
    if is_array(kind):
        return f"a list of {_plural(get_args(kind)[0] if get_args(kind) else Any)}"
    other = "a table" if is_table(kind) else str(getattr(kind, "__name__", kind))
    return _SINGULAR.get(kind, other)


def _plural(kind: Any) -> str:
    return _PLURAL.get(kind) or f"({describe(kind)})"
