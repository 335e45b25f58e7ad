"""Mutants that break the contract before any value is computed."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from attrs import asdict, define, evolve, validators

from slotline.registry.capability import Align, Flag, GraphSupport, Set
from slotline.registry.capability import Level as Rung
from slotline.registry.capability import Limit as LimitOf
from slotline.registry.contracts.attention import (
    AttentionBatch,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayer,
    KVCache,
)
from slotline.registry.descriptor import Descriptor, DeviceInfo
from slotline.testing.check import Level
from slotline.testing.mutants import Mutant
from slotline.testing.mutants.attention.making import mutant, offer
from slotline.testing.reference.attention import descriptor as reference
from slotline.testing.reference.attention.backend import EagerAttention, Plan

# --- factory and methods


def factory_of_two(context: AttentionContext, device: str) -> EagerAttention:
    return EagerAttention(context)


def factory_by_name(*, context: AttentionContext) -> EagerAttention:
    return EagerAttention(context)


def factory_of_nothing(context: AttentionContext) -> None:
    EagerAttention(context)


class OnceOnly(EagerAttention):
    """Keeps a process-wide workspace that a second engine cannot have."""

    free: ClassVar[bool] = True

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        if not OnceOnly.free:
            raise RuntimeError("the workspace is taken")
        OnceOnly.free = False


class CopiesContext(EagerAttention):
    """Passes all fields of its context on by name."""

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        AttentionContext(**asdict(context, recurse=False))


class WithoutPlan(EagerAttention):
    plan = None  # type: ignore[assignment]


class WithoutWrite(EagerAttention):
    write = None  # type: ignore[assignment]


class WithoutSinks(EagerAttention):
    def forward(  # type: ignore[override]
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: Plan,
        out: torch.Tensor,
    ) -> torch.Tensor | None:
        return super().forward(layer, query, key, value, cache, plan, out)


class WriteWithoutLayer(EagerAttention):
    def write(self, key: torch.Tensor, value: torch.Tensor, cache: KVCache, plan: Plan) -> None:  # type: ignore[override]
        for view, new in zip(cache, (key, value), strict=True):
            self.store(view, plan.slot_mapping, new)


class ChokesOnExtras(EagerAttention):
    def plan(self, batch: AttentionBatch) -> Plan:
        if batch.extras:
            raise ValueError(f"unknown: {', '.join(batch.extras)}")
        return super().plan(batch)


# --- what forward returns


class ReturnsOut(EagerAttention):
    def forward(self, *given: Any, **named: Any) -> torch.Tensor | None:
        super().forward(*given, **named)
        return torch.as_tensor(given[6])


class ReturnsNoLSE(EagerAttention):
    def forward(self, *given: Any, **named: Any) -> torch.Tensor | None:
        super().forward(*given, **named)
        return None


class LSEByToken(EagerAttention):
    def forward(self, *given: Any, **named: Any) -> torch.Tensor | None:
        lse = super().forward(*given, **named)
        return None if lse is None else lse.T


class LSEInDouble(EagerAttention):
    def forward(self, *given: Any, **named: Any) -> torch.Tensor | None:
        lse = super().forward(*given, **named)
        return None if lse is None else lse.double()


# --- the descriptor


class Assignable(AttentionCapabilities):
    """Frozen no more."""

    __setattr__ = object.__setattr__


class ClaimsEverything(AttentionCapabilities):
    """Says yes to what it has never heard of."""

    def __getattr__(self, name: str) -> Flag:
        if name.startswith("_"):
            raise AttributeError(name)
        return Flag(True)


def capabilities(cls: type) -> Any:
    """Return the reference's capabilities as an instance of another class."""
    return cls(**asdict(reference.capabilities, recurse=False))


def probe_claims_sinks(device: DeviceInfo) -> Any:
    """Declare an undeclared feature for GPUs."""
    return evolve(_WITHOUT_SINKS.capabilities, sinks=Flag(device.type == "cuda"))


def probe_compares_none(device: DeviceInfo) -> Any:
    """Assume that every GPU reports its compute capability."""
    if device.type == "cuda" and device.compute_capability < (8, 0):  # type: ignore[operator]
        return "needs compute capability 8.0"
    return reference.capabilities


def probe_without_reason(device: DeviceInfo) -> Any:
    """Refuses everything but CPUs, and does not say why."""
    return reference.capabilities if device.type == "cpu" else ""


