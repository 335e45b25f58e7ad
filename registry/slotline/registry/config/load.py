"""Loader of a configuration: layers are merged, typed and checked, and every value has its origin."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import attrs
from attrs import field, frozen

from slotline.registry.config.faults import Fault, raise_faults
from slotline.registry.config.fields import is_table, key_paths, rest_field, table_fields
from slotline.registry.config.files import FileReader, expanded, folder_of, real_path
from slotline.registry.config.inline_trust import refused_inline
from slotline.registry.config.plugin_tables import absent_plugins, options_path
from slotline.registry.config.schema import Config, PluginsConfig
from slotline.registry.config.sources import arguments_layer, environment_layer, overrides_layer
from slotline.registry.config.structure import dotted, structure
from slotline.registry.config.toml_text import toml_value
from slotline.registry.config.tree import DEFAULT, KeyPath, Leaf, Origin, Table, find, leaves, merge, plain
from slotline.registry.descriptor import Kind
from slotline.registry.errors import ConfigError
from slotline.registry.named_path import as_path, explain_name
from slotline.registry.safe_repr import safe_repr

T = TypeVar("T")


@frozen(kw_only=True, eq=False)
class LoadedConfig:
    """Configuration and the origins of its values.

    Attributes:
        config: the user's settings, which are never modified.
        origins: the origin of each value by dotted key, defaults included. For a table with free keys, of the table and
            of each value in it.
        files: the files read, in the order of merging, so that the last one wins.
        warnings: oddities that are not errors.
        tree: the values as written.
    """

    config: Config
    origins: Mapping[str, Origin]
    files: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tree: Table = field(repr=False)

    @property
    def plugin_rules(self) -> PluginsConfig:
        """Rules for plugins that may load."""
        return self.config.plugins

    @property
    def inline_plugins(self) -> tuple[str, ...]:
        """``path:attribute`` of each inline plugin, its path resolved against the file that names it."""
        return tuple(_resolved(text, self.origins["plugins.inline"]) for text in self.config.plugins.inline)

    @property
    def inline_files(self) -> tuple[str, ...]:
        """Sentence for each inline plugin: its file, the attribute taken from it, and the place that names it."""
        where = self.origins["plugins.inline"].where
        found = (text.rpartition(":") for text in self.inline_plugins)
        return tuple(f"{_with_target(Path(file))} runs for {name}, named in {where}" for file, _, name in found)

    def path(self, key: str) -> Path | None:
        """Return the path in a key like ``model``, resolved against the file that names it, or None if it is empty."""
        value: Any = self.config
        for name in key.split("."):
            value = getattr(value, name)
        return Path(_resolved(value, self.origins[key])) if value else None

    def paths(self, key: str) -> dict[str, Path]:
        """Return the paths in a table like ``lora.adapters``, each resolved against the file that names it."""
        value: Any = self.config
        for name in key.split("."):
            value = getattr(value, name)
        at = tuple(key.split("."))
        return {name: Path(_resolved(text, self.origins[dotted((*at, name))])) for name, text in value.items()}

    @overload
    def options(self, kind: Kind, name: str, options_class: type[T], beside: Sequence[type] = ()) -> T: ...
    @overload
    def options(self, kind: Kind, name: str, options_class: None, beside: Sequence[type] = ()) -> None: ...
    def options(self, kind: Kind, name: str, options_class: type[T] | None, beside: Sequence[type] = ()) -> T | None:
        """Return the plugin's own table as an object of its class, with defaults for missing keys.

        Args:
            kind, name: the plugin.
            options_class: its attrs class, or None if it takes no options.
            beside: the classes of plugins that share the table. Keys that only they know are ignored.

        Raises:
            ConfigError: listing every wrong key, or any key if the plugin takes no options.
        """
        path = options_path(kind, name)
        tree = find(self.tree, path) or Table({}, DEFAULT)
        if isinstance(tree, Table) and beside:
            classes: tuple[type, ...] = () if options_class is None else (options_class,)
            own, theirs = ({key for one in given for key in table_fields(one)} for given in (classes, beside))
            kept = {key: node for key, node in tree.items.items() if key in own or key not in theirs}
            tree = Table(kept, tree.origin)
        if options_class is None:
            raise_faults(_surplus(path, tree, f"the {kind.value} plugin {name!r} takes no options"))
            return None
        known = (*key_paths(Config), *key_paths(options_class, path))
        options, faults = structure(options_class, tree, known, path)
        raise_faults(faults)
        return options

    def check_plugin_tables(self, installed: Mapping[Kind, Collection[str]]) -> LoadedConfig:
        """Return this configuration with a warning for each table of a plugin that is not installed.

        Raises:
            ConfigError: in strict mode, or if the table itself requests the plugin, as ``[logits_processors.NAME]``
                does.
        """
        absent = list(absent_plugins(self.tree, installed))
        raise_faults([fault for asked, fault in absent if asked or self.config.strict])
        return attrs.evolve(self, warnings=(*self.warnings, *(str(fault) for _, fault in absent)))


def load_config(
    path: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Read, merge and check a configuration.

    Later layers win: defaults, the files that the file extends, the file, the environment, `overrides`, `values`.

    Args:
        path: a TOML file, or None.
        overrides: ``a.b=value`` as for ``--set``. The value is TOML, or text without quotes.
        values: keyword values, with dotted or nested keys.
        environ: the environment. None means that of the process.

    Raises:
        ConfigError: listing every fault with file and line, key, value and a suggestion.
    """
    faults: list[Fault] = []
    files: list[str] = []
    warnings: list[str] = []
    strangers: list[Fault] = []
    tree = Table({}, DEFAULT)
    overrides = _texts(overrides)
    first = None if path is None else expanded(_file(path))
    if first is not None:
        tree = merge(tree, FileReader(faults, warnings, files).read(first))
    tree = merge(tree, environment_layer(os.environ if environ is None else environ, faults, strangers))
    tree = merge(tree, overrides_layer(overrides, faults))
    tree = merge(tree, arguments_layer(values or {}, faults))
    config, found = structure(Config, tree, key_paths(Config))
    if first is not None:
        found += refused_inline(tree, real_path(first), folder_of(first))
    if plain(find(tree, ("strict",)) or Leaf(False, DEFAULT)) is True:
        found += strangers
    raise_faults(faults + found)
    if config is None:  # structure() returns a fault whenever it returns no object
        raise RuntimeError("the configuration was not built, and no fault says why")
    origins = dict(_origins(config, Config, tree))
    warnings += [f"{fault}; {fault.fix}" for fault in strangers]
    return LoadedConfig(config=config, origins=origins, files=tuple(files), warnings=tuple(warnings), tree=tree)


