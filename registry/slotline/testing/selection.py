"""Selection of the checks for a plugin, with their parameters, and the reasons for skipped checks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from attrs import frozen

from slotline.registry.config.faults import similar
from slotline.registry.descriptor import Kind
from slotline.registry.errors import ConfigError
from slotline.testing.check import Case, Check, Level, all_checks
from slotline.testing.keys import key_of, split_key
from slotline.testing.runner import cases_of
from slotline.testing.subject import Subject


@frozen
class Selected:
    """Planned run. A run without a check is skipped, with the reason."""

    check: Check
    case: Case
    skip: str | None = None

    @property
    def key(self) -> str:
        """Key of the run: ``check.id[case]``."""
        return key_of(self.check.id, self.case)


def select(subject: Subject, level: Level = Level.ENGINE, wanted: Sequence[str] = ()) -> tuple[Selected, ...]:
    """Return every run for a plugin up to a level.

    Args:
        subject: the plugin.
        level: the highest level.
        wanted: check ids, prefixes of ids that are not ids themselves, or keys of single cases. Empty for all.

    Raises:
        ConfigError: if one of `wanted` matches nothing, with a suggestion.
    """
    checks = all_checks(subject.kind)
    known_checks(wanted, checks, subject.kind)
    ids = {check.id for check in checks}
    everything = (item for check in checks if check.level <= level for item in _runs(check, subject))
    return tuple(item for item in everything if not wanted or any(_takes_in(text, item, ids) for text in wanted))


def _runs(check: Check, subject: Subject) -> Iterator[Selected]:
    cases, reason = cases_of(check, subject)
    if reason is not None:
        yield Selected(check, {}, reason)
    for case in cases:
        yield Selected(check, case)


def _takes_in(text: str, item: Selected, ids: Collection[str]) -> bool:
    """Return True if a text selects a run. An id selects only its check, even if other ids begin with it."""
    if "[" in text or text in ids:
        return text in (item.key, item.check.id)
    return _below(item.check.id, text)


def _below(check_id: str, text: str) -> bool:
    """Return True if an id is `text` or begins with it: ``attention.window.inclusive`` and ``attention.window``."""
    start = text.rstrip(".")
    return check_id == start or check_id.startswith(f"{start}.")


def known_checks(keys: Iterable[str], checks: Sequence[Check], kind: Kind) -> None:
    """Check that each key, or prefix of a key, names a check.

    Raises:
        ConfigError: for the first unknown key.
    """
    for key in keys:
        wanted, _ = split_key(key)
        if not any(_below(check.id, wanted) for check in checks):
            raise unknown_check(wanted, checks, kind)


def unknown_check(wanted: str, checks: Sequence[Check], kind: Kind) -> ConfigError:
    """Return the error for an unknown check id."""
    ids = [check.id for check in checks]
    return ConfigError(
        f"there is no {kind.value} check {wanted!r}{similar(wanted, ids)}",
        fix="list them with: slotline conform NAME --list",
    )
