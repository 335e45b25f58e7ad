"""Checks of the plugins: names, contracts, and whether each can be imported and run here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement

from slotline.cli.finding import Finding, Status
from slotline.cli.trial import SECONDS, Trial, try_plugins
from slotline.registry.config import load_config
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.records import PluginRecord, PluginState, canonical


def check_configuration() -> Iterator[Finding]:
    """Check the environment for variables that look like keys of the configuration."""
    loaded = load_config()
    for text in loaded.warnings:
        yield Finding(Status.WARN, "environment", text, "unset the variable, or rename it")
    if not loaded.warnings:
        yield Finding(Status.OK, "environment", "every SLOTLINE_ variable is a key")


def check_duplicates() -> Iterator[Finding]:
    """Find names that two distributions offer, and rules that match nothing."""
    loaded = load_config()
    registry = PluginRegistry.discover(loaded, tolerant=True)
    rows = registry.records()
    failed = [row for row in rows if row.state is PluginState.FAILED]
    for row in failed:
        yield Finding(Status.FAIL, row.label, row.error, f"see [plugins] distribution and block; it lies in {row.path}")
    for text in registry.warnings:
        if text not in loaded.warnings:
            yield Finding(Status.WARN, "plugin rules", text, "correct the [plugins] table or the environment")
    if not failed:
        names, sources = len({row.label for row in rows}), sorted({row.distribution for row in rows})
        yield Finding(Status.OK, "plugin names", f"{names} plugins of {', '.join(sources)}; no name is offered twice")


def check_imports() -> Iterator[Finding]:
    """Import every plugin: descriptor, options and factory. A plugin that kills its process is a row."""
    rows = PluginRegistry.discover(load_config(), tolerant=True).records()
    todo = [row for row in rows if isinstance(row.kind, Kind) and row.state is PluginState.AVAILABLE]
    return import_findings(todo)


def import_findings(rows: Sequence[PluginRecord], seconds: float = SECONDS) -> Iterator[Finding]:
    """Return one row for each plugin."""
    known = {row.label: row for row in rows}
    for trial in try_plugins(known, factories=True, seconds=seconds):
        yield _judge(known[trial.label], trial)


def _judge(row: PluginRecord, trial: Trial) -> Finding:
    group = f"{row.kind} plugins"
    if trial.crashed:
        text = f"{trial.crashed} while it was imported or probed"
        return Finding(Status.FAIL, row.label, text, _repair(row), False, trial.crashed, group)
    if trial.error:
        return _unimported(row, trial, group)
    source = f"{row.source}, contract {trial.contract}"
    status, text, fix = Status.OK, source, ""
    if trial.torch:
        status, text = Status.WARN, f"{source}: its descriptor's module imports torch"
        fix = "name the factory by a path, so that the descriptor's module needs no torch"
    elif trial.why_not.startswith("probe "):  # it raised, or claims too much: a fault of the plugin
        status, text, fix = Status.WARN, f"{source}: {trial.why_not}", _repair(row)
    elif not trial.runs_here:
        status, fix = Status.OPTIONAL, f"nothing, unless you want it here: it {_said(trial.why_not)}"
    return Finding(status, row.label, text, fix, trial.runs_here, trial.why_not, group)


def _unimported(row: PluginRecord, trial: Trial, group: str) -> Finding:
    """Return the row of a plugin that does not import: one that lacks an optional package is sound."""
    fix = trial.fix or _repair(row)
    absent = trial.missing and not trial.missing.startswith("slotline")
    if absent and (not trial.devices or canonical(trial.missing) in _extras(row.distribution)):
        text = f"{row.source}: the package {trial.missing} is not installed"
        why_not = trial.why_not or f"the package {trial.missing} is not installed"
        return Finding(Status.OPTIONAL, row.label, text, fix, False, why_not, group)
    return Finding(Status.FAIL, row.label, f"{row.source}: {trial.error}", fix, False, "it does not import", group)


def _extras(distribution: str) -> frozenset[str]:
    """Return the packages that a distribution names as optional."""
    try:
        wanted = [Requirement(text) for text in requires(distribution) or ()]
    except PackageNotFoundError:
        return frozenset()
    return frozenset(canonical(one.name) for one in wanted if one.marker and not one.marker.evaluate({"extra": ""}))


def _said(reason: str) -> str:
    return reason if reason.startswith("needs") else f"says: {reason}"


def _repair(row: PluginRecord) -> str:
    return f"repair or uninstall {row.distribution}, or set plugins.block = ['{row.label}']"
