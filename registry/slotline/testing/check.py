"""Checks and their registry.

A check is a function of one argument, a `Run`, that returns if the plugin is right and raises if not. The decorator
`check` gives it a stable id, a level and the condition under which it applies:

    @check(
        Kind.ATTENTION,
        "attention.window.inclusive",
        Level.NUMERICS,
        needs={"sliding_window": True},
        cases=lambda subject: ({"window": w} for w in (16, 17, 18)),
    )
    def window_inclusive(run: Run) -> None:
        "A window of W tokens shows W keys, the query's own included."
        ...

Nothing here imports torch or pytest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum, StrEnum
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from slotline.registry.descriptor import Kind

if TYPE_CHECKING:
    from slotline.testing.subject import Subject

Case = Mapping[str, Any]
"""The parameters of one run of a check: names and plain JSON values, so that a report can show and repeat them."""


class Level(IntEnum):
    """Cumulative level of the behaviour that a plugin has shown."""

    CONTRACT = 0  # imports, descriptor, signatures, refusals at negotiation
    NUMERICS = 1  # correct values in benign surroundings
    HOSTILE = 2  # correct values in surroundings that expose wrong reads and writes
    STATEFUL = 3  # correct values over long random histories
    GRAPHS = 4  # correct values under capture and replay
    ENGINE = 5  # correct text in a whole engine

    def __str__(self) -> str:
        return f"L{self.value}"

    @property
    def title(self) -> str:
        """Level in words, e.g. ``L1 numerics``."""
        return f"{self} {self.name.lower()}"

    @classmethod
    def parse(cls, text: str) -> Level:
        """Return the level named by ``L3``, ``3`` or ``stateful``.

        Raises:
            ValueError: if the level does not exist.
        """
        for level in cls:
            if text.lower() in (str(level.value), str(level).lower(), level.name.lower()):
                return level
        raise ValueError(f"there is no level {text!r}: {', '.join(level.title for level in cls)}")


class Family(StrEnum):
    """Meaning of a check's outcome."""

    DECLARED = "declared"  # declared features work
    REFUSED = "refused"  # undeclared features are refused at negotiation
    UNDERDECLARED = "underdeclared"  # informational: works although it is not declared


class NotApplicable(Exception):  # noqa: N818  an outcome, not an error
    """Raised inside a check that does not apply to this plugin or machine. The message is the reason shown."""


class Failed(AssertionError):  # noqa: N818  as above
    """Raised inside a check if the plugin is wrong. A plain `assert` with a message has the same effect."""


@define
class Run:
    """Run of one check.

    Attributes:
        subject: the plugin.
        case: this run's parameters.
        seed: seed of every random choice inside.
        measured: values that the check reports, e.g. ``error``, ``baseline``, ``allowed``. Plain numbers and texts.
        batch: plain data of the latest batch that the check made, for kinds that have such. See
            `slotline.testing.shrinking`.
    """

    subject: Subject
    case: Case
    seed: int
    measured: dict[str, Any] = field(factory=dict)
    batch: Any = None

    @property
    def rng(self) -> Random:
        """New generator that depends only on the seed."""
        return Random(self.seed)

    def __getitem__(self, name: str) -> Any:
        return self.case[name]

    def measure(self, *, error: float, allowed: float, baseline: float | None = None, what: str = "output") -> None:
        """Record the worst error of the run and the allowed error.

        Raises:
            Failed: if the error is larger than allowed, or not a number.
        """
        ratio = error / allowed if allowed else (0.0 if error == 0 else float("inf"))
        if not ratio <= self.measured.get("ratio", -1.0):
            self.measured.update(error=error, allowed=allowed, ratio=ratio, baseline=baseline, what=what)
        if not error <= allowed:
            raise Failed(f"{what}: error {error:.3g}, allowed {allowed:.3g}")


def _frozen(given: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(given))


@frozen(kw_only=True)
class Check:
    """Registered check.

    Attributes:
        kind: kind of plugin.
        id: stable dotted name that begins with the kind. The key for expectations and reports.
        level: level of the check.
        function: the function that runs it.
        summary: first line of the function's docstring.
        needs: capability -> need. If the descriptor refuses a need, the check is skipped with that reason.
        cases: subject -> the parameters of each run.
        family: meaning of the outcome.
        since: first contract version that it applies to.
        mandatory: False for provisional and informational checks.
        profile: the exercised feature: ``decode``, ``prefill``, ``mixed``, ``window``, ``graphs`` and others.
        cost: approximate seconds on two CPU cores. Cheap checks run first within a level.
        explores: True if it draws random histories. It can be disabled, but not expected to fail.
    """

    kind: Kind
    id: str
    level: Level
    function: Callable[[Run], None]
    summary: str
    needs: Mapping[str, Any] = field(converter=_frozen)
    cases: Callable[[Subject], Iterable[Case]]
    family: Family = Family.DECLARED
    since: int = 1
    mandatory: bool = True
    profile: str = ""
    cost: float = 0.1
    explores: bool = False


_CHECKS: dict[str, Check] = {}

CHECK_MODULES: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {kind: (f"slotline.conformance.{kind.value}",) for kind in Kind}
)
"""Where the checks of each kind are; importing a package of checks fills the list."""


def _one_case(_subject: Subject) -> Iterable[Case]:
    return ({},)


def check(
    kind: Kind,
    check_id: str,
    level: Level,
    *,
    needs: Case = MappingProxyType({}),
    cases: Callable[[Subject], Iterable[Case]] = _one_case,
    family: Family = Family.DECLARED,
    since: int = 1,
    mandatory: bool | None = None,
    profile: str = "",
    cost: float = 0.1,
    explores: bool = False,
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Register a function as a check. See `Check` for the arguments. Informational families are never mandatory.

    Raises:
        ValueError: if the id does not begin with the kind, is taken, or the function has no docstring.
    """

    def register(function: Callable[[Run], None]) -> Callable[[Run], None]:
        if not check_id.startswith(f"{kind.value}."):
            raise ValueError(f"check id {check_id!r} must begin with '{kind.value}.'")
        if check_id in _CHECKS:
            raise ValueError(f"there is a check {check_id!r} already")
        if not function.__doc__:
            raise ValueError(f"check {check_id!r} needs a docstring: its first line is what reports show")
        _CHECKS[check_id] = Check(
            kind=kind,
            id=check_id,
            level=level,
            function=function,
            summary=function.__doc__.strip().splitlines()[0],
            needs=needs,
            cases=cases,
            family=family,
            since=since,
            mandatory=family is not Family.UNDERDECLARED if mandatory is None else mandatory,
            profile=profile,
            cost=cost,
            explores=explores,
        )
        return function

    return register


def all_checks(kind: Kind | None = None) -> tuple[Check, ...]:
    """Return the checks of a kind, or of all kinds, by level, then cost, then id."""
    kinds = CHECK_MODULES if kind is None else [kind]
    for every in kinds:
        for module in CHECK_MODULES.get(every, ()):
            importlib.import_module(module)
    found = (item for item in _CHECKS.values() if kind is None or item.kind is kind)
    return tuple(sorted(found, key=lambda item: (item.level, item.cost, item.id)))
