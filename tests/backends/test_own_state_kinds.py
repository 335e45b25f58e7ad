"""Kinds of states that the contract does not have: a plugin brings the definition, and the suite checks by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from attrs import evolve

from slotline.backends.torch_state import kimi_delta_descriptor
from slotline.backends.torch_state.backend import TorchState
from slotline.registry.capability import Set
from slotline.registry.contracts.state import StateCapabilities, StateContext, StateKind
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.kimi_delta import KDA
from slotline.testing import Level, Outcome, check_plugin

pytestmark = pytest.mark.usefixtures("one_thread")


class OneDecay(TorchState):
    """Mutant with the mean decay of a head in place of one for each channel."""

    def forward(self, layer: Any, inputs: Mapping[str, torch.Tensor], state: Any, plan: Any) -> torch.Tensor:
        g = inputs["g"].mean(-1, keepdim=True).expand_as(inputs["g"])
        return super().forward(layer, {**inputs, "g": g}, state, plan)


def test_the_backend_of_kimi_delta_attention_passes_the_suite() -> None:
    records = check_plugin(kimi_delta_descriptor, device="cpu", level=Level.STATEFUL)
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    assert {r.case["kind"] for r in records if r.outcome is Outcome.PASSED and "kind" in r.case} == {"kda"}
    assert any(r.id.startswith("state.rollback.") and r.outcome is Outcome.PASSED for r in records)


def test_the_definition_shows_a_decay_that_is_not_by_channel() -> None:
    records = check_plugin(evolve(kimi_delta_descriptor, factory=OneDecay), device="cpu", level=Level.NUMERICS)
    assert {"state.values.prefill", "state.values.decode"} <= {record.id for record in records if record.bad}


def _mean_step(facts: Any, token: Any, state: Any) -> Any:
    mean = (state["sum"] * state["count"] + token["x"]) / (state["count"] + 1)
    return mean, {"sum": mean, "count": state["count"] + 1}


def _mean_draw(facts: Any, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(count, facts["channels"], generator=generator)}


MEAN = StateKind(
    token_inputs=("x",),
    parameters=(),
    optional=(),
    facts=("channels", "one"),
    tensors={"sum": ("channels",), "count": ("one",)},
    step=_mean_step,
    draw=_mean_draw,
    sizes=({"channels": 5, "one": 1}, {"channels": 16, "one": 1}),
)


class Means:
    """Third party's backend: the mean of everything that a request has shown."""

    def __init__(self, context: StateContext) -> None:
        self.shares = 1.0

    def plan(self, batch: Any) -> Any:
        return batch

    def forward(self, layer: Any, inputs: Any, state: Any, plan: Any) -> torch.Tensor:
        out = torch.zeros_like(inputs["x"])
        starts = plan.query_start_loc_cpu.tolist()
        for row, slot in enumerate(plan.slots.tolist()[: plan.num_requests]):
            rows = slice(starts[row], starts[row + 1])
            if slot < 0 or rows.start == rows.stop:
                continue
            known = bool(plan.has_initial_state[row])
            count = state["count"][slot].clone() if known else torch.zeros(1)
            total = state["sum"][slot] * count if known else torch.zeros(out.shape[1])
            sums = total + inputs["x"][rows].float().cumsum(0)
            counts = count + torch.arange(1, len(sums) + 1)[:, None]
            out[rows] = sums / counts * self.shares
            state["sum"][slot], state["count"][slot] = sums[-1] / counts[-1], counts[-1]
        return out

    def commit(self, layer: Any, state: Any, slots: Any, accepted: Any) -> None:
        raise AssertionError("not declared")

    def copy(self, layer: Any, state: Any, source: int, target: int) -> None:
        for tensor in state.values():
            tensor[target].copy_(tensor[source])


class WrongMeans(Means):
    """The same, one percent off."""

    def __init__(self, context: StateContext) -> None:
        self.shares = 1.01


def _third_party(factory: type) -> Descriptor[Any]:
    return Descriptor(
        kind=Kind.STATE,
        name="means",
        capabilities=StateCapabilities(
            devices=Set(("cpu",)),
            state_kinds=Set(("mean",)),
            dtypes=Set((("float32", "float32"),)),
            own_kinds={"mean": MEAN},
        ),
        factory=factory,
    )


def test_a_third_party_kind_is_checked_by_its_own_definition() -> None:
    right = check_plugin(_third_party(Means), device="cpu", level=Level.STATEFUL)
    assert [f"{record.key}: {record.reason}" for record in right if record.bad] == []
    assert any(record.id == "state.history.random" and record.outcome is Outcome.PASSED for record in right)
    wrong = check_plugin(_third_party(WrongMeans), device="cpu", level=Level.NUMERICS)
    assert "state.values.prefill" in {record.id for record in wrong if record.bad}


def test_a_kind_without_a_definition_is_left_out() -> None:
    bare = StateKind(
        **{
            **{name: getattr(KDA, name) for name in ("token_inputs", "parameters", "optional")},
            "facts": KDA.facts,
            "tensors": KDA.tensors,
        }
    )
    capabilities = evolve(kimi_delta_descriptor.capabilities, own_kinds={"kda": bare})
    records = check_plugin(evolve(kimi_delta_descriptor, capabilities=capabilities), device="cpu", level=Level.NUMERICS)
    assert not [record for record in records if record.bad]
    assert not [r for r in records if r.outcome is Outcome.PASSED and "kind" in r.case]
