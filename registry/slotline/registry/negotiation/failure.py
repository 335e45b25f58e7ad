"""Record of a negotiation that found no plan."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from slotline.registry.negotiation.reasons import Note, Rejection


@frozen(kw_only=True)
class Conflict:
    """Member of a minimal set of needs that cannot be satisfied together.

    Attributes:
        key: the configuration key, or ``model.<need>`` or ``device`` for given needs.
        value: the requested value.
        origin: the origin of the request.
        inherent: True if it comes from the model or the device, so that no setting can remove it.
        sufficient: True if giving up only this need makes a plan possible.
        instead: the setting to use then, which was tested. "" if giving the need up does not help.
    """

    key: str
    value: str
    origin: str
    inherent: bool = False
    sufficient: bool = False
    instead: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {
            "key": self.key,
            "value": self.value,
            "origin": self.origin,
            "inherent": self.inherent,
            "sufficient": self.sufficient,
            "instead": self.instead,
        }


@frozen(kw_only=True)
class GroupFailure:
    """Reasons of every candidate for one group (of attention or state layers, or a layer kind for cache specs)."""

    name: str
    kind: str
    layers: int
    rejected: tuple[Rejection, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        rejected = [item.to_json() for item in self.rejected]
        return {"name": self.name, "kind": self.kind, "layers": self.layers, "rejected": rejected}


@frozen(kw_only=True)
class Failure:
    """Record of a negotiation that found no plan. It is the data of a `NegotiationError`.

    Attributes:
        code: the failure, a key of `codes.CODES`.
        message: one line.
        groups: all rejections with all reasons.
        conflict: the minimal set of needs that exclude each other. Empty if no need could be given up.
        further: conflicts that remain once the first is resolved. No two share a member.
        remedies: settings that make a plan possible. Each was tested.
        notes: under `strict`, the downgrades that are not allowed.
    """

    code: str
    message: str
    groups: tuple[GroupFailure, ...] = ()
    conflict: tuple[Conflict, ...] = ()
    further: tuple[tuple[Conflict, ...], ...] = ()
    remedies: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {
            "ok": False,
            "code": self.code,
            "message": self.message,
            "groups": [group.to_json() for group in self.groups],
            "conflict": [member.to_json() for member in self.conflict],
            "further": [[member.to_json() for member in members] for members in self.further],
            "inherent": self.inherent,
            "remedies": list(self.remedies),
            "notes": [note.to_json() for note in self.notes],
        }

    @property
    def inherent(self) -> bool:
        """True if the conflict contains no setting of the user."""
        return not self.notes and all(member.inherent for member in self.conflict)
