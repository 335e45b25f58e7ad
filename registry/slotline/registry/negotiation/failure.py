"""The record of a negotiation that found no plan."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from slotline.registry.negotiation.reasons import Note, Rejection


@frozen(kw_only=True)
class Conflict:
    """One member of a minimal set of needs that cannot hold together.

    Attributes:
        key: the configuration key, or ``model.<need>`` or ``device`` for what is given.
        value: what was asked.
        origin: who asked.
        inherent: True if the model or the device brings it, so that no setting takes it away.
        sufficient: True if a plan exists once this need alone is given up.
        instead: what to set then, a plan that was tried; "" if giving it up does not help.
    """

    key: str
    value: str
    origin: str
    inherent: bool = False
    sufficient: bool = False
    instead: str = ""

    def to_json(self) -> dict[str, Any]:
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
    """What each candidate lacked for one group (of attention or state layers, or a layer kind for cache specs)."""

    name: str
    kind: str
    layers: int
    rejected: tuple[Rejection, ...]

    def to_json(self) -> dict[str, Any]:
        rejected = [item.to_json() for item in self.rejected]
        return {"name": self.name, "kind": self.kind, "layers": self.layers, "rejected": rejected}


@frozen(kw_only=True)
class Failure:
    """The record of a negotiation that found no plan; the data behind `NegotiationError`.

    Attributes:
        code: what failed, a key of `codes.CODES`.
        message: one line.
        groups: all rejections with all reasons.
        conflict: the minimal set of needs that exclude each other; empty if nothing was asked that could be given up.
        further: conflicts that remain once the first is resolved; no two share a member.
        remedies: settings that make a plan possible, each tried.
        notes: under `strict`, the downgrades that may not pass.
    """

    code: str
    message: str
    groups: tuple[GroupFailure, ...] = ()
    conflict: tuple[Conflict, ...] = ()
    further: tuple[tuple[Conflict, ...], ...] = ()
    remedies: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    def to_json(self) -> dict[str, Any]:
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
        """True if nothing the user can set is part of the conflict."""
        return not self.notes and all(member.inherent for member in self.conflict)
