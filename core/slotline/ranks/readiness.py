"""Agreement on requests that become ready in the background, as when their grammar is compiled.

Grammars are ready at different times on different ranks. Rank 0 says which requests are queued before a step, and the
other ranks wait for theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, field

from slotline.core.engine.engine import ReadyRequests
from slotline.registry.errors import RankError

Names = tuple[list[str], list[str]]
"""Ids of the requests that are ready, and of those that failed."""


@define(eq=False)
class Readiness:
    """Requests that all ranks queue in the next step."""

    _found: ReadyRequests = field(factory=lambda: ([], []), init=False)

    def keep(self, found: ReadyRequests) -> Names:
        """Keep what this rank has found. Return the ids."""
        for kept, new in zip(self._found, found, strict=True):
            kept.extend(new)  # type: ignore[arg-type]
        return [one.request_id for one in found[0]], [one.request_id for one, _ in found[1]]

    def follow(self, told: Names, found: ReadyRequests) -> None:
        """Keep the requests that rank 0 has found.

        Args:
            told: their ids.
            found: what this rank has found of them, after it waited for them.

        Raises:
            RankError: if what is ready there fails here, or the other way round.
        """
        own = self.keep(found)
        if own != told:
            raise RankError(
                f"requests became ready otherwise than on rank 0: {_text(own)} here, {_text(told)} there",
                fix="give all ranks the same packages and files",
            )

    def take(self, unfinished: Callable[[Any], bool]) -> ReadyRequests:
        """Return the found requests that have not ended since, once."""
        (ready, failed), self._found = self._found, ([], [])
        return [one for one in ready if unfinished(one)], [one for one in failed if unfinished(one[0])]


def _text(names: Names) -> str:
    return f"ready {names[0]}, failed {names[1]}"
