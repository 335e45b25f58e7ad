"""What was said of candidates and of a plan: reasons, rejections, notes."""

from __future__ import annotations

from typing import Any

from attrs import frozen


@frozen(kw_only=True)
class Reason:
    """Why a candidate was not chosen.

    Attributes:
        code: a key of `codes.CODES`.
        text: what was needed and what was offered, one line.
        origin: who needed it.
    """

    code: str
    text: str
    origin: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "text": self.text, "origin": self.origin}


@frozen(kw_only=True)
class Rejection:
    """A candidate that lost in one group, with every reason found."""

    name: str
    distribution: str = ""
    version: str = ""
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, Any]:
        return {**source_of(self), "name": self.name, "reasons": [reason.to_json() for reason in self.reasons]}


@frozen(kw_only=True)
class Note:
    """Something that came out otherwise than asked, or that the user should know.

    Attributes:
        code: a key of `codes.CODES`.
        key: the configuration key it concerns.
        text: what happened, one line.
        asked, resolved: the two values.
        because: every party that limits it.
        to_avoid: settings with which the note goes away; each was tried.
    """

    code: str
    key: str
    text: str
    asked: str = ""
    resolved: str = ""
    because: tuple[str, ...] = ()
    to_avoid: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
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
    """Which distribution brings something, as JSON types."""
    return {"distribution": item.distribution, "version": item.version}
