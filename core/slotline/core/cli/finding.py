"""What a check of `slotline doctor` found."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from attrs import frozen


class Status(IntEnum):
    """How bad it is; the value is the exit code."""

    OK = 0
    WARN = 1
    FAIL = 2

    @property
    def label(self) -> str:
        """As printed."""
        return self.name.lower()


@frozen
class Finding:
    """One row: how bad, of what, what was found, and what to do about it."""

    status: Status
    check: str
    text: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return {"status": self.status.label, "check": self.check, "text": self.text, "fix": self.fix}
