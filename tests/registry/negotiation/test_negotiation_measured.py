"""Negotiation by measured cost: what was timed decides where nobody asked, and the explanation gives the figures."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from negotiation_cases import CPU, FULL, GPU, SLIDING, backend, explicit, layer, request, sliding

from slotline.registry.capability import Align, GraphSupport, Level
from slotline.registry.negotiation import Asked, Measured, MeasuredRun, Plan, PlanRequest, negotiate, with_measurements
from slotline.registry.negotiation.measured import from_json, in_words, to_json

SLOW = backend("slow", priority=9)
FAST = backend("fast")


def run(name: str, milliseconds: float | None, graphs: str = "none", **changes: Any) -> MeasuredRun:
    seconds = {} if milliseconds is None else {"decode 1": milliseconds / 1e3, "prefill 16": milliseconds / 1e2}
    values = {"backends": {"full": name}, "versions": {name: "1.0"}, "block_size": 16, "graphs": graphs, "aim": graphs}
    return MeasuredRun(**{**values, "seconds": seconds, **changes})


def measured(*runs: MeasuredRun, aim: str = "none", **changes: Any) -> Measured:
    values = {"date": "2026-11-21", "dtype": "float32", "kv_dtype": "float32", "source": "m.json"}
    return Measured(aim=aim, runs=runs, **{**values, **changes})


def plan(figures: Measured | None, asked: PlanRequest | None = None, offers: Any = (SLOW, FAST)) -> Plan:
    return negotiate(with_measurements(asked or request(), figures, offers), offers, [FULL, SLIDING])


def chosen(figures: Measured | None, asked: PlanRequest | None = None, offers: Any = (SLOW, FAST)) -> str:
    return plan(figures, asked, offers).groups[0].backend


def test_without_a_measurement_the_static_preference_decides_and_the_plan_says_so() -> None:
    made = plan(None)
    assert made.groups[0].backend == "slow"
    assert made.groups[0].reason == "2 candidates fit, not measured here; decided by priority"
    assert made.measured == ""


def test_the_faster_backend_is_chosen_with_the_figures_of_both() -> None:
    made = plan(measured(run("slow", 2.4), run("fast", 1.0)))
    (group,) = made.groups
    assert group.backend == "fast"
    assert group.reason == "chosen by measurement: 3.16 ms against 7.59 ms of slow, slotline tune 2026-11-21"
    assert group.rejected[0].reasons[0].text == "measured: 7.59 ms, fast 3.16 ms (slotline tune 2026-11-21)"
    assert group.rejected[0].reasons[0].code == "N191"
    assert "measured      slotline tune 2026-11-21: m.json" in made.explain()


def test_what_differs_by_less_than_the_noise_is_left_to_the_static_preference() -> None:
    made = plan(measured(run("slow", 1.01), run("fast", 1.0)))
    assert made.groups[0].backend == "slow"
    assert "too close in their measured times; decided by priority" in made.groups[0].reason


def test_samples_that_lie_far_apart_decide_nothing() -> None:
    figures = measured(run("slow", 1.3, noise=0.1), run("fast", 1.0, noise=0.4))
    assert chosen(figures) == "slow"
    assert chosen(measured(run("slow", 1.3, noise=0.1), run("fast", 1.0, noise=0.1))) == "fast"


def test_an_explicit_choice_stands_against_every_figure() -> None:
    figures = measured(run("slow", 2.4), run("fast", 1.0))
    assert chosen(figures, request(backend=explicit("slow"))) == "slow"
    assert chosen(figures, request(backend=explicit(("slow", "auto")))) == "slow"


@pytest.mark.parametrize(
    "figures",
    [
        measured(run("slow", 2.4), run("fast", 1.0), dtype="bfloat16"),
        measured(run("slow", 2.4, versions={"slow": "0.9"}), run("fast", 1.0, versions={"fast": "0.9"})),
        measured(run("slow", 2.4, block_size=32), run("fast", 1.0, block_size=32)),
    ],
    ids=["another dtype", "other versions", "another block size than the one asked for"],
)
def test_figures_of_something_else_do_not_count(figures: Measured) -> None:
    made = plan(figures, request(block_size=explicit(16)))
    assert made.groups[0].backend == "slow"
    assert made.groups[0].reason.startswith("2 candidates fit, not measured here")


def test_a_candidate_without_a_figure_comes_last_and_a_failure_is_told() -> None:
    new = backend("new", priority=99)
    made = plan(measured(run("slow", None, failure="out of memory"), run("fast", 1.0)), offers=(SLOW, FAST, new))
    assert made.groups[0].backend == "fast"
    texts = {item.name: item.reasons[0].text for item in made.groups[0].rejected}
    assert texts == {
        "slow": "measured: failed (out of memory), fast 3.16 ms (slotline tune 2026-11-21)",
        "new": "measured: no figure, fast 3.16 ms (slotline tune 2026-11-21)",
    }


def test_each_kind_of_layer_gets_its_own_fastest() -> None:
    layers, both = (layer(0), sliding(1)), {"versions": {"slow": "1.0", "fast": "1.0"}}
    runs = (
        run("slow", 2.0, backends={"full": "slow", "sliding": "slow"}, **both),
        run("", 1.5, backends={"full": "fast", "sliding": "slow"}, **both),
        run("", 2.5, backends={"full": "slow", "sliding": "fast"}, **both),
    )
    made = plan(measured(*runs), request(*layers))
    assert [group.backend for group in made.groups] == ["fast", "slow"]


def test_auto_starts_from_the_block_size_that_was_fastest() -> None:
    paged = backend("paged", kernel_block_sizes=Align(multiple_of=256))
    runs = (run("paged", 1.0, block_size=256), run("fast", 2.0), run("fast", 1.9, block_size=256))
    offers = (paged, FAST)
    assert plan(measured(*runs), offers=offers).block_size == 256
    assert plan(measured(*runs), request(backend=explicit("fast")), offers).block_size == 256
    assert plan(measured(*runs[1:2]), request(), offers).block_size == 16
    assert plan(None, offers=offers).block_size == 16


GRAPHS = (
    run("fast", 3.9),
    run("fast", 1.0, "full_and_piecewise"),
    run("fast", 0.9, "full", seconds={"decode 1": 0.9e-3, "prefill 16": 0.01}),
)


def test_auto_aims_at_the_graph_mode_that_was_fastest() -> None:
    made = plan(measured(*GRAPHS, aim="full_and_piecewise"), request(device=GPU))
    assert made.graphs.resolved == "full"
    assert made.graphs.reason == "auto aims at full"
    assert made.graphs.measured == (
        "full: decode 1 900 us; full_and_piecewise: decode 1 1 ms; none: decode 1 3.9 ms (slotline tune 2026-11-21)"
    )
    assert "measured: full: decode 1 900 us" in " ".join(made.explain().split())
    assert plan(None, request(device=GPU)).graphs.resolved == "full_and_piecewise"


def test_a_mode_asked_for_stays_and_its_cost_is_told() -> None:
    figures = measured(*GRAPHS, aim="full_and_piecewise")
    made = plan(figures, request(device=GPU, graphs=explicit("none"), backend=explicit("fast")))
    assert made.graphs.resolved == "none"
    assert "none: decode 1 3.9 ms" in made.graphs.measured


def test_a_downgrade_states_its_measured_cost() -> None:
    eager = backend("eager", graphs=Level(GraphSupport.NEVER))
    runs = (run("eager", 3.9, "piecewise", aim="full_and_piecewise"), run("fast", 1.0, "full_and_piecewise"))
    asked = request(device=GPU, backend=explicit("eager"))
    made = plan(measured(*runs, aim="full_and_piecewise"), asked, (eager, FAST))
    (note,) = made.downgrades
    assert note.code == "N310"
    assert note.because[-1] == (
        "measured cost: decode 1 3.9 ms so; decode 1 1 ms with fast and graphs.mode = 'full_and_piecewise' "
        "(slotline tune 2026-11-21)"
    )


def test_figures_do_not_count_as_decisions() -> None:
    figures = measured(run("slow", 1.0), run("fast", 2.0))
    later = evolve(figures, date="2027-01-01")
    assert plan(figures).digest == plan(later).digest == plan(None).digest
    assert Asked("auto") == request().graphs
    assert plan(figures, request(device=CPU)).graphs.resolved == "none"


def test_figures_survive_being_written() -> None:
    figures = measured(run("slow", 2.4), run("fast", None, failure="it broke"), source="")
    assert from_json(to_json(figures)) == figures


@pytest.mark.parametrize(
    ("value", "text"), [(999, "999 ns"), (1_900, "1.9 us"), (1_020_000, "1.02 ms"), (10**9, "1 s")]
)
def test_times_have_three_digits(value: int, text: str) -> None:
    assert in_words(value) == text
