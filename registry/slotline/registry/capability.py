"""Capability classes: data with a comparison rule.

A plugin declares its offers with these classes. Negotiation compares an offer with a need by calling `refusal`, which
returns None or the sentence for the plan. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, IntEnum
from typing import Any, Generic, Protocol, TypeVar

from attrs import field, frozen

from slotline.registry.declared import declared
from slotline.registry.errors import ContractError

T = TypeVar("T")
L = TypeVar("L", bound=IntEnum)


class Support(Enum):
    """Degree of support, with different states for `not yet` and `cannot`."""

    UNKNOWN = "unknown"
    UNSUPPORTED = "unsupported"
    NOT_IMPLEMENTED = "not implemented"
    VERSIONED = "supported from a version on"
    FULL = "supported"

    def __bool__(self) -> bool:
        return self in (Support.VERSIONED, Support.FULL)


class GraphSupport(IntEnum):
    """Batches that a backend's forward can be captured for, in ascending order."""

    NEVER = 0
    SINGLE_TOKEN = 1  # one query token per request
    UNIFORM = 2  # equal query lengths, 1 + k tokens under speculation included
    ALWAYS = 3  # any mix of prefill and decode


class Capability(Protocol):
    """Protocol of every capability class."""

    def refusal(self, need: Any) -> str | None:
        """Return None if the offer covers `need`, else a sentence of the form `needs X, offers Y`."""
        ...

    def describe(self) -> str:
        """Return the offer in a few words, for tables."""
        ...


def _support(value: Support | bool) -> Support:
    if isinstance(value, bool):
        return Support.FULL if value else Support.UNSUPPORTED
    return value


def _frozen(values: Iterable[T] | None) -> frozenset[T] | None:
    if isinstance(values, str):
        raise ContractError(f"Set({values!r}) would be a set of letters", fix=f"write Set(({values!r},))")
    try:
        return None if values is None else frozenset(values)
    except TypeError as error:
        raise ContractError(f"Set({values!r:.60}) is no set: {error}", fix="give a tuple of values, or None") from error


def _names(values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise ContractError(f"Choice({values!r}) would be a choice of letters", fix=f"write Choice(({values!r},))")
    try:
        return tuple(values)
    except TypeError as error:
        raise ContractError(f"Choice({values!r:.60}) is no list of names: {error}", fix="give a tuple") from error


def _positive(instance: object, attribute: Any, value: int | None) -> None:
    """Raise ContractError for a step below 1."""
    if value is not None and value < 1:
        name = f"{type(instance).__name__}.{attribute.name}"
        raise ContractError(f"{name} is {value}, expected 1 or more", fix=f"correct {attribute.name}")


@frozen(field_transformer=declared)
class Flag:
    """Yes or no. A need of False is always covered."""

    support: Support = field(converter=_support)
    note: str = ""

    def refusal(self, need: bool) -> str | None:
        """Return None if the feature is not needed or supported, else a sentence."""
        if not need or self.support:
            return None
        return f"needs it, {self.describe()}"

    def describe(self) -> str:
        """Return the degree of support and the note."""
        return self.support.value + (f" ({self.note})" if self.note else "")


@frozen
class AnyOf:
    """A need that a set covers if it holds one of several values."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return " or ".join(map(str, self.values))


@frozen(field_transformer=declared)
class Set(Generic[T]):
    """Set of values, or of pairs if only certain combinations work. `None` accepts anything."""

    values: frozenset[T] | None = field(converter=_frozen)

    def refusal(self, need: T) -> str | None:
        """Return None if `need` is in the set, else a sentence."""
        if self.values is None or need in self.values:
            return None
        if isinstance(need, AnyOf) and not self.values.isdisjoint(need.values):
            return None
        return f"needs {_show(need)}, offers {self.describe()}"

    def describe(self) -> str:
        """Return the values, sorted."""
        return "any" if self.values is None else _join(sorted(map(_show, self.values)))


@frozen(field_transformer=declared)
class Level(Generic[L]):
    """Step of an ordered scale. Needs up to it are covered."""

    value: L

    def refusal(self, need: L) -> str | None:
        """Return None if `need` is not above the level, else a sentence."""
        if need <= self.value:
            return None
        return f"needs {need.name}, offers {self.value.name}"

    def describe(self) -> str:
        """Return the level's name."""
        return self.value.name


@frozen(field_transformer=declared)
class Max:
    """Upper limit. None means no limit."""

    limit: int | None = None

    def refusal(self, need: int) -> str | None:
        """Return None if `need` is within the limit, else a sentence."""
        if self.limit is None or need <= self.limit:
            return None
        return f"needs {need}, offers at most {self.limit}"

    def describe(self) -> str:
        """Return the limit."""
        return "no limit" if self.limit is None else f"<= {self.limit}"


@frozen(field_transformer=declared)
class Align:
    """Block sizes: exact values, multiples of a base, or both. If both are empty, any positive size is accepted."""

    exact: tuple[int, ...] = ()
    multiple_of: int | None = field(default=None, validator=_positive)

    def refusal(self, need: int) -> str | None:
        """Return None if the block size `need` is accepted, else a sentence."""
        if need >= 1 and (not self.exact and self.multiple_of is None):
            return None
        if need in self.exact or (self.multiple_of is not None and need >= 1 and need % self.multiple_of == 0):
            return None
        return f"needs {need}, offers {self.describe()}"

    def describe(self) -> str:
        """Return the accepted sizes."""
        parts = [str(v) for v in self.exact]
        if self.multiple_of is not None:
            parts.append(f"multiples of {self.multiple_of}")
        return _join(parts) if parts else "any"


@frozen(field_transformer=declared)
class Choice:
    """Ordered preference among names, best first."""

    options: tuple[str, ...] = field(converter=_names)

    def refusal(self, need: str) -> str | None:
        """Return None if the name `need` is an option, else a sentence."""
        if need in self.options:
            return None
        return f"needs {need}, offers {self.describe()}"

    def describe(self) -> str:
        """Return the options in order of preference."""
        return " > ".join(self.options)


@frozen(field_transformer=declared)
class Range:
    """Integers from `minimum` to `maximum` in steps of `step` (counted from zero), plus `extra` values."""

    minimum: int = 1
    maximum: int | None = None
    step: int = field(default=1, validator=_positive)
    extra: tuple[int, ...] = ()

    def refusal(self, need: int) -> str | None:
        """Return None if `need` is in the range, else a sentence."""
        inside = need >= self.minimum and (self.maximum is None or need <= self.maximum)
        if need in self.extra or (inside and need % self.step == 0):
            return None
        return f"needs {need}, offers {self.describe()}"

    def describe(self) -> str:
        """Return the range and the extra values."""
        if self.minimum == self.maximum:
            return _join(map(str, (self.minimum, *self.extra)))
        top = "" if self.maximum is None else f" to {self.maximum}"
        step = "" if self.step == 1 else f" in steps of {self.step}"
        extra = f", or {_join(map(str, self.extra))}" if self.extra else ""
        return f"{self.minimum}{top or ' and up'}{step}{extra}"


@frozen(kw_only=True, field_transformer=declared)
class Limit:
    """Restriction that applies only with another need: `capability` shrinks to `offer` if `when` is needed.

    Example: sliding windows work, but not inside a graph of mixed batches: ``Limit(when="sliding_window",
    capability="graphs", offer=Level(GraphSupport.UNIFORM))``.
    """

    when: str
    capability: str
    offer: Capability
    note: str = ""


def _show(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _join(parts: Iterable[str]) -> str:
    return ", ".join(parts)
