"""Checks that are expected to fail, each with its reason, and disabled checks.

An expectation is strict: an unexpected success is a failure, so that the list never outlives its reasons. A check that
draws random histories cannot be expected to fail, since it may pass by luck. It can only be disabled.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from attrs import evolve, fields, frozen

from slotline.registry.descriptor import Kind
from slotline.registry.errors import ConfigError
from slotline.testing.check import Check
from slotline.testing.keys import split_key
from slotline.testing.runner import Outcome, Record
from slotline.testing.selection import unknown_check

_ENTRY = re.compile(r"\s*(?P<id>[\w.]+(?:\[.*?\])?)\s*=\s*(?P<reason>.*\S)\s*", re.DOTALL)
_FORM = "write 'check.id=reason', or a table {id = ..., kind = ..., reason = ...}"


class Cause(StrEnum):
    """Cause of an expected failure."""

    UNSUPPORTED_UPSTREAM = "unsupported-upstream"  # the underlying kernel or library cannot do it
    NOT_YET = "not-yet"
    BUG = "bug"


@frozen(kw_only=True)
class Expectation:
    """Entry of ``slotline_expected_failures`` or ``slotline_disabled``.

    Attributes:
        id: id of a check, for all its cases, or the key of one case, ``check.id[case]``.
        reason: explanation for readers of the report.
        kind: the cause.
        url: link to the issue.
        until: version or date of its end. For readers only.
    """

    id: str
    reason: str
    kind: Cause = Cause.NOT_YET
    url: str = ""
    until: str = ""

    def __str__(self) -> str:
        notes = [text for text in (self.url, f"until {self.until}" if self.until else "") if text]
        return f"{self.kind}: {self.reason}" + (f" ({', '.join(notes)})" if notes else "")


Expectations = Mapping[str, Expectation]
"""Expectations by their id."""


def read_expectations(entries: Iterable[Any], what: str) -> dict[str, Expectation]:
    """Read the entries of the configuration: texts ``id=reason``, tables, or texts that are inline TOML tables.

    Raises:
        ConfigError: naming the entry and the required form.
    """
    found: dict[str, Expectation] = {}
    for entry in entries:
        item = _expectation(entry, what)
        if item.id in found:
            raise ConfigError(f"{what}: {item.id!r} is named twice")
        found[item.id] = item
    return found


def _expectation(entry: Any, what: str) -> Expectation:
    if isinstance(entry, str) and entry.lstrip().startswith("{"):
        try:
            entry = tomllib.loads(f"entry = {entry}")["entry"]
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{what}: {entry!r} is no TOML table: {error}", fix=_FORM) from error
    if isinstance(entry, Mapping):
        return _from_table(entry, what)
    match = _ENTRY.fullmatch(str(entry))
    if match is None:
        raise ConfigError(f"{what}: {entry!r} has no reason", fix=_FORM)
    return Expectation(id=match["id"], reason=match["reason"])


def _from_table(entry: Mapping[str, Any], what: str) -> Expectation:
    known = [item.name for item in fields(Expectation)]
    unknown = sorted(set(entry) - set(known))
    if unknown or not entry.get("id") or not entry.get("reason"):
        problem = f"unknown key {unknown[0]!r}" if unknown else "needs an id and a reason"
        raise ConfigError(f"{what}: {dict(entry)!r}: {problem}", fix=f"known keys: {', '.join(known)}")
    texts = {key: str(value) for key, value in entry.items()}
    kind = texts.pop("kind", Cause.NOT_YET)
    if kind not in list(Cause):
        raise ConfigError(f"{what}: {kind!r} is no kind of {entry['id']!r}", fix=f"use one of: {', '.join(Cause)}")
    return Expectation(kind=Cause(kind), **texts)


def check_expectations(expected: Expectations, disabled: Expectations, checks: Sequence[Check], kind: Kind) -> None:
    """Check that each entry names a check that can be expected to fail, or disabled.

    Raises:
        ConfigError: for the first entry that does not.
    """
    by_id = {check.id: check for check in checks}
    for key in (*expected, *disabled):
        if split_key(key)[0] not in by_id:
            raise unknown_check(split_key(key)[0], checks, kind)
    for key in expected:
        if by_id[split_key(key)[0]].explores:
            raise ConfigError(
                f"check {key!r} draws random histories and may pass by luck, so it cannot be expected to fail",
                fix=f"switch it off: slotline_disabled = ['{key}=REASON']",
            )


def applying(entries: Expectations, key: str) -> Expectation | None:
    """Return the entry for a run. An entry for its case has priority over one for its check."""
    return entries.get(key) or entries.get(split_key(key)[0])


def held_against(record: Record, expectation: Expectation | None) -> Record:
    """Return the record with the expectation applied: an expected failure, or an unexpected success."""
    if expectation is None or record.outcome not in (Outcome.FAILED, Outcome.PASSED):
        return record
    if record.outcome is Outcome.FAILED:
        details = {**record.details, "failure": record.reason}
        return evolve(record, outcome=Outcome.XFAILED, reason=str(expectation), details=details)
    reason = f"it passed, but is expected to fail ({expectation}): take {expectation.id!r} from the list"
    if expectation.id != record.key:
        reason += ", or name the cases that fail, as check.id[case]"
    return evolve(record, outcome=Outcome.XPASSED, reason=reason)