def _file(path: Any) -> Path:
    """Return the path of a configuration file.

    Raises:
        ConfigError: if it is not a path, or the path of something else.
    """
    text = as_path(path)
    if not text:
        raise ConfigError(f"{safe_repr(path)} is no path", fix="name a TOML file or a checkpoint folder, or None")
    if os.path.isdir(text):
        raise ConfigError(
            f"{text!r} is a folder and no configuration file", fix=f"name a model as such: model = {text!r}"
        )
    said = explain_name(text)
    if said is None and not text.endswith(".toml") and not os.path.lexists(text):
        said = ("there is no such file or folder", "name a TOML file or a checkpoint's folder; nothing is downloaded")
    if said is not None:
        raise ConfigError(f"{text[:200]!r} is no configuration file: {said[0]}", fix=said[1])
    return Path(text)


def _texts(overrides: Any) -> list[str]:
    try:
        texts = None if isinstance(overrides, str | bytes) else list(overrides or ())
    except Exception:
        texts = None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            f"overrides={safe_repr(overrides)} is no list of texts", fix='give a list, as ["cache.block_size=32"]'
        )
    return texts


def _origins(config: object, cls: type, tree: Table, path: KeyPath = ()) -> Iterator[tuple[str, Origin]]:
    for key, item in table_fields(cls).items():
        inner = (*path, key)
        node = find(tree, (key,))
        if is_table(item.type):
            below = node if isinstance(node, Table) else Table({}, DEFAULT)
            yield from _origins(getattr(config, item.name), item.type, below, inner)  # type: ignore[arg-type]
        elif node is None:
            yield dotted(inner), attrs.evolve(DEFAULT, text=toml_value(getattr(config, item.name)))
        else:
            yield dotted(inner), node.origin
            yield from ((dotted(at), leaf.origin) for at, leaf in leaves(node, inner))
    if rest_field(cls) is not None:
        rest = ((key, node) for key, node in tree.items.items() if key not in table_fields(cls))
        yield from ((dotted(at), leaf.origin) for key, node in rest for at, leaf in leaves(node, (*path, key)))


def _resolved(text: str, origin: Origin) -> str:
    expanded = os.path.expanduser(text)
    return os.path.normpath(origin.folder / expanded) if origin.folder else expanded


def _with_target(path: Path) -> str:
    """Return a path as text, with its target if it goes through symbolic links."""
    target = real_path(path)
    direct = real_path(Path()) / path  # the current folder may be reached through a link itself
    return f"{path}" if target == Path(os.path.normpath(direct)) else f"{path} ({target})"


def _surplus(path: KeyPath, tree: Leaf | Table, message: str) -> list[Fault]:
    values = [] if isinstance(tree, Table) and not tree.items else leaves(tree, path)
    return [Fault(leaf.origin, dotted(at), message) for at, leaf in values]
