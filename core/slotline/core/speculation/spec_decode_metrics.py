"""How well a drafter guesses, and what it costs."""

from __future__ import annotations

from typing import Any

from attrs import define, field


@define
class SpecDecodeMetrics:
    """How drafts fared, summed over a run.

    Attributes:
        steps: steps in which drafts of some request were verified, counted by request.
        proposed, accepted: draft tokens.
        accepted_at: how often the draft at each position stood.
        failures: proposals that were lost because the drafter raised or left the vocabulary.
        last_failure: what the last of them was; empty for none.
        proposals, draft_seconds: calls of the drafter, and how long they took on the host.
        decodes: decoding steps that verified drafts, and those that had none; `decode_seconds` how long those took on
            the device, from the launch to the next proposal, once they are over there.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(factory=list)
    failures: int = 0
    last_failure: str = ""
    proposals: int = 0
    draft_seconds: float = 0.0
    decodes: dict[bool, int] = field(factory=lambda: {True: 0, False: 0})
    decode_seconds: dict[bool, float] = field(factory=lambda: {True: 0.0, False: 0.0})

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a request in a verifying step, the one after the drafts included."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    def to_json(self) -> dict[str, Any]:
        """The counts and what follows from them, as JSON types."""
        return {
            "steps": self.steps,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "acceptance_length": self.acceptance_length,
            "acceptance_by_position": [count / max(self.steps, 1) for count in self.accepted_at],
            "failures": self.failures,
            "last_failure": self.last_failure,
            "draft_seconds": self.draft_seconds / max(self.proposals, 1),
            "verify_seconds": self.decode_seconds[True] / max(self.decodes[True], 1),
            "plain_seconds": self.decode_seconds[False] / max(self.decodes[False], 1),
        }
