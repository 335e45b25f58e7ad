"""Events of a run as JSON lines, so that another process can follow the run and outlive it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slotline.testing.check import Level
from slotline.testing.report import Report, plain, structured
from slotline.testing.runner import Record


class Writer:
    """Writer that appends events to a file. Each event is on disk when the call returns, even if the process dies."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def begin(self, report: Report, planned: Mapping[Level, int]) -> None:
        """Write the begin of the run. The report has no records yet."""
        self._write({"begin": report.to_json(), "planned": {str(level): count for level, count in planned.items()}})

    def start(self, record: Record) -> None:
        """Write the begin of a check's run. The record is the result in case the process dies."""
        self._write({"start": plain(record)})

    def record(self, record: Record) -> None:
        """Write the end of a check's run."""
        self._write({"record": plain(record)})

    def _write(self, event: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


class Reader:
    """Reader that follows a file of events.

    Attributes:
        report: the report without records, once the run has begun.
        planned: number of runs of each level.
        records: finished runs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.report: Report | None = None
        self.planned: dict[Level, int] = {}
        self.records: list[Record] = []
        self._running: dict[str, Record] = {}

    @property
    def running(self) -> Record | None:
        """Oldest run that has not finished."""
        return next(iter(self._running.values()), None)

    def follow(self) -> None:
        """Read the events written since the last call."""
        for event in self._events():
            if "begin" in event:
                self.report = Report.from_json(event["begin"])
                self.planned = structured(event["planned"], dict[Level, int])
            elif "start" in event:
                started = structured(event["start"], Record)
                self._running[started.key] = started
            else:
                self.records.append(structured(event["record"], Record))
                self._running.pop(self.records[-1].key, None)

    def _events(self) -> Iterator[Any]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        yield from (json.loads(line) for line in whole.splitlines())
