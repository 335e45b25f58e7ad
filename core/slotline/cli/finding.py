"""Findings of the checks of `slotline doctor`."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from attrs import frozen


class Status(IntEnum):
    """Severity of a finding."""

    OK = 0
    OPTIONAL = 1  # sound, and of no use here: an optional package or a device is missing
    WARN = 2
    FAIL = 3

    @property
    def label(self) -> str:
        """As printed."""
        return self.name.lower()

    @property
    def exit_code(self) -> int:
        """Exit code of a command whose worst finding this is."""
        return max(0, self - 1)


@frozen
class Finding:
    """One row: severity, subject, text and remedy.

    Attributes:
        status: the severity.
        check: the checked object, ``kind:name`` for a plugin.
        text: the finding.
        fix: the remedy.
        runs_here: whether a plugin can be used on this machine. None if the row is not about a plugin.
        why_not: the reason why it cannot.
        group: the heading of the row.
    """

    status: Status
    check: str
    text: str
    fix: str = ""
    runs_here: bool | None = None
    why_not: str = ""
    group: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON types."""
        common = {"status": self.status.label, "check": self.check, "text": self.text, "fix": self.fix}
        plugin = {} if self.runs_here is None else {"runs_here": self.runs_here, "why_not": self.why_not}
        return {"group": self.group, **common, **plugin}
