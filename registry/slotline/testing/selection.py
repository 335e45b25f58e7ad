"""Which checks run for a plugin, with which parameters, and why the others do not."""

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
    """One run to be done; a check without any is one that is skipped, with the reason."""

    check: Check
    case: Case
    skip: str | None = None

    @property
    def key(self) -> str:
        """``check.id[case]``."""
        return key_of(self.check.id, self.case)


def select(subject: Subject, level: Level = Level.ENGINE, wanted: Sequence[str] = ()) -> tuple[Selected, ...]:
    """Every run for a plugin up to a level.

    Args:
        subject: the plugin.
        level: the highest level.
        wanted: check ids, beginnings of ids that no check has itself, or keys of single cases; empty for all.

    Raises:
        ConfigError: if one of `wanted` means nothing, with what was probably meant.
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
    """An id means its check alone, so that a reproducer runs nothing else, even if others lie below it."""
    if "[" in text or text in ids:
        return text in (item.key, item.check.id)
    return _below(item.check.id, text)


def _below(check_id: str, text: str) -> bool:
    """Whether an id is `text` or goes on from it: ``attention.window.inclusive`` from ``attention.window``."""
    start = text.rstrip(".")
    return check_id == start or check_id.startswith(f"{start}.")


def known_checks(keys: Iterable[str], checks: Sequence[Check], kind: Kind) -> None:
    """Nothing if each key, or beginning of one, names a check.

    Raises:
        ConfigError: for the first one that does not.
    """
    for key in keys:
        wanted, _ = split_key(key)
        if not any(_below(check.id, wanted) for check in checks):
            raise unknown_check(wanted, checks, kind)


def unknown_check(wanted: str, checks: Sequence[Check], kind: Kind) -> ConfigError:
    """The error for an id that no check has."""
    ids = [check.id for check in checks]
    return ConfigError(
        f"there is no {kind.value} check {wanted!r}{similar(wanted, ids)}",
        fix="list them with: slotline conform NAME --list",
    )
