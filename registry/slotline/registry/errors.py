"""Public errors of slotline.

They share one root class, so that callers can catch all of them. Each message names the value at fault and a fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slotline.registry.negotiation.failure import Conflict, Failure
    from slotline.registry.negotiation.reasons import Reason


class SlotlineError(Exception):
    """Root of all slotline errors.

    Args:
        message: the problem, naming the value.
        fix: advice to the user, shown on its own line.
    """

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return self.message if self.fix is None else f"{self.message}\n  fix: {self.fix}"


class ConfigError(SlotlineError):
    """Invalid configuration. The message lists every fault with its place.

    Attributes:
        faults: the faults one by one, as `slotline.registry.config.Fault`.
    """

    def __init__(self, message: str, *, fix: str | None = None, faults: Sequence[Any] = ()) -> None:
        super().__init__(message, fix=fix)
        self.faults = tuple(faults)


class PluginError(SlotlineError):
    """Plugin that cannot be found, loaded or trusted."""


class PluginNotFoundError(PluginError):
    """No installed or inline plugin has the requested name."""


class PluginConflictError(PluginError):
    """Two distributions offer a plugin of the same kind under one name."""


class PluginLoadError(PluginError):
    """Named plugin that failed to import or is not a descriptor. The cause is chained."""


class ContractError(PluginError):
    """Host and plugin have no contract version in common."""


class NegotiationError(SlotlineError):
    """No plan satisfies the request. The error carries the reasons and the minimal conflict.

    Args:
        failure: the record of every rejection, the conflict and the remedies. `str` renders it in full.
    """

    def __init__(self, message: str, *, fix: str | None = None, failure: Failure | None = None) -> None:
        super().__init__(message, fix=fix)
        self.failure = failure

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Every reason of every candidate in every group."""
        groups = () if self.failure is None else self.failure.groups
        return tuple(reason for group in groups for item in group.rejected for reason in item.reasons)

    @property
    def conflict(self) -> tuple[Conflict, ...]:
        """Smallest set of needs that cannot be satisfied together."""
        return () if self.failure is None else self.failure.conflict

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON types."""
        return {"ok": False, "message": self.message} if self.failure is None else self.failure.to_json()

    def explain(self, width: int = 100) -> str:
        """Return the record as text."""
        if self.failure is None:
            return super().__str__()
        from slotline.registry.negotiation.explain import explain_failure

        return explain_failure(self.failure, width)

    def __str__(self) -> str:
        return self.explain()


class CapacityError(SlotlineError):
    """Too little memory for the weights, the cache or a single request."""


class ModelError(SlotlineError):
    """Checkpoint that is missing, broken or of an unsupported architecture."""


class RequestError(SlotlineError, ValueError):
    """Invalid request. Only this request fails, and the engine continues."""


class IntegrityError(SlotlineError):
    """Contradiction between rows, blocks or references, found by the integrity checker: a bug in slotline."""


class EngineFailedError(SlotlineError):
    """Failure after which an engine takes no more requests. The cause is chained."""


class RankError(EngineFailedError):
    """A rank that died, hangs, raised an error or disagrees with the others. All ranks of the engine have ended.

    Args:
        rank: its number, None if it is not known.
        step: number of its last step, 0 before the first.
        details: its traceback, or the stack of what it was doing.
    """

    def __init__(
        self, message: str, *, fix: str | None = None, rank: int | None = None, step: int = 0, details: str = ""
    ) -> None:
        super().__init__(message, fix=fix)
        self.rank, self.step, self.details = rank, step, details

    def __str__(self) -> str:
        details = "".join(f"\n  | {line}" for line in self.details.rstrip().splitlines())
        return f"{self.message}{details}" + ("" if self.fix is None else f"\n  fix: {self.fix}")


class CollectiveError(SlotlineError, RuntimeError):
    """Collective that another rank did not join in time, or that was ended. Its group cannot be used any more."""