@define
class MutableOptions:
    """Options that can be assigned to."""

    parts: int = 1


_WITHOUT_SINKS = offer("without-sinks", "the reference without sinks", EagerAttention, sinks=Flag(False))
_MISSPELT = LimitOf(when="sliding_windows", capability="graphs", offer=Rung(GraphSupport.NEVER))
_OF_NOTHING = LimitOf(when="sliding_window", capability="graph", offer=Rung(GraphSupport.NEVER))
_NEVER_HOLDS = LimitOf(when="head_sizes", capability="attention_types", offer=Set(("decoder",)))


def _with(name: str, summary: str, base: Descriptor[Any] = reference, **changes: Any) -> Mutant:
    """Return a mutant with a changed descriptor."""
    return Mutant(name, summary, L0, evolve(base, **{"name": name, "summary": summary} | changes))


def listed() -> Align:
    """Block sizes in a list, which the class itself would make a tuple of."""
    sizes = Align(exact=(16,))
    object.__setattr__(sizes, "exact", [16])
    return sizes


def _unchecked(name: str, summary: str, **offer: Any) -> Mutant:
    """Return a mutant for which attrs does not check the fields' types."""
    with validators.disabled():
        return mutant(name, L0, summary, EagerAttention, **offer)


L0 = Level.CONTRACT

MUTANTS = (
    mutant("factory-of-two-arguments", L0, "the factory wants a second argument", factory_of_two),
    mutant("factory-by-keyword", L0, "the factory takes its context by keyword only", factory_by_name),
    mutant("factory-of-nothing", L0, "the factory returns None", factory_of_nothing),
    mutant("one-engine-per-process", L0, "a second build fails", OnceOnly),
    mutant("context-of-today", L0, "a context with one more field cannot be used", CopiesContext),
    mutant("plan-missing", L0, "there is no plan", WithoutPlan),
    mutant("write-missing", L0, "there is no write, though forward does not store", WithoutWrite),
    mutant("forward-without-sinks", L0, "forward does not take sinks", WithoutSinks),
    mutant("write-without-layer", L0, "write does not take the layer", WriteWithoutLayer),
    mutant("chokes-on-extras", L0, "an unknown entry in extras is an error", ChokesOnExtras),
    mutant("returns-out", L0, "forward returns its output", ReturnsOut),
    mutant("lse-not-returned", L0, "an LSE is declared and not returned", ReturnsNoLSE),
    mutant("lse-not-declared", L0, "an LSE is returned and not declared", EagerAttention, lse=Flag(False)),
    mutant("lse-by-token", L0, "the LSE is [tokens, heads]", LSEByToken),
    mutant("lse-in-double", L0, "the LSE is float64", LSEInDouble),
    mutant("block-sizes-in-a-list", L0, "a capability holds a list", EagerAttention, kernel_block_sizes=listed()),
    mutant(
        "prefers-what-it-refuses",
        L0,
        "a block size is preferred that the kernels do not take",
        EagerAttention,
        kernel_block_sizes=Align(multiple_of=16),
        preferred_block_sizes=Align((24,)),
    ),
    _unchecked("flag-is-a-bool", "a capability is True instead of Flag(True)", sliding_window=True),
    mutant("lse-base-10", L0, "the LSE is in a base that the contract lacks", EagerAttention, lse_base="10"),
    mutant("limit-misspelt", L0, "a limit's condition is misspelt", EagerAttention, limits=(_MISSPELT,)),
    mutant("limit-of-nothing", L0, "a limit narrows no capability", EagerAttention, limits=(_OF_NOTHING,)),
    mutant("limit-never-holds", L0, "a limit's condition cannot arise", EagerAttention, limits=(_NEVER_HOLDS,)),
    _with("capabilities-assignable", "capabilities can be changed", capabilities=capabilities(Assignable)),
    _with("claims-everything", "unknown capabilities are claimed", capabilities=capabilities(ClaimsEverything)),
    _with("probe-claims-more", "the probe declares sinks for GPUs", base=_WITHOUT_SINKS, probe=probe_claims_sinks),
    _with("probe-raises", "the probe fails for an unknown GPU", probe=probe_compares_none),
    _with("probe-without-reason", "the probe refuses without a reason", probe=probe_without_reason),
    _with("options-mutable", "options can be changed", options=MutableOptions),
    Mutant("name-auto", "the name means something else", L0, evolve(reference, name="auto")),
)
