"""File layer of a configuration: a file merged over the files that it extends, each read once."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import field, frozen

from slotline.registry.config.faults import Fault
from slotline.registry.config.file_text import UnreadableError, is_shell_pipe, read_text
from slotline.registry.config.inline_trust import KEY as TRUST
from slotline.registry.config.nesting import TOO_DEEP, too_deep_at, too_deep_key
from slotline.registry.config.positions import key_lines
from slotline.registry.config.schema import CONFIG_VERSION
from slotline.registry.config.short_form import expand_short
from slotline.registry.config.structure import dotted
from slotline.registry.config.tree import DEFAULT, KeyPath, Leaf, Node, Origin, Table, build, find, merge
from slotline.registry.config.validators import version_is

MAX_CHAIN = 32
"""Files that extend each other, one after another."""


@frozen
class Layer:
    """File merged over those that it extends.

    Attributes:
        tree: the values.
        length: files in the longest chain, this file included.
    """

    tree: Table
    length: int = 1


@frozen(eq=False)
class FileReader:
    """Reader of the files of one configuration.

    Attributes:
        faults: list of faults, extended by the reader.
        warnings: list of settings without effect, extended by the reader.
        names: the files read, in the order of merging.
    """

    faults: list[Fault]
    warnings: list[str]
    names: list[str]
    _layers: dict[Path, Layer] = field(factory=dict, init=False)

    def read(self, path: Path) -> Table:
        """Return the file at `path` merged over the files that it extends."""
        return self._layer(path, real_path(path), (), None).tree

    def _layer(self, path: Path, real: Path, chain: tuple[Path, ...], named: Origin | None) -> Layer:
        """Return the layer of a file. Files that were already read are found by their real path.

        Args:
            path, real: the file as named, and without symbolic links.
            chain: the real paths of the files that extend it, outermost first.
            named: the key `extends` that names it. None for the first file.
        """
        if real in self._layers:
            return self._layers[real]
        own = self._own(path, real, named)
        bases = own.items.get("extends")
        below, length = Table({}, DEFAULT), 0
        for base, target in self._bases(bases, path):
            layer = self._base(base, target, (*chain, real), _origin(bases))
            below, length = merge(below, layer.tree), max(length, layer.length)
        own = Table({key: node for key, node in own.items.items() if key != "extends"}, own.origin)
        self.names.append(str(path))
        self._layers[real] = Layer(merge(below, own), length + 1)
        return self._layers[real]

    def _base(self, base: Path, real: Path, chain: tuple[Path, ...], named: Origin) -> Layer:
        nothing = Layer(Table({}, DEFAULT), 0)
        if real in chain:
            self._fault(named, f"the files extend each other in a circle: {_names((*chain, real))}")
            return nothing
        if len(chain) >= MAX_CHAIN:
            self._too_long(named, (*chain, real))
            return nothing
        layer = self._layer(base, real, chain, named)
        if len(chain) + layer.length > MAX_CHAIN:  # read before, through a shorter chain
            self._too_long(named, (*chain, real))
            return nothing
        return layer

    def _too_long(self, named: Origin, chain: Sequence[Path]) -> None:
        message = f"more than {MAX_CHAIN} files extend each other, one after another: {_names(chain)}"
        self.faults.append(Fault(named, "extends", message, fix="put several of these files into one"))

    def _fault(self, origin: Origin, message: str) -> None:
        self.faults.append(Fault(origin, "extends", message))

    def _bases(self, node: Node | None, path: Path) -> list[tuple[Path, Path]]:
        """Return the files that a file extends, as named and without symbolic links.

        The last mention of a file counts.
        """
        if node is None:
            return []
        names = node.value if isinstance(node, Leaf) else node
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self._fault(node.origin, "must be a path or a list of paths, as texts")
            return []
        folder = folder_of(path)
        found = (Path(os.path.normpath(folder / os.path.expanduser(name))) for name in reversed(names))
        distinct: dict[Path, Path] = {}
        for base in found:
            distinct.setdefault(real_path(base), base)
        return [(base, real) for real, base in reversed(distinct.items())]

    def _own(self, path: Path, real: Path, named: Origin | None) -> Table:
        """Return the values of one file, without those that are allowed only in the first file."""
        own = self._checked_version(self._values(path, real, named))
        trust = None if named is None else find(own, TRUST)
        if trust is None:
            return own
        self.warnings.append(f"{trust.origin.where}: {dotted(TRUST)}: has no effect in a file that another one extends")
        return _without(own, TRUST)

    def _values(self, path: Path, real: Path, named: Origin | None) -> Table:
        whole = Origin(kind="file", where=str(path), folder=folder_of(path), file=real)
        try:
            text = read_text(path)
            return expand_short(_parsed(text, whole))
        except UnreadableError as error:
            if error.line:
                self.faults.append(Fault(_at(whole, error.line), "", str(error)))
            elif named is not None:
                self._fault(named, str(error))
            else:
                self.faults.append(Fault(whole, "", f"cannot be read: {error}"))
        except _FaultyError as error:
            self.faults.append(error.fault)
        return Table({}, whole)

    def _checked_version(self, tree: Table) -> Table:
        """Check the version of one file, which a file that extends it would hide later."""
        node = tree.items.get("config_version")
        if not isinstance(node, Leaf):
            return tree
        try:
            version_is(CONFIG_VERSION)(None, None, node.value)
        except ValueError as error:
            self.faults.append(Fault(node.origin, "config_version", str(error)))
            return _without(tree, ("config_version",))
        return tree


def expanded(path: Path) -> Path:
    """Return a path with `~` replaced by the home folder."""
    return Path(os.path.expanduser(path))


def folder_of(path: Path) -> Path:
    """Return the folder that relative paths in a file refer to."""
    return Path() if is_shell_pipe(path) else path.parent


def real_path(path: Path) -> Path:
    """Return an absolute path without symbolic links, as far as they can be followed."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError):  # the path contains a NUL, which reading it reports
        return path


