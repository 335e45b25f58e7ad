"""Answers of the checks that passes make, so that weights which were saved after the passes need no checks again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, field

from slotline.registry.errors import ModelError


@define(eq=False)
class Decisions:
    """Answers in the order in which the passes ask, which hangs on the model's structure alone.

    Attributes:
        answers: those found so far, or those of an earlier run. None stands for a check that raised.
        known: True if the answers are those of an earlier run. Nothing is checked then, and tensors may be on the meta
            device.
        complete: False if a pass stepped aside, after which the answers cannot be repeated.
    """

    answers: list[Any] = field(factory=list)
    known: bool = False
    complete: bool = True
    _asked: int = field(default=0, init=False)

    def decide(self, check: Callable[[], Any]) -> Any:
        """Return the answer of a check, or the answer of the earlier run.

        Raises:
            ModelError: if the earlier run asked less often.
        """
        if not self.known:
            self.answers.append(None)
            self.answers[-1] = answer = check()
            return answer
        if self._asked == len(self.answers):
            raise other_passes()
        self._asked += 1
        return self.answers[self._asked - 1]

    def finish(self) -> None:
        """Check that all known answers were asked for.

        Raises:
            ModelError: if the earlier run asked more often.
        """
        if self.known and self._asked != len(self.answers):
            raise other_passes()


def other_passes() -> ModelError:
    """Return the error for answers that do not fit the passes."""
    return ModelError(
        "the weights were saved after other passes than those that this version makes of the model",
        fix="save the weights again from the checkpoint that they were made from",
    )
