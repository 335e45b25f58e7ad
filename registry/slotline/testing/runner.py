"""Runner of checks without pytest: from a plugin to records."""

from __future__ import annotations

import gc
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from attrs import field, frozen

from slotline.registry.errors import ConfigError
from slotline.testing.check import Case, Check, Family, Level, NotApplicable, Run, all_checks
from slotline.testing.keys import key_of, reproducer, split_key
from slotline.testing.subject import Subject, subject_of


class Outcome(StrEnum):
    """Outcome of a check's run."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # not declared, or not applicable on this machine
    XFAILED = "xfailed"  # failed as expected
    XPASSED = "xpassed"  # passed although expected to fail: an error
    DISABLED = "disabled"  # a random check that was disabled, with a reason


@frozen(kw_only=True)
class Record:
    """Result of one run of one check.

    Attributes:
        id, summary, level, family, since, profile, mandatory: facts of the check.
        case: its parameters.
        outcome: its outcome.
        reason: the reason why it was skipped or failed, in one or a few lines.
        seconds: wall time.
        error, allowed, baseline, ratio: worst measured error, if the check measures one.
        seed: seed of the run.
        reproducer: a command that runs only this.
        details: the traceback of a failure, and all other measured values.
    """

    id: str
    summary: str = ""
    level: Level
    family: Family
    since: int
    profile: str
    mandatory: bool
    case: Case
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    error: float | None = None
    allowed: float | None = None
    baseline: float | None = None
    ratio: float | None = None
    seed: int = 0
    reproducer: str = ""
    details: Mapping[str, Any] = field(factory=dict)

    @property
    def key(self) -> str:
        """Key of the run: ``check.id[case]``."""
        return key_of(self.id, self.case)

    @property
    def bad(self) -> bool:
        """True if it counts against the plugin."""
        return self.mandatory and self.outcome in (Outcome.FAILED, Outcome.XPASSED)


def check_plugin(
    target: Any,
    *,
    level: Level = Level.ENGINE,
    only: Callable[[Check], bool] | str | None = None,
    stop_at_first: bool = False,
    on_record: Callable[[Record], None] | None = None,
    **subject_options: Any,
) -> list[Record]:
    """Run the conformance checks of a plugin's kind up to `level` and return a record of each run.

    Args:
        target: a descriptor, a class with one, or a dotted path. See `subject_of`, which takes the other options.
        level: the highest level to run.
        only: a function that returns True for checks to run, the id of one check, or the key of one of its cases.
        stop_at_first: True to end with the first record that counts against the plugin, which is of the lowest level. A
            fault that leaves the device unusable ends the run in any case.
        on_record: called with each record immediately.

    Raises:
        SlotlineError: if the plugin cannot be loaded or cannot run here at all, or `only` names no check.
    """
    subject = target if isinstance(target, Subject) else subject_of(target, **subject_options)
    key = only if isinstance(only, str) else None
    records = []
    for item in all_checks(subject.kind):
        if item.level > level or (callable(only) and not only(item)) or (key and split_key(key)[0] != item.id):
            continue
        for record in run_check(item, subject, key):
            records.append(record)
            if on_record is not None:
                on_record(record)
            if record.bad and (stop_at_first or device_lost(subject)):
                return records
    if key and not records:
        raise ConfigError(f"there is no {subject.kind.value} check {key!r} up to {level}")
    return records


def run_check(item: Check, subject: Subject, key: str | None = None) -> Iterator[Record]:
    """Yield a record for each case of one check, or for the case named by `key`."""
    cases, reason = cases_of(item, subject)
    if reason is not None:
        yield record_of(item, {}, Outcome.SKIPPED, reason=reason)
    for case in cases:
        if key in (None, item.id, key_of(item.id, case)):
            yield run_case(item, subject, case)


def cases_of(item: Check, subject: Subject) -> tuple[tuple[Case, ...], str | None]:
    """Return the cases of a check, or the reason why it has none.

    Informational checks run only for undeclared features.
    """
    if item.since > subject.contract:
        return (), f"since contract {item.since}, the plugin speaks {subject.contract}"
    refusal = subject.refusal(item.needs)
    if item.family is Family.DECLARED and refusal is not None:
        return (), refusal
    if item.family is not Family.DECLARED and item.needs and refusal is None:
        return (), "declared"
    try:
        cases = tuple({repr(sorted(case.items())): case for case in item.cases(subject)}.values())  # each once
    except NotApplicable as reason:
        return (), str(reason)
    return cases, None if cases else "no value of it is declared"


def run_case(item: Check, subject: Subject, case: Case) -> Record:
    """Run a check once. Any exception of the plugin is a failure. Nothing that the check made outlives it."""
    with _ending_with_it():
        return _run_case(item, subject, case)


@contextmanager
def _ending_with_it() -> Iterator[None]:
    """Free what is made inside and not used any more, which may be a ring of objects: a plugin and its surroundings.

    Plugins have no method that ends them: stores, files, threads and memory end with the last reference to them.
    Objects of before are frozen, so that looking for rings costs little.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


