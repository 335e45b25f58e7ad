"""Layers of a configuration above its files: environment, `--set` and keyword arguments, each as a tree."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from slotline.registry.config.faults import Fault, is_near, suggestion
from slotline.registry.config.fields import admits_table, is_table, key_paths, rest_field, table_fields
from slotline.registry.config.nesting import MAX_NESTING, TOO_DEEP, too_deep_at, too_deep_key
from slotline.registry.config.schema import Config
from slotline.registry.config.short_form import expand_short
from slotline.registry.config.toml_text import parse_toml_value
from slotline.registry.config.tree import DEFAULT, KeyPath, Origin, Table, merge, single
from slotline.registry.named_path import as_path
from slotline.registry.plain_values import plain_list
from slotline.registry.safe_repr import safe_repr

PREFIX = "SLOTLINE_"
SHORTHANDS: Mapping[str, KeyPath] = MappingProxyType({"SLOTLINE_PLUGINS": ("plugins", "allow")})
"""Variables that hold a comma-separated list for the key beside them."""
NO_KEYS = frozenset({"SLOTLINE_ADMIN_KEY", "SLOTLINE_API_KEY", "SLOTLINE_CACHE"})
"""Variables that say something of the machine and not of a run."""

_EMPTY = Table({}, DEFAULT)
_LONGEST_PLACE = 120
_RENAME = "unset it, or rename it if it belongs to another program"


def environment_layer(environ: Mapping[str, str], faults: list[Fault], strangers: list[Fault]) -> Table:
    """Return the tree of ``SLOTLINE_<TABLE>__<KEY>`` variables.

    A name that is nearly a key is a fault. Any other name may be another program's variable.

    Args:
        environ: names and values.
        faults: list of faults, extended by this function.
        strangers: list of variables that are not keys and resemble none, extended by this function.
    """
    tree = _EMPTY
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in NO_KEYS:
            continue
        raw = environ[name]
        origin = Origin(kind="env", where=_brief(name), text=raw)
        if name in SHORTHANDS:
            names = [part.strip() for part in raw.split(",") if part.strip()]
            tree = merge(tree, single(SHORTHANDS[name], names, origin))
            continue
        path = tuple(part.lower() for part in name.removeprefix(PREFIX).split("__"))
        if len(path) > MAX_NESTING:
            faults.append(Fault(origin, "", TOO_DEEP))
        elif all(path) and _exists(path):
            tree = merge(tree, _given(path, raw, origin, faults))
        else:
            known = tuple(key_paths(Config))
            message = f"there is no key {'.'.join(path)!r}{suggestion(path, known)}"
            if (path[:1] in known and len(path) > 1) or is_near(path, known):
                faults.append(Fault(origin, "", message))
            else:
                strangers.append(Fault(origin, "", message, fix=_RENAME))
    return tree


def overrides_layer(overrides: Sequence[str], faults: list[Fault]) -> Table:
    """Return the tree of ``--set a.b=value`` arguments. A value is TOML, or text without quotes."""
    tree = _EMPTY
    for override in overrides:
        origin = Origin(kind="set", where=f"--set {_brief(override)}", text=override)
        key, equals, raw = override.partition("=")
        path = _parse_key(key)
        if too_deep_at(key) is not None:
            faults.append(Fault(origin, "", TOO_DEEP))
            continue
        if not equals or path is None:
            faults.append(Fault(origin, "", "is not of the form key=value, such as cache.block_size=16"))
            continue
        tree = merge(tree, _given(path, raw.strip(), origin, faults))
    return tree


def arguments_layer(values: Mapping[str, Any], faults: list[Fault]) -> Table:
    """Return the tree of keyword values with dotted or nested keys."""
    tree = _EMPTY
    for key, value in values.items():
        path = _parse_key(key) or (key,)
        origin = Origin(kind="argument", where=f"argument {_brief(key)}")
        if too_deep_key(value) is not None:
            faults.append(Fault(origin, "", TOO_DEEP))
            continue
        origin = attrs.evolve(origin, text=safe_repr(value, 200))
        tree = merge(tree, expand_short(single(path, _as_toml(value), origin)))
    return tree


def _given(path: KeyPath, raw: str, origin: Origin, faults: list[Fault]) -> Table:
    """Return the tree of one key with a value given as text, or add a fault and return the empty tree."""
    if _type_of(path) is not str and too_deep_at(raw) is not None:
        faults.append(Fault(origin, "", TOO_DEEP))
        return _EMPTY
    return expand_short(single(path, _bare_value(path, raw), origin))


def _brief(text: str) -> str:
    return text if len(text) <= _LONGEST_PLACE else f"{text[:_LONGEST_PLACE]}..."


def _as_toml(value: Any) -> Any:
    value = plain_list(value)
    if isinstance(value, os.PathLike):
        path = as_path(value)
        return value if path is None else path
    if isinstance(value, Mapping):
        return {str(key): _as_toml(inner) for key, inner in value.items()}
    return [_as_toml(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _parse_key(key: str) -> KeyPath | None:
    if too_deep_at(key) is not None:
        return None
    try:
        node: Any = tomllib.loads(f"{key.strip()} = 0")
    except ValueError:
        return None
    path: list[str] = []
    while isinstance(node, dict) and len(node) == 1:
        name, node = next(iter(node.items()))
        path.append(name)
    return tuple(path) if node == 0 else None


def _bare_value(path: KeyPath, raw: str) -> Any:
    """Return `raw` as TOML, else as text. If only text is possible, `123` and `true` are texts too."""
    value = parse_toml_value(raw)
    if value is None or (not isinstance(value, str) and _type_of(path) is str):
        return raw
    return value


def _type_of(path: KeyPath) -> Any:
    cls: Any = Config
    for key in path:
        item = table_fields(cls).get(key) if is_table(cls) else None
        if item is None:
            return None
        cls = item.type
    return cls


def _exists(path: KeyPath) -> bool:
    cls: Any = Config
    for depth, key in enumerate(path):
        item = table_fields(cls).get(key)
        if item is None:
            return rest_field(cls) is not None and depth < len(path) - 1
        if not is_table(item.type):
            return depth == len(path) - 1 or admits_table(item.type)
        cls = item.type
    return True
