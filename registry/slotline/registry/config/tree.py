"""Configuration values as a tree in which every node knows its origin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from attrs import field, frozen

KeyPath: TypeAlias = tuple[str, ...]
OriginKind: TypeAlias = Literal["default", "file", "env", "set", "argument"]


@frozen(kw_only=True)
class Origin:
    """Origin of a value.

    Attributes:
        kind: the layer. The later of default, file, env, set, argument wins.
        where: the place to show, e.g. ``run.toml:12``.
        text: the line or argument as written, empty for a default.
        line: line number in the file, else 0.
        folder: the folder that a relative path in the value refers to. None for the current folder.
        file: the file, without symbolic links. None for other layers.
    """

    kind: OriginKind
    where: str
    text: str = ""
    line: int = 0
    folder: Path | None = None
    file: Path | None = None


DEFAULT = Origin(kind="default", where="default")


@frozen
class Leaf:
    """Value that is not a table."""

    value: Any
    origin: Origin


@frozen
class Table:
    """Table, possibly empty."""

    items: Mapping[str, Node] = field(repr=False)
    origin: Origin


Node: TypeAlias = Leaf | Table


def build(values: Mapping[str, Any], origin_of: Callable[[KeyPath], Origin], path: KeyPath = ()) -> Table:
    """Return the tree of nested mappings. `origin_of` is called for each key path."""
    items: dict[str, Node] = {}
    for key, value in values.items():
        inner = (*path, str(key))
        nested = isinstance(value, Mapping)
        items[str(key)] = build(value, origin_of, inner) if nested else Leaf(value, origin_of(inner))
    return Table(items, origin_of(path))


def merge(low: Table, high: Table) -> Table:
    """Return `high` merged over `low`. Tables merge key by key, other values are replaced."""
    items = dict(low.items)
    for key, node in high.items.items():
        below = items.get(key)
        both = isinstance(below, Table) and isinstance(node, Table)
        items[key] = merge(below, node) if both else node  # type: ignore[arg-type]
    return Table(items, high.origin)


def leaves(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Yield every value below `node`. An empty table counts as a value."""
    if isinstance(node, Leaf) or not node.items:
        yield path, node
        return
    for key, inner in node.items.items():
        yield from leaves(inner, (*path, key))


def plain(node: Node) -> Any:
    """Return the values without origins, as TOML gave them."""
    if isinstance(node, Leaf):
        return node.value
    return {key: plain(inner) for key, inner in node.items.items()}


def find(node: Node, path: KeyPath) -> Node | None:
    """Return the node at `path` below `node`, or None."""
    for key in path:
        if isinstance(node, Leaf) or key not in node.items:
            return None
        node = node.items[key]
    return node


def single(path: KeyPath, value: Any, origin: Origin) -> Table:
    """Return a tree with only `value` at `path`."""
    for key in reversed(path):
        value = {key: value}
    return build(value, lambda _path: origin)
