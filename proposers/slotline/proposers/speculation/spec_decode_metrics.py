"""Acceptance and timing statistics for speculative decoding."""

from __future__ import annotations

from typing import Any

from attrs import define, field


@define
class SpecDecodeMetrics:
    """Draft statistics, summed over a run.

    Attributes:
        steps: steps in which a request's drafts were verified, counted by request.
        proposed, accepted: draft tokens.
        accepted_at: how often the draft at each position was accepted.
        failures: proposals that were lost because the drafter raised or left the vocabulary.
        last_failure: the last of them. Empty if there were none.
        proposals: calls of the drafter.
        draft_seconds: time of these calls on the host.
        decodes: number of decoding steps with drafts (True) and without (False).
        decode_seconds: their time on the device, from the launch to the next proposal, for finished steps.
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
        """Return the mean tokens of a request in a verifying step, including the token after the drafts."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    def to_json(self) -> dict[str, Any]:
        """Return the counts and derived figures, as JSON types."""
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
