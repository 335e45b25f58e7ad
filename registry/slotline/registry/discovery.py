"""Discovery of installed plugins, and loading of the needed ones. Imports no torch.

Metadata is read without importing plugins. A plugin named in the configuration must load, otherwise an error is raised.
A plugin that is only a candidate and fails to load becomes a row with its error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, overload

import attrs

from slotline.registry.attribution import BuiltPlugins
from slotline.registry.built import misfits
from slotline.registry.config.faults import Fault, raise_faults, similar
from slotline.registry.config.load import LoadedConfig, load_config
from slotline.registry.config.plugin_tables import PLUGIN_TABLES, kinds_of, options_path, plugin_tables
from slotline.registry.config.schema import PluginsConfig
from slotline.registry.config.tree import find
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import (
    ConfigError,
    ContractError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
)
from slotline.registry.hooks import HookHost
from slotline.registry.inline import inline_records
from slotline.registry.loading import (
    bind_contract,
    building,
    import_dotted,
    label_of,
    one_line,
    remedy_for,
    resolve_factory,
    resolve_options,
    to_descriptor,
)
from slotline.registry.probing import probe
from slotline.registry.records import HOOKS, PluginRecord, PluginState, installed_records
from slotline.registry.registrar import Collected, check_identity
from slotline.registry.rules import apply_lists, check_own, check_required, settle_duplicates, unused_rules

__all__ = ["PluginRegistry", "bind_contract", "probe", "resolve_factory", "resolve_options"]

_OPEN = (PluginState.AVAILABLE, PluginState.LOADED, PluginState.SELECTED)
_BROKEN = (PluginState.FAILED, PluginState.INCOMPATIBLE)


class PluginRegistry:
    """Plugins of this environment and the state of each.

    Attributes:
        hooks: the host of the hook plugins.
        built: the objects made by factories, used to trace errors to plugins.
        warnings: rules of the configuration that match no plugin.
    """

    def __init__(self, rows: Sequence[PluginRecord], *, strict: bool = False, warnings: Sequence[str] = ()) -> None:
        self.hooks = HookHost()
        self.built = BuiltPlugins()
        self.warnings = tuple(warnings)
        self._rows = list(rows)
        self._strict = strict
        self._causes: dict[str, PluginError] = {}

    @classmethod
    def discover(
        cls,
        rules: LoadedConfig | PluginsConfig | None = None,
        *,
        inline: Sequence[str | Path] | None = None,
        blocked: Sequence[str] = (),
        strict: bool = False,
        tolerant: bool = False,
    ) -> PluginRegistry:
        """Read the metadata of installed plugins, load the inline ones and the hook plugins.

        Args:
            rules: a whole configuration (only `strict`, `[plugins]` and the names of plugins' tables are read), or only
                the `[plugins]` table. None reads the environment.
            inline: ``path:attribute`` of inline plugins. None takes those of `rules`. Their paths are relative to the
                file that names them, or to the current folder if `rules` is only the table.
            blocked: names or ``kind:name`` that must not load, in addition to those of `rules`.
            strict: True to raise an error for a candidate that fails to load, instead of adding a row.
            tolerant: for lists: two distributions that offer the same name become failed rows instead of an error.

        Raises:
            PluginError: if slotline itself is not installed, or `require` is not met.
            ConfigError: for a table of a plugin that is not installed, in strict mode or if the table asks for it.
            PluginConflictError: if two distributions offer one name and the rules do not choose.
            PluginLoadError: if an inline plugin fails, or a hook plugin's hooks are not ours.
        """
        rules = load_config() if rules is None else rules
        loaded = rules if isinstance(rules, LoadedConfig) else None
        if isinstance(rules, LoadedConfig):
            inline = rules.inline_plugins if inline is None else inline
            strict = strict or rules.config.strict
            rules = rules.plugin_rules
        check_required(rules.require)
        installed = installed_records()
        check_own(installed)
        rows = apply_lists([*installed, *inline_records(rules.inline if inline is None else inline)], rules, blocked)
        rows = settle_duplicates(rows, rules, tolerant=tolerant)
        registry = cls(rows, strict=strict, warnings=unused_rules(rows, rules))
        for row in registry._inline():
            registry._accept(row, row.descriptor)
        registry._offer_lazily()
        registry._load_hooks(rules, blocked, tolerant)
        if loaded is not None:
            checked = loaded if tolerant else loaded.check_plugin_tables(registry.installed())
            registry.warnings += checked.warnings
        return registry

    def records(self) -> tuple[PluginRecord, ...]:
        """Return every row, by kind and name."""
        return tuple(sorted(self._rows, key=lambda row: (row.label, row.distribution)))

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Return the names of a kind that can be requested.

        Broken plugins are included, so that requesting one raises an error with the reason.
        """
        states = (*_OPEN, *_BROKEN)
        return tuple(sorted({row.name for row in self._rows if row.kind == kind and row.state in states}))

    def installed(self) -> dict[Kind, tuple[str, ...]]:
        """Return the names of each kind's plugins in all states."""
        return {kind: tuple(sorted({row.name for row in self._rows if row.kind == kind})) for kind in Kind}

    def record(self, kind: Kind, name: str) -> PluginRecord:
        """Return the row of a plugin in any state.

        Raises:
            PluginNotFoundError: with the names that exist.
        """
        return self._find(kind, name) or self._refuse(kind, name, None)

    def descriptor(self, kind: Kind, name: str) -> Descriptor[Any]:
        """Return the descriptor of a named plugin, like `load(kind, name, required=True)`."""
        return self.load(kind, name, required=True)

    @overload
    def load(self, kind: Kind, name: str, *, required: Literal[True] = True) -> Descriptor[Any]: ...
    @overload
    def load(self, kind: Kind, name: str, *, required: bool) -> Descriptor[Any] | None: ...
    def load(self, kind: Kind, name: str, *, required: bool = True) -> Descriptor[Any] | None:
        """Import a plugin's descriptor, once.

        Args:
            kind: the slot.
            name: the plugin.
            required: True if the configuration names it. If False, a missing or broken plugin returns None.

        Raises:
            PluginNotFoundError: with the names that exist.
            PluginLoadError: with the cause chained.
            ContractError: if there is no common contract version.
            PluginError: if it is blocked.
        """
        row = self._find(kind, name)
        if row is not None and row.state is PluginState.AVAILABLE:
            row = self._import(row)
        if row is not None and row.state in _OPEN:
            return row.descriptor
        if required:
            self._refuse(kind, name, row)
        return None

    def candidates(self, kind: Kind) -> list[Descriptor[Any]]:
        """Return the descriptors of all loadable plugins of a kind, by name. The others become rows with their error.

        Raises:
            PluginError: in strict mode, for the first plugin that does not load.
        """
        found = [self.load(kind, name, required=self._strict) for name in self.names(kind)]
        return [descriptor for descriptor in found if descriptor is not None]

    def option_classes(self) -> dict[tuple[Kind, str], type]:
        """Return the options class of every loadable plugin that has one, for the JSON Schema."""
        found = {(kind, plugin.name): resolve_options(plugin) for kind in Kind for plugin in self.candidates(kind)}
        return {key: options for key, options in found.items() if options is not None}

    def options(self, loaded: LoadedConfig, descriptor: Descriptor[Any]) -> Any:
        """Return a plugin's own table as an object of its class, or None if it takes no options.

        Plugins of two kinds may share one name and one table, for example an attention and a state backend. A key is
        wrong if neither knows it.

        Raises:
            ConfigError: listing every wrong key and value.
        """
        kind, name, beside = descriptor.kind, descriptor.name, list[type]()
        has_table = find(loaded.tree, options_path(kind, name)) is not None  # otherwise the others need not be imported
        others = [other for other in kinds_of(PLUGIN_TABLES[kind]) if other is not kind] if has_table else []
        for found in (self.load(other, name, required=False) for other in others):
            with suppress(PluginLoadError):  # it is not the requested plugin
                if found is not None and (options := resolve_options(found)) is not None:
                    beside.append(options)
        return loaded.options(kind, name, resolve_options(descriptor), beside)

    def check_tables(self, loaded: LoadedConfig, *, required: bool = True) -> None:
        """Check the tables of all installed plugins in the configuration against the plugins' classes.

        Args:
            loaded: the configuration.
            required: True if a table's plugin must load. If False, plugins that fail to load are skipped.

        Raises:
            ConfigError: listing every wrong key and value.
            PluginError: a subclass of it, if a plugin must load and does not.
        """
        faults: dict[str, Fault] = {}
        for table, name, _ in plugin_tables(loaded.tree):
            for kind in kinds_of(table):
                if name not in self.names(kind):
                    continue
                try:
                    descriptor = self.load(kind, name, required=required)
                    if descriptor is not None:
                        self.options(loaded, descriptor)
                except ConfigError as error:
                    if not error.faults:  # the class's own check of values that exclude each other
                        raise
                    faults = {fault.key: fault for fault in error.faults} | faults
                except PluginLoadError:
                    if required:
                        raise
        raise_faults(list(faults.values()))

    def factory(self, descriptor: Descriptor[Any]) -> Callable[..., Any]:
        """Return a plugin's factory, imported if the descriptor has a path.

        Raises:
            PluginLoadError: if it cannot be imported or called, naming its source.
        """
        return resolve_factory(descriptor, self.source(descriptor))

    def building(self, descriptor: Descriptor[Any]) -> AbstractContextManager[None]:
        """Return a context manager for a call of a plugin's factory. Foreign errors become a `PluginError`."""
        return building(descriptor, self.source(descriptor))

    def build(self, descriptor: Descriptor[Any], *context: Any) -> Any:
        """Build a plugin by calling its factory.

        Raises:
            PluginError: if the factory cannot be imported or raises, or the built object lacks methods of the contract.
                The message names the plugin, its source and a remedy.
        """
        factory = self.factory(descriptor)
        with self.building(descriptor):
            built = factory(*context)
        return self.accept(descriptor, built)

    def accept(self, descriptor: Descriptor[Any], built: Any) -> Any:
        """Check an object made by a factory and return it. Errors in its code are attributed to the plugin from now on.

        Raises:
            ContractError: if a method is missing or cannot be called as the core calls it, naming plugin and source.
        """
        self.fit(descriptor, "what its factory made", misfits(descriptor, built))
        self.built.add(descriptor, self.source(descriptor), built)
        return built

    def fit(self, descriptor: Descriptor[Any], what: str, misfits: Iterable[str]) -> None:
        """Raise ContractError that names the plugin and its source, if `what` that it made has any misfits."""
        if texts := list(misfits):
            raise ContractError(
                f"{self.full_name(descriptor)}: {what} does not fit the contract: {'; '.join(texts)}",
                fix=f"correct the plugin (`slotline conform` shows its faults), or {remedy_for(descriptor.kind)}",
            )

    def full_name(self, descriptor: Descriptor[Any]) -> str:
        """Return a plugin and its source, as in ``attention:cpu of slotline 1.0``."""
        return f"{label_of(descriptor)} of {self.source(descriptor)}"

    def mark_selected(self, kind: Kind, name: str) -> None:
        """Record that a plan uses the plugin."""
        row = self._find(kind, name)
        if row is None or row.state not in _OPEN:
            self._refuse(kind, name, row)
        self._replace(row, state=PluginState.SELECTED)

    def source(self, descriptor: Descriptor[Any]) -> str:
        """Return the source of a plugin: its distribution and version, or the file of an inline plugin."""
        return self.record(descriptor.kind, descriptor.name).source

    def _find(self, kind: Kind, name: str) -> PluginRecord | None:
        rows = [row for row in self._rows if row.kind == kind and row.name == name]
        rows.sort(key=lambda row: row.state in (PluginState.BLOCKED, PluginState.SHADOWED))
        return rows[0] if rows else None

    def _replace(self, row: PluginRecord, **changes: Any) -> PluginRecord:
        new = attrs.evolve(row, **changes)
        self._rows[next(i for i, other in enumerate(self._rows) if other is row)] = new
        return new

    def _import(self, row: PluginRecord) -> PluginRecord:
        if row.descriptor is not None:  # offered by a hook
            return self._accept(row, row.descriptor)
        assert isinstance(row.kind, Kind)
        try:
            (descriptor,) = self.hooks.offered(row.label, row.kind)
        except PluginError as error:
            return self._fail(row, error)
        return self._accept(row, descriptor)

    def _accept(self, row: PluginRecord, descriptor: Descriptor[Any] | None) -> PluginRecord:
        if descriptor is None:
            return row
        try:
            bind_contract(descriptor)
        except ContractError as error:
            return self._fail(row, error, PluginState.INCOMPATIBLE)
        return self._replace(row, state=PluginState.LOADED, descriptor=descriptor)

    def _fail(self, row: PluginRecord, error: PluginError, state: PluginState = PluginState.FAILED) -> PluginRecord:
        self._causes[row.label] = error
        cause = error.__cause__
        return self._replace(row, state=state, error=one_line(cause) if cause else error.message.splitlines()[0])

    def _refuse(self, kind: Kind, name: str, row: PluginRecord | None) -> NoReturn:
        label = f"{kind.value}:{name}"
        if label in self._causes:
            raise self._causes[label]
        if row is not None and row.state is PluginState.FAILED:
            raise PluginConflictError(row.error)
        if row is not None:
            raise PluginError(
                f"plugin {label!r} of {row.source} is {row.state.value}: {row.error}",
                fix="change [plugins] block, allow or distribution, or ask for another plugin",
            )
        names = self.names(kind)
        raise PluginNotFoundError(
            f"there is no {kind.value} plugin {name!r}{similar(name, names)}",
            fix=f"install one, or use one of: {', '.join(names) or '(none is installed)'}",
        )

    def _inline(self) -> list[PluginRecord]:
        return [row for row in self._rows if row.inline and row.state in _OPEN]

    def _offer_lazily(self) -> None:
        """Register a hook implementation for every plugin that an entry point of its slot's group names."""
        for row in self._rows:
            if isinstance(row.kind, Kind) and row.state is PluginState.AVAILABLE:
                self.hooks.add_offer(row.label, row.kind, partial(_imported, row))

    def _load_hooks(self, rules: PluginsConfig, blocked: Sequence[str], tolerant: bool) -> None:
        for row in [row for row in self._rows if row.kind == HOOKS and row.state is PluginState.AVAILABLE]:
            offered = apply_lists(self._hook_plugin(row, tolerant), rules, blocked)
            self._rows = settle_duplicates([*self._rows, *offered], rules, tolerant=tolerant)

    def _hook_plugin(self, row: PluginRecord, tolerant: bool) -> list[PluginRecord]:
        """Load a hook plugin and return the rows of its offers.

        A misspelt hook is an error. Any other failure becomes a row.
        """
        what = f"hook plugin {row.label!r} of {row.source}"
        collected = Collected(row)
        stop = self._strict
        try:
            plugin = import_dotted(row.value, what, module=True)
            stop = not tolerant
            self.hooks.add(plugin, row.label)
            stop = self._strict
            self.hooks.register(row.label, collected)
            for kind in Kind:
                collected.extend(kind, self.hooks.offered(row.label, kind))
        except PluginError as error:
            self.hooks.remove(row.label)
            self._fail(row, error)
            if stop:
                raise
            return []
        self._replace(row, state=PluginState.LOADED)
        return collected.rows


def _imported(row: PluginRecord) -> Descriptor[Any]:
    """Import the descriptor that an entry point names."""
    what = f"plugin {row.label!r} of {row.source}"
    descriptor = to_descriptor(import_dotted(row.value, what), what)
    check_identity(row, descriptor, what)
    return descriptor
