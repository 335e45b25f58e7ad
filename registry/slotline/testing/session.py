"""Pytest session of the suite: the plugin under test, the selected runs, and the records."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from attrs import define, field

from slotline.testing.check import all_checks
from slotline.testing.expectations import applying, check_expectations, held_against
from slotline.testing.facts import machine_of, plugin_of, suite_of
from slotline.testing.keys import reproducer
from slotline.testing.pytest_options import Asked
from slotline.testing.report import Report, Settings
from slotline.testing.runner import Outcome, Record, device_lost, record_of, run_case
from slotline.testing.selection import Selected, select
from slotline.testing.stream import Reader, Writer
from slotline.testing.subject import Subject, subject_of
from slotline.testing.target import find_target


@define
class Session:
    """State of a session.

    Attributes:
        asked: the options.
        subject: the plugin under test.
        planned: every run.
        selected: the runs that are left to this process.
        report_path: file for the report, or None.
        stream: writer of events, or None.
        records: results of the runs so far.
    """

    asked: Asked
    subject: Subject
    planned: tuple[Selected, ...]
    selected: tuple[Selected, ...]
    report_path: Path | None = None
    stream: Writer | None = None
    records: list[Record] = field(factory=list)

    @classmethod
    def of(
        cls, asked: Asked, report_path: Path | None = None, stream: Path | None = None, *, worker: bool = False
    ) -> Session:
        """Load the plugin and select the checks. A worker only reads finished runs from the stream.

        Raises:
            SlotlineError: if the plugin cannot be loaded or run here, or an option is wrong.
        """
        target = find_target(asked.plugin, folder=asked.folder)
        subject = subject_of(
            target, device=asked.device, options=asked.options, exhaustive=asked.exhaustive, seed=asked.seed
        )
        check_expectations(asked.expected, asked.disabled, all_checks(subject.kind), subject.kind)
        selected = select(subject, asked.level, asked.wanted)
        session = cls(asked, subject, selected, selected, report_path)
        return session if stream is None else session._resumed(stream, worker)

    def _resumed(self, path: Path, worker: bool) -> Session:
        """Return the session without the runs that an earlier process finished."""
        before = Reader(path)
        before.follow()
        if not worker:
            self.stream = Writer(path)
            if before.report is None:
                self.stream.begin(self.report(), Counter(item.check.level for item in self.planned))
            self.records = list(before.records)
        done = {record.key for record in self.records}
        self.selected = tuple(item for item in self.planned if item.key not in done)
        return self

    def run(self, item: Selected) -> Record:
        """Do one run and compare its result with the expectation."""
        off = applying(self.asked.disabled, item.key)
        if item.skip is not None:
            return record_of(item.check, item.case, Outcome.SKIPPED, reason=item.skip)
        if off is not None:
            return record_of(item.check, item.case, Outcome.DISABLED, reason=str(off))
        record = run_case(item.check, self.subject, item.case)
        return held_against(record, applying(self.asked.expected, item.key))

    def lost(self, record: Record) -> bool:
        """Return True if the run made the device unusable."""
        return record.outcome in (Outcome.FAILED, Outcome.XFAILED) and device_lost(self.subject)

    def started(self, key: str) -> None:
        """Record the begin of a run."""
        record = self._dead(key, "its process died")
        if self.stream and record:
            self.stream.start(record)

    def ended(self, record: Record) -> None:
        """Record the end of a run."""
        self.records.append(record)
        if self.stream:
            self.stream.record(record)

    def died(self, key: str, reason: str) -> None:
        """Record a run that ended its process, or could not begin."""
        record = self._dead(key, reason)
        if record is not None:
            self.ended(record)

    def _dead(self, key: str, reason: str) -> Record | None:
        item = next((item for item in self.planned if item.key == key), None)
        if item is None:
            return None
        again = reproducer(self.subject, key)
        return record_of(item.check, item.case, Outcome.FAILED, reason=reason, reproducer=again)

    def report(self) -> Report:
        """Return the report of the runs so far."""
        asked = self.asked
        return Report(
            suite=suite_of(self.subject),
            plugin=plugin_of(self.subject),
            machine=machine_of(self.subject),
            settings=Settings(
                level=asked.level,
                checks=asked.wanted,
                exhaustive=asked.exhaustive,
                seed=asked.seed,
                options=asked.options,
            ),
            planned=len(self.planned),
            records=self._ordered(),
            expected=tuple(asked.expected.values()),
            disabled=tuple(asked.disabled.values()),
        )

    def finish(self) -> None:
        """Write the report, if it was requested."""
        if self.report_path is not None:
            self.report().save(self.report_path)

    def _ordered(self) -> tuple[Record, ...]:
        """Return the records in the order of the checks, independent of the order in which processes ran them."""
        place = {item.key: index for index, item in enumerate(self.planned)}
        return tuple(sorted(self.records, key=lambda record: place.get(record.key, len(place))))
