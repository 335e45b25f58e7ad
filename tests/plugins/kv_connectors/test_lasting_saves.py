"""Saves that outlast their step: blocks stay as they are until they are read, whatever becomes of their request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_driver import add, run_all, tokens_of
from handoff_engines import MIXED, PROMPTS, SHORT, SMALL, connector_of, settled, transfers_of
from repository import SUPPORT
from thread_ranks import ThreadRanks

from slotline.core import LLM
from slotline.plugins.kv_transfer.pins import PoolPins
from slotline.plugins.kv_transfer.transfers import AsyncTransfers
from slotline.registry.capability import Flag, Set
from slotline.registry.contracts import KVConnectorCapabilities
from slotline.registry.errors import ContractError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96)]

Tiny = Callable[..., Path]
SLOW: dict[str, Any] = {
    **SMALL,
    "plugins.inline": (f"{SUPPORT / 'slow_saver.py'}:SlowSaver",),
    "kv_connector.name": "slow_saver",
    "kv_connector.leave_out_slow": False,
}
TIGHT: dict[str, Any] = {**SLOW, "memory": "80KiB"}
"""Of a pool that has to use blocks again."""


@pytest.fixture(scope="module")
def want(tiny: Tiny) -> list[list[int]]:
    return tokens_of(LLM(tiny("llama"), **SMALL), MIXED, SHORT)


@pytest.fixture(scope="module")
def made(tiny: Tiny) -> LLM:
    return LLM(tiny("llama"), **TIGHT)


@pytest.fixture
def slow(made: LLM) -> LLM:
    connector_of(made).how, connector_of(made).polls = "never", 4
    made.engine.forget_prefixes()
    settled(made)
    transfers_of(made).max_saves = 1000
    connector_of(made).spoiled = connector_of(made).most = transfers_of(made).unsaved = 0
    return made


def test_blocks_are_not_used_again_before_they_are_saved(
    slow: LLM, want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert tokens_of(slow, MIXED, SHORT) == want
    settled(slow)
    connector = connector_of(slow)
    assert (connector.spoiled, connector.most > 5, len(connector.blocks) > 20) == (0, True, True)
    outputs = slow.generate(MIXED, SHORT)
    assert [list(one.outputs[0].token_ids) for one in outputs] == want
    assert sum(one.metrics.num_loaded_tokens for one in outputs) > 0
    settled(slow)
    slow.engine.forget_prefixes()
    monkeypatch.setattr(PoolPins, "keep", lambda *_: None)  # what the references are for
    monkeypatch.setattr(PoolPins, "let_go", lambda *_: None)
    monkeypatch.setattr(AsyncTransfers, "saving", {})  # nor does the integrity checker expect them
    connector.polls = 20
    tokens_of(slow, MIXED, SHORT)
    settled(slow)
    assert connector.spoiled > 0


def test_blocks_of_an_aborted_request_stay_held_until_they_are_saved(slow: LLM) -> None:
    connector_of(slow).polls = 6
    request = add(slow, "aborted", PROMPTS[1], SHORT)
    while slow.engine.rows.num_computed_tokens[request.row] < len(PROMPTS[1]):
        slow.engine.step()
    saving = set(transfers_of(slow).saving)
    assert saving
    slow.engine.abort("aborted")
    pool = slow.engine.scheduler.cache.pool
    assert (pool.ref_count[list(saving)] == 1).all()
    for _ in range(10):
        slow.engine.step()
    assert not transfers_of(slow).saving
    settled(slow)
    assert connector_of(slow).spoiled == 0


def test_no_more_blocks_than_are_allowed_are_being_saved(slow: LLM, want: list[list[int]]) -> None:
    transfers_of(slow).max_saves = 3
    assert tokens_of(slow, MIXED, SHORT) == want
    assert connector_of(slow).most == 3
    settled(slow)
    assert transfers_of(slow).unsaved > 0
    assert slow.engine.extension("kv_transfer").counts.events[0]["unsaved"] == transfers_of(slow).unsaved


@pytest.mark.parametrize("how", ["save", "step"])
def test_exceptions_leave_no_block_held(
    slow: LLM, want: list[list[int]], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "save":
        connector_of(slow).how = how
        assert tokens_of(slow, MIXED, SHORT) == want
        assert not connector_of(slow).blocks
    else:
        connector_of(slow).polls = 50
        request = add(slow, "a", PROMPTS[0], SHORT)
        slow.engine.step()
        slow.engine.step()
        assert connector_of(slow).leaving
        with monkeypatch.context() as broken:
            broken.setattr(slow.engine.runner.model, "forward", None)
            with pytest.raises(TypeError):
                slow.engine.step()
        assert not connector_of(slow).leaving
        run_all(slow)
        assert list(request.output_token_ids) == want[0]
    settled(slow)
    assert connector_of(slow).spoiled == 0


@pytest.mark.slow
def test_states_stay_as_they_are_too(tiny: Tiny) -> None:
    path = tiny("bamba")
    expected = tokens_of(LLM(path, **SMALL), MIXED, SHORT)
    llm = LLM(path, **SLOW, **{"state.checkpoints": 2, "kv_connector.slow_saver.polls": 3})
    for _ in range(2):
        assert tokens_of(llm, MIXED, SHORT) == expected
        llm.engine.scheduler.cache.pool.reset()
        llm.engine.extension("states").checkpoints.reset()
    outputs = llm.generate(MIXED, SHORT)
    assert [list(one.outputs[0].token_ids) for one in outputs] == expected
    assert sum(one.metrics.num_loaded_tokens for one in outputs) > 0
    settled(llm)
    assert connector_of(llm).spoiled == 0


@pytest.mark.slow
def test_a_block_is_let_go_once_all_ranks_have_saved_it(tiny: Tiny, want: list[list[int]]) -> None:
    ranks = ThreadRanks(tiny("llama"), **{**TIGHT, "memory": "40KiB", "scheduler.async": True})

    def run(llm: LLM) -> list[list[int]]:
        connector_of(llm).polls = 9 if llm.engine.group.place.rank else 2
        tokens = tokens_of(llm, MIXED, SHORT)
        assert tokens_of(llm, MIXED, SHORT) == tokens
        return tokens

    assert ranks.same(run) == want
    assert ranks.each(lambda llm: connector_of(llm).spoiled) == [0, 0]
    ranks.each(settled)
    ranks.close()


def test_saves_of_blocks_that_are_about_to_be_overwritten_cannot_last() -> None:
    for more in ({"saves": "evicted", "asynchronous": Flag(True)}, {}):
        with pytest.raises(ContractError, match="lasting_saves with saves="):
            KVConnectorCapabilities(devices=Set({"cpu"}), lasting_saves=Flag(True), **more)
