"""Plans with shared experts: what is recorded, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models

from slotline.llm.settings import load_settings
from slotline.planner.plan import make_plan
from slotline.registry.errors import ConfigError, NegotiationError


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("mixtral", tmp_path_factory.mktemp("mixtral") / "model")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("llama") / "model")


def planned(model: Path, **parallel: Any) -> Any:
    settings = {f"parallel.{name}": value for name, value in parallel.items() if name != "batch_invariant"}
    more = {name: value for name, value in parallel.items() if name == "batch_invariant"}
    return make_plan(load_settings(None, (), {"model": model, "dtype": "float32", **settings, **more}))


def settings_of(plan: Any) -> dict[str, tuple[str, str]]:
    return {one.key: (one.resolved, one.origin) for one in plan.settings if one.key.startswith("parallel.exp")}


def test_a_plan_says_how_many_experts_a_rank_has(mixtral: Path) -> None:
    plan = planned(mixtral, tensor=2, expert=2, redundant_experts=2, rebalance_steps=100).plan
    found = settings_of(plan)
    assert found["parallel.expert"][0] == "2"
    assert found["parallel.expert"][1].endswith(
        "4 mixtures of 4 experts -> 3 on a rank; 2 of all are copies; placed anew every 100 steps"
    )
    assert found["parallel.expert_placement"] == ("greedy", "auto: the one that fits")
    assert "expert_placement" in {part.kind for part in plan.parts}
    assert settings_of(planned(mixtral, tensor=2).plan) == {}


def test_a_rank_has_its_experts_whole_and_as_many_parameters_as_with_divided_ones(mixtral: Path) -> None:
    divided, shared = planned(mixtral, tensor=2).facts, planned(mixtral, tensor=2, expert=2).facts
    assert shared.num_parameters == divided.num_parameters
    assert shared.mixtures == divided.mixtures == (4, 4, 4, 4)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"expert": 2}, "parallel.tensor = 1: the ranks of a tensor group share the experts"),
        ({"expert": 2, "tensor": 4}, "parallel.tensor = 4: the ranks of a tensor group"),
        ({"expert": 3, "tensor": 3}, "4 experts and 0 redundant ones are no multiple of it .*redundant_experts = 2 is"),
        ({"expert": 2, "tensor": 2, "redundant_experts": 1}, "4 experts and 1 redundant ones are no multiple"),
        ({"expert": 2, "tensor": 2, "redundant_experts": 6}, "ranks would have an expert twice"),
        (
            {"expert": 2, "tensor": 2, "redundant_experts": 2, "batch_invariant": True},
            "the order of sums hangs on the place of an expert",
        ),
        ({"tensor": 2, "rebalance_steps": 5}, "parallel.rebalance_steps = 5 .*no ranks share whole experts"),
        ({"data": 2, "expert": 3}, "parallel.data = 2: all replicas share the experts, or only the ranks of each"),
        ({"data": 2, "tensor": 2, "expert": 4, "rebalance_steps": 9}, "with parallel.tensor above 1, experts stay"),
        ({"data": 2, "expert": 2, "expert_loads": True}, "by parallel.rebalance_steps alone"),
        ({"data": 2, "expert": 2, "batch_invariant": True}, "hang on the tokens of other replicas"),
        ({"expert_loads": True}, "parallel.expert_loads = true .*no ranks share whole experts"),
        ({"redundant_experts": 2}, "parallel.redundant_experts = 2 .*no ranks share whole experts"),
    ],
)
def test_what_does_not_fit_is_refused(mixtral: Path, parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(NegotiationError, match=message) as caught:
        planned(mixtral, **parallel)
    assert "parallel.expert" in str(caught.value.fix)


def test_replicas_that_share_experts_have_all_else_whole(mixtral: Path) -> None:
    planned_ = planned(mixtral, data=2, expert=2, rebalance_steps=100)
    whole, settings = planned(mixtral).facts, {one.key: one.origin for one in planned_.plan.settings}
    experts = 4 * 4 * (2 * 96 * 64 + 64 * 96)
    assert planned_.facts.layers == whole.layers
    assert (whole.num_parameters - planned_.facts.num_parameters) * 2 == experts
    assert "its part of the experts, all other weights and a cache of its own" in settings["parallel.data"]
    assert settings["parallel.expert"].endswith(
        "4 mixtures of 4 experts -> 2 on a replica, which sends each token to its experts; placed anew every 100 steps"
    )
    assert planned_.communicator.descriptor.name == "gloo"
    assert planned_.communicator.graphs_refusal == "communicator 'gloo' cannot be captured"
    assert settings_of(planned(mixtral, data=2, tensor=2, expert=2).plan)["parallel.expert"][1].endswith("on a rank")


def test_groups_that_share_experts_divide_all_else(mixtral: Path) -> None:
    both, divided = planned(mixtral, data=2, tensor=2, expert=4), planned(mixtral, tensor=2)
    assert both.facts.layers == divided.facts.layers
    assert (divided.facts.num_parameters - both.facts.num_parameters) * 4 == 4 * 4 * (2 * 96 * 64 + 64 * 96)
    assert settings_of(both.plan)["parallel.expert"][1].endswith(
        "-> 1 on a rank, which sends each token to its experts"
    )


def test_a_model_without_mixtures_is_refused(llama: Path) -> None:
    with pytest.raises(NegotiationError, match="LlamaForCausalLM has no mixture whose experts ranks can share"):
        planned(llama, data=2, expert=2)
    with pytest.raises(NegotiationError, match="LlamaForCausalLM has no mixture whose experts ranks can share"):
        planned(llama, tensor=2, expert=2)


@pytest.mark.parametrize(
    ("name", "value"), [("expert", 0), ("expert", "two"), ("redundant_experts", -1), ("rebalance_steps", -1)]
)
def test_bad_values_are_refused(mixtral: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"parallel.{name}"):
        planned(mixtral, tensor=2, **{name: value})


def test_an_unknown_placement_is_refused(mixtral: Path) -> None:
    with pytest.raises(Exception, match=r"expert_placement.*gredy") as caught:
        planned(mixtral, tensor=2, expert=2, expert_placement="gredy")
    assert "greedy" in f"{caught.value} {getattr(caught.value, 'fix', '')}"