def _run_case(item: Check, subject: Subject, case: Case) -> Record:
    run = Run(subject, case, seed_of(item, case, subject.seed))
    started = time.perf_counter()
    outcome, reason, details = Outcome.PASSED, "", {}
    try:
        item.function(run)
        _synchronize(subject)
    except NotApplicable as why:
        outcome, reason = Outcome.SKIPPED, str(why)
    except Exception as error:  # a plugin may raise anything
        outcome, reason = Outcome.FAILED, _reason(error)
        details = {"traceback": traceback.format_exc()}
    known = {name: run.measured[name] for name in ("error", "allowed", "baseline", "ratio") if name in run.measured}
    rest = {name: value for name, value in run.measured.items() if name not in known}
    seconds = time.perf_counter() - started
    return record_of(
        item,
        case,
        outcome,
        reason=reason,
        seconds=seconds,
        seed=run.seed,
        reproducer=reproducer(subject, key_of(item.id, case)),
        details=details | rest,
        **known,
    )


def record_of(item: Check, case: Case, outcome: Outcome, **values: Any) -> Record:
    """Return a record with the check's own facts filled in."""
    return Record(
        id=item.id,
        summary=item.summary,
        level=item.level,
        family=item.family,
        since=item.since,
        profile=item.profile,
        mandatory=item.mandatory,
        case=dict(case),
        outcome=outcome,
        **values,
    )


def seed_of(item: Check, case: Case, moved_by: int = 0) -> int:
    """Return a seed that is the same for the same check and case on every machine. `moved_by` gives other seeds."""
    return zlib.crc32(f"{item.id} {sorted(case.items())}".encode()) ^ moved_by


def level_reached(records: Iterable[Record]) -> Level | None:
    """Return the highest level without records up to it that count against the plugin or were expected to fail.

    A level counts only if a check ran there. None if the contract level itself is not reached.
    """
    items = [record for record in records if record.mandatory]
    reached = None
    for level in Level:
        own = [record for record in items if record.level == level]
        if any(record.bad or record.outcome in (Outcome.XFAILED, Outcome.DISABLED) for record in own):
            break
        if any(record.outcome is Outcome.PASSED for record in own):
            reached = level
    return reached


def _reason(error: Exception) -> str:
    text = str(error).strip() or "no message"
    return text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"


def device_lost(subject: Subject) -> bool:
    """Return True if a fault left the device unusable for the rest of the process.

    Later results are meaningless then.
    """
    try:
        _synchronize(subject)
    except Exception:  # torch has several types for it
        return True
    return False


def _synchronize(subject: Subject) -> None:
    """Synchronize the device, so that a fault fails the check that caused it, not the next one."""
    if subject.device.type == "cuda":
        import torch

        torch.cuda.synchronize()
