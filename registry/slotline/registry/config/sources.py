"""The layers that a configuration is made of: files, environment, `--set` and keyword arguments, each as a tree."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slotline.registry.config.faults import Fault, suggestion
from slotline.registry.config.fields import admits_table, is_table, key_paths, rest_field, table_fields
from slotline.registry.config.positions import key_lines
from slotline.registry.config.schema import CONFIG_VERSION, Config
from slotline.registry.config.toml_text import parse_toml_value
from slotline.registry.config.tree import DEFAULT, KeyPath, Leaf, Node, Origin, Table, build, merge, single
from slotline.registry.config.validators import version_is
from slotline.registry.named_path import as_path
from slotline.registry.plain_values import plain_list
from slotline.registry.safe_repr import safe_repr

PREFIX = "SLOTLINE_"
SHORTHANDS: Mapping[str, KeyPath] = MappingProxyType({"SLOTLINE_PLUGINS": ("plugins", "allow")})
"""Variables that hold a comma-separated list for the key beside them."""
NO_KEYS = frozenset({"SLOTLINE_CACHE"})
"""Variables that say something of the machine and not of a run."""

_EMPTY = Table({}, DEFAULT)


def file_layer(path: Path, faults: list[Fault], files: list[str], chain: tuple[Path, ...] = ()) -> Table:
    """The file at `path` over what it extends. Adds to `faults`, and to `files` in the order of merging."""
    tree = _read(path, faults)
    bases = tree.items.get("extends")
    own = _checked_version(
        Table({key: node for key, node in tree.items.items() if key != "extends"}, tree.origin), faults
    )
    here = (*chain, path.resolve())
    below = _EMPTY
    for base in _base_paths(bases, path, faults):
        if base.resolve() in here:
            names = " -> ".join(_shown(step) for step in (*here, base.resolve()))
            faults.append(Fault(_origin(bases), "extends", f"the files extend each other in a circle: {names}"))
        elif not base.is_file():
            faults.append(Fault(_origin(bases), "extends", f"there is no file {base}"))
        else:
            below = merge(below, file_layer(base, faults, files, here))
    files.append(str(path))
    return merge(below, own)


def _shown(path: Path) -> str:
    return os.path.relpath(path)


def _origin(node: Node | None) -> Origin:
    return DEFAULT if node is None else node.origin


def _base_paths(bases: Node | None, path: Path, faults: list[Fault]) -> list[Path]:
    if bases is None:
        return []
    names = bases.value if isinstance(bases, Leaf) else bases
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        faults.append(Fault(bases.origin, "extends", "must be a path or a list of paths, as texts"))
        return []
    return [Path(os.path.normpath(path.parent / name)) for name in names]


def _checked_version(tree: Table, faults: list[Fault]) -> Table:
    """Each file's own version is checked here, since a file above it would hide it."""
    node = tree.items.get("config_version")
    if not isinstance(node, Leaf):
        return tree
    try:
        version_is(CONFIG_VERSION)(None, None, node.value)
    except ValueError as error:
        faults.append(Fault(node.origin, "config_version", str(error)))
        return Table({key: other for key, other in tree.items.items() if key != "config_version"}, tree.origin)
    return tree


def _read(path: Path, faults: list[Fault]) -> Table:
    whole = Origin(kind="file", where=str(path), folder=path.parent)
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        faults.append(Fault(whole, "", f"cannot be read: {error}"))
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        where = f"{path}:{line[1]}" if line else f"{path}"
        faults.append(Fault(Origin(kind="file", where=where), "", f"is not valid TOML: {error}"))
    else:
        return expand_short(build(values, _locate(path, text)))
    return Table({}, whole)


def _locate(path: Path, text: str) -> Any:
    lines, source = key_lines(text), text.splitlines()

    def origin(key: KeyPath) -> Origin:
        line = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), 1)
        shown = source[line - 1].strip() if source else ""
        return Origin(kind="file", where=f"{path}:{line}", text=shown, line=line, folder=path.parent)

    return origin


def expand_short(tree: Table) -> Table:
    """Write out the short form of tables: ``plugins = [...]`` is ``plugins = {inline = [...]}``."""
    items = dict(tree.items)
    for key, item in table_fields(Config).items():
        node = items.get(key)
        if "short" in item.metadata and isinstance(node, Leaf):
            items[key] = Table({item.metadata["short"]: node}, node.origin)
    return Table(items, tree.origin)


def environment_layer(environ: Mapping[str, str], faults: list[Fault]) -> Table:
    """``SLOTLINE_<TABLE>__<KEY>`` variables; a name that matches no key is a fault."""
    tree = _EMPTY
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in NO_KEYS:
            continue
        raw = environ[name]
        origin = Origin(kind="env", where=name, text=raw)
        if name in SHORTHANDS:
            names = [part.strip() for part in raw.split(",") if part.strip()]
            tree = merge(tree, single(SHORTHANDS[name], names, origin))
            continue
        path = tuple(part.lower() for part in name.removeprefix(PREFIX).split("__"))
        if all(path) and _exists(path):
            tree = merge(tree, expand_short(single(path, _bare_value(path, raw), origin)))
        else:
            meant = suggestion(path, key_paths(Config))
            faults.append(Fault(origin, "", f"there is no key {'.'.join(path)!r}{meant}"))
    return tree


def overrides_layer(overrides: Sequence[str], faults: list[Fault]) -> Table:
    """``--set a.b=value``; the value is TOML, or a text without quotes."""
    tree = _EMPTY
    for override in overrides:
        origin = Origin(kind="set", where=f"--set {override}", text=override)
        key, equals, raw = override.partition("=")
        path = _parse_key(key)
        if not equals or path is None:
            faults.append(Fault(origin, "", "is not of the form key=value, such as cache.block_size=16"))
            continue
        tree = merge(tree, expand_short(single(path, _bare_value(path, raw.strip()), origin)))
    return tree


def arguments_layer(values: Mapping[str, Any]) -> Table:
    """Keyword values with dotted or nested keys."""
    tree = _EMPTY
    for key, value in values.items():
        path = _parse_key(key) or (key,)
        origin = Origin(kind="argument", where=f"argument {key}", text=safe_repr(value, 200))
        tree = merge(tree, expand_short(single(path, _as_toml(value), origin)))
    return tree


def _as_toml(value: Any) -> Any:
    value = plain_list(value)
    if isinstance(value, os.PathLike):
        path = as_path(value)
        return value if path is None else path
    if isinstance(value, Mapping):
        return {str(key): _as_toml(inner) for key, inner in value.items()}
    return [_as_toml(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _parse_key(key: str) -> KeyPath | None:
    try:
        node: Any = tomllib.loads(f"{key.strip()} = 0")
    except tomllib.TOMLDecodeError:
        return None
    path: list[str] = []
    while isinstance(node, dict) and len(node) == 1:
        name, node = next(iter(node.items()))
        path.append(name)
    return tuple(path) if node == 0 else None


def _bare_value(path: KeyPath, raw: str) -> Any:
    """`raw` as TOML, else as a text. Where only a text is possible, `123` and `true` are texts too."""
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
