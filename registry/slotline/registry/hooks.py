"""Host of the plugins: pluggy's PluginManager with typed methods and errors that name plugin and hook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy
from attrs import frozen

from slotline.registry import hookspecs
from slotline.registry.errors import PluginError, PluginLoadError, SlotlineError
from slotline.registry.hookspecs import PROJECT, PlanNote, Registrar, hookimpl, hookspec

if TYPE_CHECKING:
    from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind

__all__ = ["HookHost", "PlanNote", "Ranking", "Registrar", "hookimpl", "hookspec"]


@frozen
class Ranking:
    """Order of candidates, best first, and the label of the plugin that returned it."""

    names: tuple[str, ...]
    label: str

    def place(self, name: str) -> int:
        """Return the index of a candidate in the order. Candidates that are missing share the last place."""
        return self.names.index(name) if name in self.names else len(self.names)


class HookHost:
    """pluggy's PluginManager of all plugins, with one typed method for each hook."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)

    def add(self, plugin: object, label: str) -> None:
        """Register a module or object with hook implementations.

        Raises:
            PluginLoadError: if a hook is misspelt or takes an unknown argument, or if there is no hook at all.
        """
        try:
            hash(plugin)  # plugins must be hashable, but pluggy puts them into sets only when it calls them
            self._manager.register(plugin, label)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, TypeError, ValueError) as error:
            self.remove(label)
            raise PluginLoadError(f"hook plugin {label!r}: {error}", fix=f"the hooks are: {_hook_names()}") from error
        if not self._manager.get_hookcallers(plugin):
            self.remove(label)
            raise PluginLoadError(
                f"hook plugin {label!r} ({plugin!r}) implements no hook",
                fix=f"mark its functions with slotline.registry.hookimpl; the hooks are: {_hook_names()}",
            )

    def add_offer(self, label: str, kind: Kind, load: Callable[[], Descriptor[Any]]) -> None:
        """Register the hook implementation of a plugin whose entry point names one descriptor.

        Args:
            label: ``kind:name``.
            kind: the slot.
            load: imports the descriptor. It runs when the slot's hook is called.
        """
        self._manager.register(_Offer(kind.hook, load), label)

    def remove(self, label: str) -> None:
        """Unregister a plugin. An unknown label is ignored."""
        if self._manager.has_plugin(label):
            self._manager.unregister(name=label)

    def offered(self, label: str, kind: Kind) -> tuple[Any, ...]:
        """Call the hook of one slot of one plugin and return what it offers.

        Raises:
            PluginError: if the plugin fails, or does not return a list of descriptors.
        """
        found: list[Any] = []
        for _, offers in self._call(kind.hook, (label,)):
            if isinstance(offers, str | bytes) or not isinstance(offers, Iterable):
                raise PluginError(
                    f"{kind.hook} of {label!r} returned {offers!r}, which is no list of descriptors",
                    fix=f"return descriptors in a list; {_remedy(label)}",
                )
            found += offers
        return tuple(found)

    def register(self, label: str, registrar: Registrar) -> None:
        """Call `slotline_register` of one plugin."""
        for _ in self._call("slotline_register", (label,), registrar=registrar):
            pass

    def rank_candidates(self, kind: str, group: str, candidates: Sequence[str], device: DeviceInfo) -> Ranking | None:
        """Return the first order of the candidates that a plugin returns, or None.

        Raises:
            PluginError: if a plugin fails, or its answer contains an unknown or repeated name.
        """
        arguments = {"kind": kind, "group": group, "candidates": tuple(candidates), "device": device}
        for label, names in self._call("slotline_rank_candidates", self.labels(), **arguments):
            given = [names] if isinstance(names, str) else list(names)
            unknown = [name for name in given if name not in candidates]
            if unknown or len(set(given)) < len(given):
                wrong = f"names {unknown[0]!r}" if unknown else "names a candidate twice"
                raise PluginError(
                    f"slotline_rank_candidates of {label!r} {wrong}; the candidates of {kind} group {group!r} are "
                    f"{', '.join(candidates)}",
                    fix=_remedy(label),
                )
            return Ranking(tuple(given), label)
        return None

    def review_plan(self, plan: Any, request: Any) -> tuple[tuple[str, PlanNote], ...]:
        """Return every reviewer's notes, each with the plugin's label.

        Raises:
            PluginError: if a reviewer raises, or returns anything but notes.
        """
        results = self._call("slotline_review_plan", self.labels(), plan=plan, request=request)
        notes = [(label, note) for label, result in results for note in result]
        for label, note in notes:
            if not isinstance(note, PlanNote):
                raise PluginError(
                    f"slotline_review_plan of {label!r} returned {note!r}, which is no PlanNote", fix=_remedy(label)
                )
        return tuple(notes)

    def engine_built(self, engine: Any) -> None:
        """Pass a new engine to every plugin with this hook."""
        for _ in self._call("slotline_engine_built", self.labels(), engine=engine):
            pass

    def report_header(self, config: Any) -> tuple[str, ...]:
        """Return every plugin's lines for the head of a report."""
        results = self._call("slotline_report_header", self.labels(), config=config)
        return tuple(line for _, lines in results for line in ([lines] if isinstance(lines, str) else lines))

    def labels(self) -> tuple[str, ...]:
        """Return the labels of the plugins with hook implementations of their own, in the order of their names."""
        found = self._manager.list_name_plugin()
        return tuple(sorted(name for name, plugin in found if not isinstance(plugin, _Offer)))

    def _call(self, hook: str, labels: Iterable[str], **arguments: Any) -> Iterable[tuple[str, Any]]:
        """Call one plugin after the other, so that each result and each error can be attributed."""
        plugins = dict(self._manager.list_name_plugin())
        having = {id(implementation.plugin) for implementation in getattr(self._manager.hook, hook).get_hookimpls()}
        for label in labels:
            if id(plugins.get(label)) not in having:
                continue
            others = [plugin for name, plugin in plugins.items() if name != label and plugin is not None]
            try:
                results = self._manager.subset_hook_caller(hook, others)(**arguments)
            except SlotlineError:
                raise
            except Exception as error:
                raise PluginError(
                    f"{hook} of {label!r} failed: {type(error).__name__}: {error}", fix=_remedy(label)
                ) from error
            yield from ((label, result) for result in results)


class _Offer:
    """Hook implementation that the registry makes for an entry point of a slot's group."""

    def __init__(self, hook: str, load: Callable[[], Descriptor[Any]]) -> None:
        self._hook = hook

        @hookimpl
        def offer() -> Iterable[Descriptor[Any]]:
            return (load(),)

        setattr(self, hook, offer)

    def __dir__(self) -> Iterable[str]:
        return (self._hook,)  # pluggy looks at every attribute otherwise


def _remedy(label: str) -> str:
    return f"report it to the authors of {label!r}, or list {label!r} under [plugins] block"


def _hook_names() -> str:
    return ", ".join(name for name in vars(hookspecs) if name.startswith(f"{PROJECT}_"))
