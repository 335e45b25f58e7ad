"""Replicas that share experts come and go while others run: the text of one engine.

Replicas run as threads here. `test_sharing_processes.py` has processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sharing_threads import Replicas, sharing_replicas
from tiny_engines import DEFAULTS

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import CapacityError, RankError, RequestError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(127)]
PROMPTS = ["def main(", "class A:\n    def", "import numpy as np\n", "for i in range(", "x = [", "# a comment\n"]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def mixtral(tiny: Callable[..., Path]) -> Path:
    return tiny("mixtral")


@pytest.fixture(scope="module")
def shared(mixtral: Path) -> Iterator[tuple[LLM, Replicas]]:
    with sharing_replicas() as (replicas, settings):
        llm = LLM(mixtral, data=2, expert=2, **{**DEFAULTS, **settings, "parallel.rebalance_steps": 7})
        yield llm, replicas
        llm.close()


@pytest.fixture(scope="module")
def expected(mixtral: Path) -> list[tuple[int, ...]]:
    return tokens(LLM(mixtral, **DEFAULTS))


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, progress=False)]


def slots(replicas: Replicas, numbers: range) -> list[int]:
    """Return how many experts of the first mixture each replica has."""
    models: list[Any] = [replicas.engines[number].runner.model for number in numbers]
    return [len(model.hf_model.model.layers[0].mlp.experts.down_proj) for model in models]


def test_a_third_replica_takes_its_experts_while_requests_run_and_gives_them_back(
    shared: tuple[LLM, Replicas], expected: list[tuple[int, ...]]
) -> None:
    llm, replicas = shared
    front: Any = llm.front
    assert tokens(llm) == expected
    running = [front.add(f"r{i}", [9 + i] * 30, SamplingParams(max_tokens=40, ignore_eos=True)) for i in range(2)]
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:3]]
    begun = [next(one for one in stream if one.outputs[0].token_ids) for stream in streams]
    report = llm.scale(3)
    assert (report.data, report.started, report.leaving) == (3, 1, 0)
    assert [tuple(list(stream)[-1].outputs[0].token_ids) for stream in streams] == expected[:3]
    assert not any(one.finished for one in begun)
    settings = {one.key: one.resolved for one in llm.plan.settings}
    assert (settings["parallel.data"], settings["parallel.expert"]) == ("3", "3")
    assert slots(replicas, range(3)) == [2, 2, 2]
    assert tokens(llm) == expected
    while front.requests:
        front.step()
    assert [one.finish_reason for one in running] == ["length"] * 2
    used = [front.add(f"u{i}", [9 + i] * 30, SamplingParams(max_tokens=20, ignore_eos=True)) for i in range(3)]
    assert {one.replica for one in used} == {0, 1, 2}
    with pytest.raises(RequestError, match="have unfinished requests after 0 s"):
        llm.scale(2, timeout=0)
    assert front.router.chosen_among == 3
    report = llm.scale(2)
    assert (report.data, report.started, report.leaving) == (2, 0, 0)
    assert used[2].finish_reason == "length"
    assert len(front.loads) == 2
    assert slots(replicas, range(2)) == [2, 2]
    assert tokens(llm) == expected
    llm.reload_weights()
    assert tokens(llm) == expected


@pytest.mark.slow
def test_four_replicas_have_an_expert_each(shared: tuple[LLM, Replicas], expected: list[tuple[int, ...]]) -> None:
    llm, replicas = shared
    assert llm.scale(4).started == 2
    assert slots(replicas, range(4)) == [1, 1, 1, 1]
    assert tokens(llm) == expected
    assert llm.scale(3).leaving == 0
    assert slots(replicas, range(3)) == [2, 2, 2]
    assert tokens(llm) == expected
    llm.reload_weights()
    assert tokens(llm) == expected


def test_one_that_cannot_be_built_leaves_the_others_with_their_experts(
    shared: tuple[LLM, Replicas], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = shared
    llm.scale(2)

    def fail(*_: object) -> None:
        raise CapacityError("no memory is left", fix="free some")

    monkeypatch.setattr("slotline.ranks.replicas.replica.start_alone", fail)
    with pytest.raises(CapacityError, match="no memory is left"):
        llm.scale(3)
    with pytest.raises(RequestError, match="two at least"):
        llm.scale(1)
    assert tokens(llm) == expected


def test_an_error_while_experts_move_ends_all(shared: tuple[LLM, Replicas], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = shared

    def fail(*_: object) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr("slotline.ranks.replicas.regroup._placements", fail)
    with pytest.raises(RankError, match="replicas could not share experts anew"):
        llm.scale(3)
    with pytest.raises(RankError):
        llm.generate("a", GREEDY)
