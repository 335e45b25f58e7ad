"""The three hooks, and the one object that calls them.

Hooks serve discovery, review and report. Nothing calls a hook once the engine steps: what a plan needs are the
plugins' factories, and those are reached through descriptors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pluggy
from attrs import frozen

from slotline.registry.errors import PluginError, PluginLoadError

if TYPE_CHECKING:
    from slotline.registry.descriptor import Descriptor

PROJECT = "slotline"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Registrar(Protocol):
    """What `slotline_register` gets."""

    def add(self, descriptor: Descriptor[Any]) -> None:
        """Offer a plugin."""
        ...


@frozen
class PlanNote:
    """What a reviewer says about a plan; a veto refuses it."""

    text: str
    veto: bool = False


class HookSpecs:
    """The signatures. An implementation may take fewer arguments."""

    @hookspec
    def slotline_register(self, registrar: Registrar) -> None:
        """Offer plugins that are not entry points of their own: `registrar.add(descriptor)` for each."""

    @hookspec
    def slotline_review_plan(self, plan: Any, request: Any) -> Sequence[PlanNote] | None:
        """Look at a finished plan; return notes, vetoes among them."""

    @hookspec
    def slotline_report_header(self, config: Any) -> str | Sequence[str] | None:
        """Lines for the head of a report."""


class HookHost:
    """Holds the hook plugins. One typed method for each hook; errors name the plugin and the hook."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(HookSpecs)

    def add(self, plugin: object, label: str) -> None:
        """Register a module or object with hook implementations.

        Raises:
            PluginLoadError: if a hook is misspelt or asks for an unknown argument, or if there is no hook at all.
        """
        try:
            hash(plugin)  # pluggy puts plugins into sets, but only when it calls them
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

    def remove(self, label: str) -> None:
        """Take a plugin out again, if it is in."""
        if self._manager.has_plugin(label):
            self._manager.unregister(name=label)

    def register(self, label: str, registrar: Registrar) -> None:
        """Call `slotline_register` of one plugin."""
        for _ in self._call("slotline_register", (label,), registrar=registrar):
            pass

    def review_plan(self, plan: Any, request: Any) -> tuple[tuple[str, PlanNote], ...]:
        """Every reviewer's notes, each with the plugin's label.

        Raises:
            PluginError: if a reviewer raises, or returns something else than notes.
        """
        results = self._call("slotline_review_plan", self.labels(), plan=plan, request=request)
        notes = [(label, note) for label, result in results for note in result]
        for label, note in notes:
            if not isinstance(note, PlanNote):
                raise PluginError(
                    f"slotline_review_plan of {label!r} returned {note!r}, which is no PlanNote",
                    fix=f"report it to the authors of {label!r}, or list {label!r} under [plugins] block",
                )
        return tuple(notes)

    def report_header(self, config: Any) -> tuple[str, ...]:
        """Every plugin's lines for the head of a report."""
        results = self._call("slotline_report_header", self.labels(), config=config)
        return tuple(line for _, lines in results for line in ([lines] if isinstance(lines, str) else lines))

    def labels(self) -> tuple[str, ...]:
        """The registered plugins, in the order of their names."""
        return tuple(sorted(name for name, _ in self._manager.list_name_plugin()))

    def _call(self, hook: str, labels: Iterable[str], **arguments: Any) -> Iterable[tuple[str, Any]]:
        """Call one plugin after the other, so that each result and each error has a name."""
        plugins = dict(self._manager.list_name_plugin())
        for label in labels:
            others = [plugin for name, plugin in plugins.items() if name != label and plugin is not None]
            try:
                results = self._manager.subset_hook_caller(hook, others)(**arguments)
            except Exception as error:
                raise PluginError(
                    f"{hook} of {label!r} failed: {type(error).__name__}: {error}",
                    fix=f"report it to the authors of {label!r}, or list {label!r} under [plugins] block",
                ) from error
            yield from ((label, result) for result in results)


def _hook_names() -> str:
    return ", ".join(name for name in vars(HookSpecs) if name.startswith(f"{PROJECT}_"))
