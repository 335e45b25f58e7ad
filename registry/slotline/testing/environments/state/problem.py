"""State layers with random parameters, from which tokens can be drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from slotline.registry.contracts.state import STATE_KINDS, StateKind, StateLayer, StateTensorSpec

Tensors = Mapping[str, Tensor]


@frozen
class Problem:
    """Layer with its parameters, from which tokens can be drawn.

    Attributes:
        layer: its static facts.
        parameters: inputs that are the same for every token, on the CPU.
        dtype, state_dtype: the declared pair.
        gated: True if tokens have z.
        memory: approximate number of tokens that a state remembers.
    """

    layer: StateLayer
    parameters: Tensors
    dtype: torch.dtype
    state_dtype: torch.dtype
    gated: bool
    memory: float

    def tokens(self, count: int, seed: int) -> dict[str, Tensor]:
        """Return inputs of `count` tokens of one request, on the CPU, in the dtypes of the contract."""
        generator = torch.Generator().manual_seed(seed)
        own = self.layer.own_kind
        if own is not None and own.draw is not None:
            drawn = own.draw(self.layer.facts, count, generator)
            return {name: value if name in own.wide else value.to(self.dtype) for name, value in drawn.items()}
        drawn = {}
        for name, shape in _token_shapes(self.layer, self.gated).items():
            value = torch.randn(count, *shape, generator=generator)
            drawn[name] = self._spread(name, value)
        return drawn

    def _spread(self, name: str, value: Tensor) -> Tensor:
        if name == "g":
            return -value.abs() / self.memory
        if name == "beta":
            value = torch.sigmoid(value) * min(1.0, 8.0 / self.memory)  # a long-lived state changes slowly
        if name == "k" and not self.layer.facts["qk_l2norm"]:
            value = torch.nn.functional.normalize(value, dim=-1)  # longer keys make the recurrence grow
        if name == "dt" and not self.layer.facts["dt_softplus"]:
            value = value.abs()
        return value.to(self.dtype)


def make_problem(
    kind: str,
    dtypes: tuple[str, str],
    facts: Mapping[str, Any],
    *,
    optional: bool = True,
    memory: float = 8.0,
    seed: int = 0,
    index: int = 0,
    own_kind: StateKind | None = None,
) -> Problem:
    """Return a layer of a kind with random parameters. `optional` inputs are all present or all absent."""
    dtype, state_dtype = (getattr(torch, name) for name in dtypes)
    spec = own_kind or STATE_KINDS[kind]
    tensors = tuple(
        StateTensorSpec(name=name, shape=_shape(dims, facts), dtype=dtypes[1] if spec.recurrent else dtypes[0])
        for name, dims in spec.tensors.items()
    )
    layer = StateLayer(
        name=f"layers.{index}.{kind}",
        index=index,
        state_kind=kind,
        tensors=tensors,
        facts=dict(facts),
        own_kind=own_kind,
    )
    parameters = (
        {} if own_kind else _parameters(kind, facts, dtype, optional, memory, torch.Generator().manual_seed(seed + 1))
    )
    gated = optional and "z" in spec.optional
    return Problem(layer, parameters, dtype, state_dtype, gated, memory)


def _shape(dims: Sequence[str], facts: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(facts["width"] - 1 if dim == "width - 1" else facts[dim] for dim in dims)


def _parameters(
    kind: str, facts: Mapping[str, Any], dtype: torch.dtype, optional: bool, memory: float, generator: torch.Generator
) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if kind == "short_conv":
        found = {"weight": normal(facts["channels"], facts["width"]).to(dtype)}
        return found | ({"bias": normal(facts["channels"]).to(dtype)} if optional else {})
    if kind == "gated_delta":
        return {}
    rows = (facts["channels"],) if kind == "mamba1" else (facts["num_heads"],)
    rates = (*rows, facts["state_size"]) if kind == "mamba1" else rows
    found = {"A": -(0.5 + torch.rand(*rates, generator=generator)) / memory}
    return found | ({"D": 1 + normal(*rows), "dt_bias": 1 + normal(*rows)} if optional else {})


def _token_shapes(layer: StateLayer, gated: bool) -> dict[str, tuple[int, ...]]:
    facts = layer.facts
    if layer.state_kind == "short_conv":
        return {"x": (facts["channels"],)}
    if layer.state_kind == "gated_delta":
        key = (facts["num_k_heads"], facts["head_size_k"])
        heads = facts["num_v_heads"]
        return {"q": key, "k": key, "v": (heads, facts["head_size_v"]), "g": (heads,), "beta": (heads,)}
    if layer.state_kind == "mamba1":
        rows: tuple[int, ...] = (facts["channels"],)
        columns: tuple[int, ...] = (facts["state_size"],)
        x = rows
    else:
        rows, columns = (facts["num_heads"],), (facts["num_groups"], facts["state_size"])
        x = (*rows, facts["head_size"])
    return {"x": x, "dt": rows, "B": columns, "C": columns} | ({"z": x} if gated else {})


def with_unknown_names(problem: Problem) -> Problem:
    """Return the same layer with an unknown fact and an unknown input."""
    layer = evolve(problem.layer, facts={**problem.layer.facts, "unknown_to_this_version": 1})
    return evolve(problem, layer=layer, parameters={**problem.parameters, "unknown_to_this_version": torch.zeros(1)})
