"""Rules for plugin rows that may load: allow and block lists, duplicates, required distributions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import attrs

from slotline.registry.config.schema import PluginsConfig
from slotline.registry.errors import PluginConflictError, PluginError, PluginNotFoundError
from slotline.registry.records import PROJECT, PluginRecord, PluginState, canonical


def apply_lists(rows: Iterable[PluginRecord], rules: PluginsConfig, blocked: Sequence[str]) -> list[PluginRecord]:
    """Mark the rows that the lists exclude. `allow` applies to other distributions' plugins, `block` to all."""
    return [_listed(row, rules, (*rules.block, *blocked)) for row in rows]


def _listed(row: PluginRecord, rules: PluginsConfig, blocked: Sequence[str]) -> PluginRecord:
    if row.name in blocked or row.label in blocked:
        return attrs.evolve(row, state=PluginState.BLOCKED, error="named in a block list")
    free = row.inline or canonical(row.distribution) == PROJECT or rules.allow is None
    if free or row.name in (rules.allow or ()) or row.label in (rules.allow or ()):
        return row
    return attrs.evolve(row, state=PluginState.BLOCKED, error="not in the allow list")


def settle_duplicates(
    rows: Sequence[PluginRecord], rules: PluginsConfig, *, tolerant: bool = False
) -> list[PluginRecord]:
    """Keep one row for each label.

    Args:
        rows: all rows, blocked ones included.
        rules: `distribution` names the distribution to take.
        tolerant: True to turn a conflict into failed rows instead of an error.

    Raises:
        PluginConflictError: naming the distributions.
        PluginNotFoundError: if `distribution` names one that does not offer the plugin.
    """
    groups: dict[str, list[PluginRecord]] = {}
    for row in rows:
        groups.setdefault(row.label, []).append(row)
    return [row for group in groups.values() for row in _settle(group, rules.distribution, tolerant)]


def _settle(group: list[PluginRecord], chosen: Mapping[str, str], tolerant: bool) -> list[PluginRecord]:
    open_rows = [row for row in group if row.state is not PluginState.BLOCKED]
    wanted = chosen.get(group[0].label, chosen.get(group[0].name))
    if wanted is not None and open_rows:
        return _choose(group, wanted)
    if len(open_rows) < 2:
        return group
    error = _conflict(open_rows)
    if not tolerant:
        raise error
    failed = {id(row) for row in open_rows}
    return [
        attrs.evolve(row, state=PluginState.FAILED, error=error.message) if id(row) in failed else row for row in group
    ]


def _conflict(rows: Sequence[PluginRecord]) -> PluginConflictError:
    label, sources = rows[0].label, " and ".join(f"{row.source} ({row.path})" for row in rows)
    if any(row.inline for row in rows):
        fix = "rename the inline plugin"
    else:
        choice = rows[0].distribution
        fix = f'choose one: [plugins] distribution = {{"{label}" = "{choice}"}}, or uninstall the other'
    return PluginConflictError(f"plugin {label!r} is offered by {sources}", fix=fix)


def _choose(group: list[PluginRecord], wanted: str) -> list[PluginRecord]:
    if not any(canonical(row.distribution) == canonical(wanted) for row in group):
        offers = ", ".join(row.source for row in group)
        raise PluginNotFoundError(
            f"[plugins] distribution takes {group[0].label!r} from {wanted!r}, which does not offer it",
            fix=f"it is offered by {offers}",
        )
    return [
        row
        if canonical(row.distribution) == canonical(wanted) or row.state is PluginState.BLOCKED
        else attrs.evolve(row, state=PluginState.SHADOWED, error=f"[plugins] distribution takes it from {wanted}")
        for row in group
    ]


def check_own(rows: Sequence[PluginRecord]) -> None:
    """Raise PluginError unless slotline's own plugins are in the rows."""
    if not any(canonical(row.distribution) == PROJECT for row in rows):
        raise PluginError(
            "slotline is not installed: its own plugins come from entry points, and there are none",
            fix="pip install -e . in the source folder",
        )


def check_required(requirements: Iterable[str]) -> None:
    """Compare `[plugins] require` with the installed distributions.

    Raises:
        PluginError: listing every unmet requirement.
    """
    unmet = [(text, problem) for text in requirements for problem in _unmet(text)]
    if unmet:
        lines = "".join(f"\n  {text}: {problem}" for text, problem in unmet)
        names = " ".join(f"'{text}'" for text, _ in unmet)
        raise PluginError(f"[plugins] require is not met:{lines}", fix=f"pip install {names}")


def _unmet(text: str) -> Iterator[str]:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        requirement = Requirement(text)
        found = version(requirement.name)
    except InvalidRequirement as error:
        yield f"is not a requirement: {str(error).splitlines()[0]}"
    except PackageNotFoundError:
        yield "not installed"
    else:
        if not requirement.specifier.contains(found, prereleases=True):
            yield f"version {found} is installed"


def unused_rules(rows: Sequence[PluginRecord], rules: PluginsConfig) -> tuple[str, ...]:
    """Return a sentence for each entry of `allow` and `distribution` that matches no plugin."""
    names = {name for row in rows for name in (row.name, row.label)}
    entries = [("allow", entry) for entry in rules.allow or ()] + [("distribution", e) for e in rules.distribution]
    return tuple(
        f"[plugins] {key} names {entry!r}, which is not installed" for key, entry in entries if entry not in names
    )
