"""Graph modes: resolved before anything is built, for each attention group by itself."""

from __future__ import annotations

import pytest
from negotiation_cases import CPU, FULL, GPU, backend, explicit, layer, request, sliding

from slotline.registry.capability import GraphSupport, Level, Limit, Max
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Asked, Plan, capture_sizes, negotiate


def plan_for(mode: str, *levels: GraphSupport, draft_tokens: int = 0) -> Plan:
    """A plan on a GPU with one group for each level."""
    layers = [layer(0), sliding(1)][: len(levels)]
    kinds = ("full", "sliding")[: len(levels)]
    offers = [backend(kind, graphs=Level(level)) for kind, level in zip(kinds, levels, strict=True)]
    asked = request(
        *layers,
        device=GPU,
        backend=explicit({kind: kind for kind in kinds}),
        graphs=Asked(mode, "run.toml:9 graphs.mode", mode != "auto"),
        query_len=Asked(1 + draft_tokens),
        max_query_len=Asked(512),
        kv_specs={"sliding": explicit("full")},
    )
    return negotiate(asked, offers, [FULL])


NEVER, SINGLE, UNIFORM, ALWAYS = GraphSupport


@pytest.mark.behaviour(149)
@pytest.mark.parametrize(
    ("mode", "level", "draft_tokens", "resolved"),
    [
        ("full", ALWAYS, 0, "full"),
        ("full", UNIFORM, 0, "full_and_piecewise"),
        ("full", SINGLE, 0, "full_and_piecewise"),
        ("full", SINGLE, 4, "piecewise"),
        ("full_and_piecewise", UNIFORM, 4, "full_and_piecewise"),
        ("full_and_piecewise", SINGLE, 4, "piecewise"),
        ("full_and_piecewise", NEVER, 0, "piecewise"),
        ("full_decode_only", SINGLE, 0, "full_decode_only"),
        ("full_decode_only", NEVER, 0, "piecewise"),
        ("piecewise", NEVER, 0, "piecewise"),
        ("none", ALWAYS, 0, "none"),
        ("auto", ALWAYS, 0, "full_and_piecewise"),
    ],
)
def test_the_mode_resolves_by_what_the_backend_can_be_captured_for(
    mode: str, level: GraphSupport, draft_tokens: int, resolved: str
) -> None:
    plan = plan_for(mode, level, draft_tokens=draft_tokens)
    assert plan.graphs.resolved == resolved
    changed = mode not in (resolved, "auto")
    assert [note.code for note in plan.downgrades] == (["N310"] if changed else [])


@pytest.mark.behaviour(149)
def test_full_graphs_by_name_with_a_backend_that_can_never_be_captured_are_an_error() -> None:
    with pytest.raises(NegotiationError) as caught:
        plan_for("full", NEVER)
    assert [(member.key, member.instead) for member in caught.value.conflict] == [
        ("graphs.mode", 'graphs.mode = "auto"')
    ]
    assert {reason.code for reason in caught.value.reasons} == {"N180"}


@pytest.mark.behaviour(149)
def test_a_group_that_cannot_be_captured_does_not_cost_the_others_their_graphs() -> None:
    plan = plan_for("full", ALWAYS, NEVER)
    assert dict(plan.group("full").graphs) == {"decode": "captured", "mixed": "captured"}
    assert dict(plan.group("sliding").graphs) == {"decode": "eager", "mixed": "eager"}
    assert plan.graphs.resolved == "piecewise"
    (note,) = plan.downgrades
    assert note.because == (
        "sliding, decode: sliding needs SINGLE_TOKEN, offers NEVER",
        "sliding, mixed: sliding needs ALWAYS, offers NEVER",
    )
    assert 'graphs.mode = "piecewise"' in note.to_avoid


def test_every_way_out_of_a_downgrade_was_tried() -> None:
    plan = plan_for("full", ALWAYS, UNIFORM)
    (note,) = plan.downgrades
    assert 'attention.backend = "full"' in note.to_avoid
    offers = [backend("full"), backend("sliding", graphs=Level(UNIFORM))]
    asked = request(layer(0), sliding(1), device=GPU, backend=explicit("full"), graphs=explicit("full"))
    assert negotiate(asked, offers, [FULL]).graphs.resolved == "full"


