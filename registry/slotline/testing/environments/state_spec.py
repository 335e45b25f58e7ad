"""State layers for tests of specs of states, and a small model with states."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import torch
from attrs import frozen

from slotline.registry.contracts import StateLayer, StateSpecContext, StateTensorSpec
from slotline.registry.contracts.state import STATE_KINDS
from slotline.testing.check import Case, NotApplicable, Run
from slotline.testing.subject import Subject

FACTS: dict[str, tuple[dict[str, int], ...]] = {
    "short_conv": ({"channels": 5, "width": 4}, {"channels": 16, "width": 3}),
    "mamba1": ({"channels": 6, "state_size": 5}, {"channels": 16, "state_size": 1}),
    "mamba2": (
        {"num_heads": 3, "head_size": 4, "num_groups": 1, "state_size": 5},
        {"num_heads": 2, "head_size": 8, "num_groups": 2, "state_size": 16},
    ),
    "gated_delta": (
        {"num_k_heads": 1, "num_v_heads": 2, "head_size_k": 5, "head_size_v": 3},
        {"num_k_heads": 2, "num_v_heads": 4, "head_size_k": 8, "head_size_v": 8},
    ),
}
"""Sizes of two layers of each kind; the first has a state whose bytes no alignment divides."""

SEVERAL = (
    (("conv", (5, 2), "bfloat16"), ("ssm", (2, 3, 4), "float32"), ("count", (7,), "float16")),
    (("conv", (16,), "float16"), ("ssm", (1, 9), "float32")),
)
"""Tensors of two layers of a kind that the contract does not know: name, shape and dtype."""

OWN_KIND = "slotline_unknown_state"
"""Kind of the layers with several tensors, for a spec that holds every kind."""

UNITS = (16, 48, 1)
MAX_MODEL_LEN = 4096


def holds_states(subject: Subject) -> bool:
    """Return True if the plugin is a spec of states."""
    return bool(subject.capabilities.state.support)


def refuse_states(subject: Subject) -> None:
    """Return if the plugin is a spec of blocks.

    Raises:
        NotApplicable: if it holds states.
    """
    if holds_states(subject):
        raise NotApplicable("declared: it holds states, not blocks")


def refuse_blocks(subject: Subject) -> None:
    """Return if the plugin is a spec of states.

    Raises:
        NotApplicable: if it holds blocks.
    """
    if not holds_states(subject):
        raise NotApplicable("not declared: state")


def declared_kinds(subject: Subject) -> list[str]:
    """Return the kinds of state layers that the spec holds, those of the contract first.

    Raises:
        NotApplicable: if it declares none.
    """
    values = subject.capabilities.kv_kinds.values
    if values is None:
        return [*STATE_KINDS, OWN_KIND]
    found = [*(kind for kind in STATE_KINDS if kind in values), *sorted(values - set(STATE_KINDS))]
    if not found:
        raise NotApplicable("no kind of layer is declared")
    return found


def layers_of(kind: str, dtype: str = "float32") -> tuple[StateLayer, ...]:
    """Return two layers of a kind with different sizes.

    Args:
        kind: one of `STATE_KINDS`, or a plugin's own.
        dtype: dtype of states without a recurrence. Those of a recurrence are float32.
    """
    if kind not in STATE_KINDS:
        return tuple(_layer(kind, 3 * n, tuple(_tensor(*item) for item in SEVERAL[n]), {}) for n in range(2))
    spec, layers = STATE_KINDS[kind], []
    for number, facts in enumerate(FACTS[kind]):
        tensors = tuple(
            _tensor(name, tuple(_size(facts, dim) for dim in dims), "float32" if spec.recurrent else dtype)
            for name, dims in spec.tensors.items()
        )
        layers.append(_layer(kind, 3 * number, tensors, facts))
    return tuple(layers)


def _layer(kind: str, index: int, tensors: tuple[StateTensorSpec, ...], facts: dict[str, int]) -> StateLayer:
    return StateLayer(name=f"layers.{index}.{kind}", index=index, state_kind=kind, tensors=tensors, facts=facts)


def _tensor(name: str, shape: tuple[int, ...], dtype: str) -> StateTensorSpec:
    return StateTensorSpec(name=name, shape=shape, dtype=dtype)


def _size(facts: dict[str, int], dim: str) -> int:
    name, _, less = dim.partition(" - ")
    return facts[name] - int(less or 0)


def context_of(kind: str, *, unit: int, dtype: str = "float32", max_model_len: int = MAX_MODEL_LEN) -> StateSpecContext:
    """Return a build context with two layers of a kind."""
    layers = layers_of(kind, dtype)
    return StateSpecContext(contract=1, layers=layers, prefix_unit=unit, max_model_len=max_model_len)


@frozen(eq=False)
class Held:
    """Built spec of states and the context that it was built for."""

    spec: Any
    context: StateSpecContext

    @property
    def layers(self) -> tuple[StateLayer, ...]:
        """Layers of the context."""
        return self.context.layers

    @property
    def unit(self) -> int:
        """Prefix unit of the context."""
        return self.context.prefix_unit


def state_cases(subject: Subject) -> list[Case]:
    """Return the cases of a spec of states: each kind in two dtypes, with changing units.

    Raises:
        NotApplicable: if the plugin holds blocks.
    """
    refuse_blocks(subject)
    units = cycle(UNITS)
    return [
        {"kind": kind, "dtype": dtype, "unit": next(units)}
        for kind in declared_kinds(subject)
        for dtype in (("float32", "bfloat16") if kind == "short_conv" else ("float32",))
    ]


def unit_cases(subject: Subject) -> list[Case]:
    """Return a case for each prefix unit, for the rules, which do not depend on a layer's kind.

    Raises:
        NotApplicable: if the plugin holds blocks.
    """
    refuse_blocks(subject)
    kinds = cycle(declared_kinds(subject))
    return [{"kind": next(kinds), "dtype": "float32", "unit": unit} for unit in UNITS]


def build_spec(run: Run) -> Held:
    """Return the spec for a case of `state_cases` or `unit_cases`."""
    context = context_of(run["kind"], unit=run["unit"], dtype=run["dtype"])
    return Held(run.subject.build(context), context)


def num_bytes(tensor: StateTensorSpec) -> int:
    """Return the bytes of one tensor in one slot."""
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return tensor.num_elements * dtype.itemsize
