"""Result of a whole run, as JSON and back: the plugin, the machine, and every record."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from slotline.registry.errors import SlotlineError
from slotline.testing.check import Level
from slotline.testing.expectations import Expectation
from slotline.testing.facts import Machine, Plugin, Suite
from slotline.testing.runner import Outcome, Record, level_reached

if TYPE_CHECKING:
    from cattrs import Converter

SCHEMA = 1
"""Version of the report's form; additions do not raise it."""


class ReportError(SlotlineError):
    """File that is not a report, or not a trustworthy one."""


@frozen(kw_only=True)
class Settings:
    """Settings of the run.

    Attributes:
        level: the highest requested level.
        checks: prefixes of the requested ids, empty for all.
        exhaustive: True if all combinations ran instead of one case for each value.
        seed: seed that changed the random choices. 0 for the suite's own.
        options: the plugin's own table.
    """

    level: Level = Level.ENGINE
    checks: tuple[str, ...] = ()
    exhaustive: bool = False
    seed: int = 0
    options: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True)
class Report:
    """Run of the suite on one plugin.

    Attributes:
        suite, plugin, machine, settings: facts of the run.
        planned: number of planned runs. Fewer records mean that the run did not finish.
        records: results of the runs.
        expected, disabled: the expectations and switches in force.
    """

    suite: Suite
    plugin: Plugin
    machine: Machine
    settings: Settings
    planned: int
    records: tuple[Record, ...] = ()
    expected: tuple[Expectation, ...] = ()
    disabled: tuple[Expectation, ...] = ()

    @property
    def complete(self) -> bool:
        """True if every check of the level has run."""
        return not self.settings.checks and len({record.key for record in self.records}) >= self.planned

    @property
    def level_reached(self) -> Level | None:
        """Highest level that was reached (see `slotline.testing.runner.level_reached`)."""
        return level_reached(self.records) if self.complete else None

    @property
    def conformant(self) -> bool:
        """True if every applicable mandatory check of the level passed, none of them expected to fail or disabled."""
        return self.complete and self.clean

    @property
    def clean(self) -> bool:
        """True if the same holds for the checks that ran, which may be a part of all."""
        against = (Outcome.FAILED, Outcome.XPASSED, Outcome.XFAILED, Outcome.DISABLED)
        counted = [record for record in self.records if record.mandatory]
        return any(record.outcome is Outcome.PASSED for record in counted) and not any(
            record.outcome in against for record in counted
        )

    @property
    def failures(self) -> tuple[Record, ...]:
        """Records that count against the plugin."""
        return tuple(record for record in self.records if record.bad)

    def counts(self, level: Level) -> Mapping[Outcome, int]:
        """Return the number of runs of a level by outcome."""
        return Counter(record.outcome for record in self.records if record.level is level)

    @property
    def digest(self) -> str:
        """Fingerprint of plugin, suite and outcomes, independent of times, errors and texts."""
        lines = sorted(f"{record.key} {record.outcome.value}" for record in self.records)
        head = f"{self.plugin.kind}:{self.plugin.name} {self.plugin.version} {self.suite.version}"
        return hashlib.sha256("\n".join([head, *lines]).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON types, including values derived from the records, for readers without Python."""
        body: dict[str, Any] = plain(self)
        records = body.pop("records")
        levels = sorted({record.level for record in self.records})
        return {
            "schema": SCHEMA,
            "conformant": self.conformant,
            "level_reached": None if self.level_reached is None else str(self.level_reached),
            "complete": self.complete,
            "digest": self.digest,
            **body,
            "summary": {str(level): {o.value: self.counts(level)[o] for o in Outcome} for level in levels},
            "skips": _skips(self.records),
            "records": records,
        }

    @classmethod
    def from_json(cls, value: Any) -> Report:
        """Return the report that `to_json` wrote.

        Raises:
            ReportError: if it is not a report, has another form, or was changed.
        """
        if not isinstance(value, Mapping) or "schema" not in value or "records" not in value:
            raise ReportError(
                "it is no conformance report", fix="write one with: slotline conform NAME --report r.json"
            )
        if value["schema"] != SCHEMA:
            raise ReportError(f"its form is {value['schema']}, this slotline reads {SCHEMA}", fix="run the suite again")
        try:
            report: Report = converter().structure(dict(value), cls)
        except Exception as error:
            raise ReportError(f"it is no conformance report: {_why(error)}") from error
        if report.digest != value.get("digest"):
            raise ReportError(
                f"its digest is {value.get('digest')}, its records give {report.digest}: it was changed by hand",
                fix="run the suite again",
            )
        return report

    def save(self, path: Path) -> None:
        """Write it as a JSON file."""
        path.write_text(json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a report from a JSON file.

        Raises:
            ReportError: naming the file.
        """
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ReportError(f"cannot read {str(path)!r}: {error}") from error
        except ReportError as error:
            raise ReportError(f"{str(path)!r}: {error.message}", fix=error.fix) from error


def plain(value: Any) -> Any:
    """Return a value as JSON types. Values without a JSON form become text."""
    return json.loads(json.dumps(converter().unstructure(value), default=_text, allow_nan=False))


def structured(value: Any, cls: Any) -> Any:
    """Return the value of a class from JSON types, the inverse of `plain`."""
    return converter().structure(value, cls)


@cache
def converter() -> Converter:
    """Return the converter. Levels become ``L3``, non-finite numbers become text, and unknown keys are ignored."""
    from cattrs import Converter

    made = Converter()
    made.register_unstructure_hook(Level, str)
    made.register_structure_hook(Level, lambda text, _: Level(int(str(text).removeprefix("L"))))
    made.register_unstructure_hook(float, lambda number: number if math.isfinite(number) else str(number))
    return made


def _text(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def _skips(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return each reason with the checks that it skips."""
    reasons: dict[str, list[str]] = {}
    for record in records:
        if record.outcome in (Outcome.SKIPPED, Outcome.DISABLED):
            reasons.setdefault(record.reason, []).append(record.key)
    return [{"reason": reason, "checks": keys} for reason, keys in reasons.items()]


def _why(error: Exception) -> str:
    from cattrs import transform_error
    from cattrs.errors import BaseValidationError

    return transform_error(error)[0] if isinstance(error, BaseValidationError) else f"{type(error).__name__}: {error}"