def test_decode_and_verification_are_judged_apart() -> None:
    plan = plan_for("full_and_piecewise", SINGLE, draft_tokens=3)
    assert dict(plan.groups[0].graphs) == {"decode": "captured", "verify": "eager", "mixed": "eager"}
    assert dict(plan.graphs.phases) == {"decode": "full", "verify": "piecewise", "mixed": "piecewise"}


def test_a_window_may_lower_the_graph_level_of_its_own_group_alone() -> None:
    limit = Limit(when="sliding_window", capability="graphs", offer=Level(UNIFORM))
    plan = negotiate(
        request(layer(0), sliding(1), device=GPU, graphs=explicit("full"), kv_specs={"sliding": explicit("full")}),
        [backend("a", limits=(limit,))],
        [FULL],
    )
    assert plan.group("full").captured("mixed")
    assert not plan.group("sliding").captured("mixed")
    assert plan.group("sliding").captured("decode")


def test_a_query_length_that_holds_only_outside_graphs_breaks_the_graph_of_that_phase() -> None:
    limit = Limit(when="graphs", capability="query_len", offer=Max(1))
    asked = request(device=GPU, query_len=Asked(5), max_query_len=Asked(64))
    plan = negotiate(asked, [backend("a", limits=(limit,))], [FULL])
    assert dict(plan.groups[0].graphs) == {"decode": "captured", "verify": "eager", "mixed": "eager"}
    assert plan.downgrades[0].because == ("full, verify: a query len in graphs: needs 5, offers at most 1",)


def test_auto_prefers_the_backend_that_keeps_graphs_to_one_of_higher_priority() -> None:
    offers = [backend("eager", graphs=Level(NEVER), priority=100), backend("captured")]
    plan = negotiate(request(device=GPU), offers, [FULL])
    assert plan.groups[0].backend == "captured"
    assert plan.groups[0].rejected[0].reasons[0].text.startswith("graphs: 1 wanted phases break at it, 0 at captured")


def test_a_device_without_graphs_resolves_to_none_with_a_reason() -> None:
    plan = negotiate(request(device=CPU), [backend("a")], [FULL])
    assert (plan.graphs.resolved, plan.graphs.reason, plan.downgrades) == ("none", "cpu has no graphs", ())
    asked = negotiate(request(device=CPU, graphs=explicit("full")), [backend("a")], [FULL])
    assert [note.code for note in asked.downgrades] == ["N311"]


def test_a_forward_that_cannot_be_captured_leaves_no_graphs_and_is_a_downgrade_with_its_reason() -> None:
    why = "it runs over 2 pipeline stages"
    plan = negotiate(request(device=GPU, uncaptured=why), [backend("a")], [FULL])
    assert (plan.graphs.asked, plan.graphs.resolved, plan.graphs.reason) == ("auto", "none", why)
    assert {dict(group.graphs)["decode"] for group in plan.groups} == {"none"}
    (note,) = plan.downgrades
    assert (note.code, note.because, note.to_avoid) == ("N312", (why,), ('graphs.mode = "none"',))
    own = negotiate(request(device=GPU, uncaptured=why, graphs=explicit("none")), [backend("a")], [FULL])
    assert own.downgrades == ()
    with pytest.raises(NegotiationError, match="N312"):
        negotiate(request(device=GPU, uncaptured=why, strict=True), [backend("a")], [FULL])


def test_capture_sizes_are_multiples_of_the_uniform_query_length() -> None:
    assert capture_sizes((1, 2, 4, 8, 16), 1, 256) == (1, 2, 4, 8, 16)
    assert capture_sizes((1, 2, 4, 8, 16), 5, 256) == (5, 10, 20)
    assert capture_sizes((1, 8, 64, 256), 5, 4) == (5, 10, 20)
    assert all(size % 3 == 0 for size in capture_sizes(range(1, 100), 3, 16))


def test_capture_sizes_reach_the_largest_batch_but_not_beyond() -> None:
    assert capture_sizes((1, 2, 4, 8, 16, 32), 1, 20) == (1, 2, 4, 8, 16, 20)
    assert capture_sizes((), 1, 20) == ()
