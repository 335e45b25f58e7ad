"""Graphs around state layers, as far as a CPU shows them: what is inside, what breaks them, what the plan says."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from negotiation_cases import GPU, explicit

from slotline.builder.graph_capturer import GraphCapturer
from slotline.builder.made_up import made_up_inputs
from slotline.core import LLM
from slotline.core.batch.graph_dispatcher import GraphDispatcher, GraphShape
from slotline.plugins.kv_specs.mamba import descriptor as mamba
from slotline.registry.capability import Flag, GraphSupport, Level, Limit, Max, Set
from slotline.registry.negotiation import Asked, Candidate, Plan, PlanRequest, group_states, negotiate
from tests.registry.negotiation.test_negotiation_states import LAYERS
from tests.registry.negotiation.test_negotiation_states import backend as anywhere

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]


def backend(name: str, **changes: Any) -> Candidate:
    return anywhere(name, devices=Set(("cuda",)), **changes)


def plan(*candidates: Candidate, **changes: Any) -> Plan:
    request = PlanRequest(device=GPU, groups=(), state_groups=group_states(LAYERS), **changes)
    return negotiate(request, (), (Candidate(descriptor=mamba, distribution="slotline"),), candidates)


def test_groups_that_declare_capture_keep_their_graphs() -> None:
    found = plan(backend("a", graphs=Level(GraphSupport.SINGLE_TOKEN)), prefix_caching=explicit(False))
    assert found.graphs.phases == (("decode", "full"), ("mixed", "piecewise"))
    assert found.graphs.resolved == "full_and_piecewise"
    assert {dict(group.graphs)["decode"] for group in found.state_groups} == {"captured"}
    assert not found.downgrades


def test_one_group_that_declares_none_breaks_the_graph_and_says_why() -> None:
    convs = backend("convs", priority=10, state_kinds=Set(("short_conv",)), graphs=Level(GraphSupport.ALWAYS))
    found = plan(convs, backend("all"), prefix_caching=explicit(False))
    assert {group.name: dict(group.graphs)["decode"] for group in found.state_groups} == {
        "short_conv": "captured",
        "mamba2": "eager",
        "short_conv_1": "captured",
    }
    assert found.graphs.resolved == "piecewise"
    (note,) = found.downgrades
    assert note.code == "N310"
    assert [text for text in note.because if "mamba2, decode: all needs SINGLE_TOKEN, offers NEVER" in text]
    assert not plan(
        convs, backend("all"), prefix_caching=explicit(False), graphs=explicit(note.resolved)
    ).downgrades  # what `to_avoid` says


def test_a_limit_on_tokens_in_graphs_counts_for_verified_batches() -> None:
    drafter = Asked(4, "drafter: 1+3 tokens", True)
    offer = {"rollback": Flag(True), "graphs": Level(GraphSupport.UNIFORM)}
    found = plan(backend("a", **offer), query_len=drafter, prefix_caching=explicit(False))
    assert dict(found.graphs.phases)["verify"] == "full"
    limit = Limit(when="graphs", capability="query_len", offer=Max(2))
    found = plan(backend("a", **offer, limits=(limit,)), query_len=drafter, prefix_caching=explicit(False))
    assert dict(found.graphs.phases) == {"decode": "full", "verify": "piecewise", "mixed": "piecewise"}


def test_the_calls_between_graphs_give_what_the_forward_gives_and_hold_none_of_it(tiny: Tiny, engines: Engines) -> None:
    """Every second group breaks the graph; the others stay inside."""
    engine = engines(tiny("bamba")).engine
    router, states, model = engine.runner.router, engine.extension("states").dispatcher, engine.runner.model
    calls: list[Callable[[], None]] = []
    held: list[Any] = []
    inside: list[str] = []

    def now(call: Callable[[], None]) -> None:
        calls.append(call)
        call()

    breaking = states.breaking({"mamba2"}, now)

    def watched(layer: Any, inputs: Any) -> torch.Tensor:
        before = len(calls)
        out = breaking(layer, inputs)
        if len(calls) == before:
            inside.append(layer.name)
        else:
            held.append(weakref.ref(inputs["x"]))
        return out

    with torch.inference_mode():
        inputs = made_up_inputs(engine.gatherer, [3, 5], vocab_size=50)
        found = []
        for served in (states.advance, watched):
            attend, _ = router.plan(inputs.batches), states.plan(inputs.extras["states"])
            found.append(model.forward(inputs.input_ids, inputs.positions, attend, advance=served))
    assert torch.equal(*found)
    gc.collect()
    by_name = {group.name: [layer.name for layer in group.layers] for group in states.groups}
    assert inside == by_name["short_conv"]
    assert len(calls) == len(by_name["mamba2"])
    assert all(reference() is None for reference in held)


@pytest.mark.parametrize("query_len", [1, 3])
def test_padded_requests_have_no_slot(tiny: Tiny, engines: Engines, query_len: int) -> None:
    engine = engines(tiny("bamba")).engine
    shape = GraphShape(4 * query_len, query_len)
    for count in (4, 2, 1):
        inputs = made_up_inputs(engine.gatherer, [query_len] * count, seq_len=20, shape=shape)
        batch = inputs.extras["states"]
        assert batch.slots.tolist() == [*range(count), *[-1] * (4 - count)]
        assert batch.has_initial_state.tolist() == [True] * count + [False] * (4 - count)
        assert batch.num_accepted.tolist() == [1] * 4
        assert batch.query_start_loc.tolist() == [query_len * index for index in range(5)]
        assert batch.query_start_loc_cpu.tolist() == [query_len * index for index in range(count + 1)]
        assert (batch.num_requests, batch.num_tokens) == (count, count * query_len)
        assert batch.num_decodes == (count if query_len == 1 else 0)
        engine.runner.launch(inputs)  # the backend takes padding as it comes


def test_a_runner_of_graphs_breaks_them_at_the_groups_that_the_plan_says(tiny: Tiny, engines: Engines) -> None:
    engine = engines(tiny("bamba")).engine
    shapes = GraphDispatcher({"decode": "full"}, (1,), query_len=1, max_requests=4, max_tokens=8)
    runner = GraphCapturer(
        engine.runner.model,
        engine.runner.router,
        engine.gatherer,
        engine.plan,
        shapes,
        engine.cascade,
        engine.runner.last_tokens,
        extensions=engine.extensions,
    )
    assert runner.broken(GraphShape(1, 1)) == {"full", "short_conv", "mamba2"}
