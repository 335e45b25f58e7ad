"""Every error that slotline raises at its edge.

One root, so that a caller can catch what is ours; each error names the value at fault and what to do about it.
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
        message: what is wrong, naming the value.
        fix: what the user can do about it; shown on a line of its own.
    """

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return self.message if self.fix is None else f"{self.message}\n  fix: {self.fix}"


class ConfigError(SlotlineError):
    """The configuration cannot be used; the message lists every fault found, each with its place.

    Attributes:
        faults: the faults one by one, as `slotline.registry.config.Fault`.
    """

    def __init__(self, message: str, *, fix: str | None = None, faults: Sequence[Any] = ()) -> None:
        super().__init__(message, fix=fix)
        self.faults = tuple(faults)


class PluginError(SlotlineError):
    """A plugin cannot be found, loaded or trusted."""


class PluginNotFoundError(PluginError):
    """No installed or inline plugin has the name that was asked for."""


class PluginConflictError(PluginError):
    """Two distributions offer a plugin of the same kind under one name."""


class PluginLoadError(PluginError):
    """A plugin that was named failed to import or is not a descriptor; the cause is chained."""


class ContractError(PluginError):
    """Host and plugin have no contract version in common."""


class NegotiationError(SlotlineError):
    """No plan satisfies what was asked; carries the reasons and the minimal conflict.

    Args:
        failure: the record: every rejection, the conflict, the remedies. `str` renders it in full.
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
        """A smallest set of needs that cannot hold together."""
        return () if self.failure is None else self.failure.conflict

    def to_json(self) -> dict[str, Any]:
        """The record as JSON types."""
        return {"ok": False, "message": self.message} if self.failure is None else self.failure.to_json()

    def explain(self, width: int = 100) -> str:
        """The record as text."""
        if self.failure is None:
            return super().__str__()
        from slotline.registry.negotiation.explain import explain_failure

        return explain_failure(self.failure, width)

    def __str__(self) -> str:
        return self.explain()


class CapacityError(SlotlineError):
    """The memory does not hold what was asked for, be it weights, cache or a single request."""


class ModelError(SlotlineError):
    """A checkpoint is missing, broken or of an architecture that no model family serves."""


class RequestError(SlotlineError, ValueError):
    """One request is wrong. Only that request fails; the engine goes on."""


class IntegrityError(SlotlineError):
    """The integrity checker found rows, blocks or references that contradict each other: a bug in slotline."""
