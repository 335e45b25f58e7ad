"""Resolution of a plugin's name: an installed plugin, an object in a module, or an object in a file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from attrs import frozen

from slotline.registry.config.faults import similar
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import PluginConflictError, PluginLoadError, PluginNotFoundError
from slotline.registry.inline import inline_records
from slotline.registry.loading import import_dotted, to_descriptor
from slotline.registry.records import PluginRecord, PluginState, installed_records
from slotline.testing.check import CHECK_MODULES

KINDS = tuple(CHECK_MODULES)
"""The kinds that have checks."""
BRIDGES = "slotline.bridges"
"""Entry points of functions that make an attention backend and the spec of its cache of a text behind their name."""
_SECOND = (Kind.DEVICE, Kind.EXTENSION, Kind.LINEAR, Kind.EXPERTS)
"""Kinds whose plugins need their kind in front where a plugin of another kind has the same name, as with `cpu`."""


@frozen
class Target:
    """Plugin and its source.

    Attributes:
        name: the text that names it.
        descriptor: the plugin's descriptor.
        distribution, version: source of the plugin, empty if it is not installed.
        companion: the spec that lays out an attention backend's cache, if a bridge made one for it.
    """

    name: str
    descriptor: Descriptor[Any]
    distribution: str = ""
    version: str = ""
    companion: Descriptor[Any] | None = None


def find_target(text: str, *, kind: Kind | None = None, folder: Path | None = None) -> Target:
    """Return the plugin that a text names.

    Args:
        text: ``NAME`` or ``kind:NAME`` of an installed plugin, ``package.module:attribute``, ``./file.py:attribute``.
            ``BRIDGE:TEXT`` is a class written for another engine, as in ``vllm:package.module:attribute``.
        kind: the kind to search for a bare name, None for every kind.
        folder: the folder that a relative file refers to, None for the current folder.

    Raises:
        PluginNotFoundError: with a suggestion.
        PluginConflictError: if several plugins have the name.
        PluginLoadError: if it cannot be loaded, with its cause.
    """
    before, colon, after = text.partition(":")
    bridges = entry_points(group=BRIDGES)
    if colon and before in bridges.names:
        found = _over(text, bridges[before], after)
    elif before.endswith(".py") or (colon and "/" in before):
        found = _from_file(text, folder or Path.cwd())
    elif colon and before in {item.value for item in Kind}:
        found = _installed(after, [Kind(before)])
    elif colon or "." in text:
        found = _from_module(text if colon else f"{text}:descriptor")
    else:
        found = _installed(text, KINDS if kind is None else [kind])
    if kind is not None and found.descriptor.kind is not kind:
        raise PluginLoadError(f"{text!r} is a plugin of kind {found.descriptor.kind.value!r}, not {kind.value!r}")
    return found


def _over(text: str, bridge: EntryPoint, after: str) -> Target:
    """Return what a bridge makes of a text: an attention backend, and the spec of its cache."""
    make = import_dotted(bridge.value, f"the bridge {bridge.name!r}")
    backend, spec = make(after)
    return Target(text, backend, companion=spec)


def _from_file(text: str, folder: Path) -> Target:
    path, _, attribute = text.partition(":")
    where = folder / Path(path).expanduser()
    (row,) = inline_records([f"{where}:{attribute or 'descriptor'}"])
    assert row.descriptor is not None  # an inline row is loaded, or an error
    return Target(text, row.descriptor)


def _from_module(text: str) -> Target:
    what = f"the plugin {text!r}"
    try:
        descriptor = to_descriptor(import_dotted(text, what), what)
    except PluginLoadError as error:
        file = Path(f"{text.partition(':')[0].replace('.', '/')}.py")
        if isinstance(error.__cause__, ModuleNotFoundError) and file.is_file():
            fix = f"name the file: ./{file.as_posix()}:{text.partition(':')[2]}, or install the package"
            raise PluginLoadError(error.message, fix=fix) from error.__cause__
        raise
    for row in installed_records():
        if (row.kind, row.value) == (descriptor.kind, text):
            return Target(text, descriptor, row.distribution, row.version)
    return Target(text, descriptor)


def _installed(name: str, kinds: Sequence[Kind]) -> Target:
    rows = [row for row in installed_records() if row.kind in kinds and row.name == name]
    _refuse_conflict(name, rows)
    registry = PluginRegistry.discover(tolerant=True)
    labels = [row for row in registry.records() if row.kind in kinds and row.name == name]
    labels = [row for row in labels if row.kind not in _SECOND] or labels
    if not labels:
        _refuse_unknown(name, kinds, registry)
    if len({row.label for row in labels}) > 1:
        raise PluginConflictError(
            f"there are several plugins {name!r}: {', '.join(sorted(row.label for row in labels))}",
            fix=f"name one with its kind, such as {labels[0].label}",
        )
    row = next((row for row in labels if row.state is not PluginState.SHADOWED), labels[0])
    assert isinstance(row.kind, Kind)  # they are taken from `kinds`
    return Target(row.label, registry.descriptor(row.kind, name), row.distribution, row.version)


def _refuse_conflict(name: str, rows: Sequence[PluginRecord]) -> None:
    """Refuse two distributions with one plugin of a kind. The suite tests one plugin, so the user must choose."""
    for row in rows:
        same = [other for other in rows if other.label == row.label]
        if len(same) > 1:
            raise PluginConflictError(
                f"plugin {row.label!r} is offered by {' and '.join(f'{one.source} ({one.path})' for one in same)}",
                fix=f"name the object: {' or '.join(one.value for one in same)}; or uninstall the other",
            )


def _refuse_unknown(name: str, kinds: Sequence[Kind], registry: PluginRegistry) -> None:
    names = sorted({other for kind in kinds for other in registry.names(kind)})
    what = f"{kinds[0].value} plugin" if len(kinds) == 1 else "plugin"
    raise PluginNotFoundError(
        f"there is no {what} {name!r}{similar(name, names)}",
        fix=f"use one of: {', '.join(names) or '(none)'}; or package.module:attribute, or ./file.py:attribute",
    )
