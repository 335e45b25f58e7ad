"""Reasons, rejections and notes about candidates and plans."""

from __future__ import annotations

from typing import Any

from attrs import frozen


@frozen(kw_only=True)
class Reason:
    """Reason why a candidate was not chosen.

    Attributes:
        code: a key of `codes.CODES`.
        text: the need and the offer, in one line.
        origin: the origin of the need.
    """

    code: str
    text: str
    origin: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {"code": self.code, "text": self.text, "origin": self.origin}


@frozen(kw_only=True)
class Rejection:
    """Candidate that lost in one group, with every reason."""

    name: str
    distribution: str = ""
    version: str = ""
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {**source_of(self), "name": self.name, "reasons": [reason.to_json() for reason in self.reasons]}


@frozen(kw_only=True)
class Note:
    """Difference from the request, or other information for the user.

    Attributes:
        code: a key of `codes.CODES`.
        key: the configuration key that it concerns.
        text: one line of description.
        asked, resolved: the two values.
        because: every party that limits the value.
        to_avoid: settings with which the note disappears. Each was tested.
    """

    code: str
    key: str
    text: str
    asked: str = ""
    resolved: str = ""
    because: tuple[str, ...] = ()
    to_avoid: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {
            "code": self.code,
            "key": self.key,
            "text": self.text,
            "asked": self.asked,
            "resolved": self.resolved,
            "because": list(self.because),
            "to_avoid": list(self.to_avoid),
        }


def source_of(item: Any) -> dict[str, Any]:
    """Return the distribution of a plugin as JSON types."""
    return {"distribution": item.distribution, "version": item.version}