class _FaultyError(Exception):
    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


def _parsed(text: str, whole: Origin) -> Table:
    at = too_deep_at(text)
    if at is not None:
        raise _FaultyError(Fault(_at(whole, _line(text, at)), "", TOO_DEEP))
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        place = int(line[1]) if line else _line(text, len(text.rstrip()))
        raise _FaultyError(Fault(_at(whole, place), "", f"is not valid TOML: {error}")) from error
    except ValueError as error:  # more digits than Python converts to a number
        digits = re.search(r"\d[\d_]{999,}", text)
        place = _line(text, digits.start()) if digits else 0
        raise _FaultyError(Fault(_at(whole, place), "", f"holds a number that is too long: {error}")) from error
    origin = _locate(text, whole)
    deep = too_deep_key(values)
    if deep is not None:
        raise _FaultyError(Fault(origin(deep), "", TOO_DEEP))
    return build(values, origin)


def _locate(text: str, whole: Origin) -> Any:
    lines, source = key_lines(text), text.splitlines()

    def origin(key: KeyPath) -> Origin:
        line = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), 1)
        return attrs.evolve(_at(whole, line), text=source[line - 1].strip() if source else "")

    return origin


def _at(whole: Origin, line: int) -> Origin:
    return attrs.evolve(whole, where=f"{whole.where}:{line}", line=line) if line else whole


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _origin(node: Node | None) -> Origin:
    return DEFAULT if node is None else node.origin


def _names(chain: Sequence[Path]) -> str:
    shown = [os.path.relpath(path) for path in chain]
    return " -> ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]])


def _without(tree: Table, path: KeyPath) -> Table:
    key, *rest = path
    items = dict(tree.items)
    node = items.pop(key)
    if rest and isinstance(node, Table):
        items[key] = _without(node, tuple(rest))
    return Table(items, tree.origin)
