"""L0 of step extensions: descriptor, capabilities, factory, the names of methods and features."""

from __future__ import annotations

from difflib import get_close_matches

from slotline.registry.contracts.extension import (
    FEATURE_METHODS,
    FEATURES,
    METHODS,
    ExtensionCapabilities,
    ExtensionContext,
)
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.contract_checks import KindContract, register_contract_checks
from slotline.testing.environments.extension import context_of
from slotline.testing.refusal_checks import UNKNOWN, register_part_refusals

KNOWN = (*METHODS, *FEATURE_METHODS)
ALIKE = 0.75
"""Likeness from which a name counts as a misspelt method."""


def _context(run: Run) -> ExtensionContext:
    return context_of(run)


register_contract_checks(KindContract(kind=Kind.EXTENSION, capabilities=ExtensionCapabilities, context=_context))
register_part_refusals(Kind.EXTENSION, {"devices": lambda _: ("cpu", "cuda", UNKNOWN)})


@check(Kind.EXTENSION, "extension.contract.names", Level.CONTRACT, cost=0.01)
def contract_names(run: Run) -> None:
    """The extension has a method of the contract, and none whose name is nearly that of one."""
    built = run.subject.build(context_of(run))
    names = [name for name in dir(built) if not name.startswith("_") and callable(getattr(built, name))]
    if not set(names) & set(KNOWN):
        raise Failed(f"it takes no part in a step: it has {', '.join(names) or 'no methods'}, and none of the contract")
    for name in set(names) - set(KNOWN):
        missing = [known for known in KNOWN if known not in names]
        if near := get_close_matches(name, missing, 1, ALIKE):
            raise Failed(f"{name} is no method of the contract and is never called: did you mean {near[0]}?")


@check(Kind.EXTENSION, "extension.contract.features", Level.CONTRACT, cost=0.001)
def contract_features(run: Run) -> None:
    """Provided features have names of their own, and all names and parameters are texts without repetition."""
    offer = run.subject.capabilities
    for what in ("parameters", "inputs", "provides", "requires", "excludes"):
        names = getattr(offer, what)
        if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
            raise Failed(f"{what} is {names!r}, expected different texts")
    if taken := sorted(set(offer.provides) & set(FEATURES)):
        raise Failed(f"provides names {', '.join(taken)}, which the plan itself decides")


@check(Kind.EXTENSION, "extension.contract.graphs", Level.CONTRACT, cost=0.01)
def contract_graphs(run: Run) -> None:
    """An extension with arguments for the forward pass excludes graphs, or has arguments for captures too."""
    built = run.subject.build(context_of(run))
    ready = hasattr(built, "capture_kwargs") or "graphs" in run.subject.capabilities.excludes
    if hasattr(built, "forward_kwargs") and not ready:
        raise Failed("it has forward_kwargs and does not exclude graphs: a captured forward pass takes no arguments")
