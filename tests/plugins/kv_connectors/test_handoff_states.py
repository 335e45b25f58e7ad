"""States are handed over with a prompt's blocks: a lost one costs computing, and none is used before it is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import head_folders
import pytest
from engine_driver import run_all
from handoff_engines import (
    MIXED,
    PREFILL,
    PROMPTS,
    SHORT,
    SMALL,
    connector_of,
    continued,
    decode_settings,
    prefilled,
    settled,
    transfers_of,
)

from slotline.core import LLM

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96)]

Tiny = Callable[..., Path]
FEW: dict[str, Any] = {"state.checkpoints": 2}
"""Slots of the engine that decodes, fewer than its requests."""


@pytest.fixture(scope="module")
def pair(tiny: Tiny) -> tuple[LLM, LLM]:
    prefill = LLM(tiny("bamba"), **SMALL, **PREFILL)
    return prefill, LLM(tiny("bamba"), **SMALL, **FEW, **decode_settings(connector_of(prefill)._server.address))


@pytest.fixture(scope="module")
def want(tiny: Tiny) -> list[list[int]]:
    return continued(LLM(tiny("bamba"), **SMALL), MIXED, None)


@pytest.fixture
def fresh(pair: tuple[LLM, LLM]) -> tuple[LLM, LLM]:
    for llm in pair:
        llm.engine.forget_prefixes()
        settled(llm)
    return pair


def checkpoints_of(llm: LLM) -> Any:
    return llm.engine.extension("states").checkpoints


def slowed(decode: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have blocks and states take their time."""
    (peer,) = connector_of(decode)._peers.values()
    load = peer._load

    def slowly(left: Any, prompt: str) -> None:
        time.sleep(0.2)
        load(left, prompt)

    monkeypatch.setattr(peer, "_load", slowly)


@pytest.mark.parametrize("lost", ["none", "states", "blocks", "some"])
def test_what_is_lost_is_computed_with_the_same_text(fresh: tuple[LLM, LLM], want: list[list[int]], lost: str) -> None:
    prefill, decode = fresh
    answer, store = prefilled(prefill, MIXED), connector_of(prefill)._store
    keys = store.keys()
    states = [key for key in keys if key[0] == 1]
    assert len(states) >= len(MIXED)
    assert len(states) < len(keys)
    for key in {"none": [], "states": states, "blocks": keys[:4], "some": states[::2]}[lost]:
        store.drop(key)
    before = transfers_of(decode).agreement.counts
    assert continued(decode, MIXED, answer) == want
    counts = transfers_of(decode).agreement.counts
    assert (counts.lost > before.lost) == (lost != "none")
    if lost == "none":
        assert checkpoints_of(decode).counts.restored > 0
    settled(decode)


def test_requests_share_a_state_on_its_way_and_others_run(
    fresh: tuple[LLM, LLM], want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = fresh
    answer = prefilled(prefill, MIXED)
    slowed(decode, monkeypatch)
    before, engine = transfers_of(decode).agreement.counts.loads, decode.engine
    waits, same, gone = (
        engine.add(name, PROMPTS[0], SHORT, kv_transfer_params=answer) for name in ("waits", "same", "gone")
    )
    engine.step()
    engine.step()
    assert transfers_of(decode).agreement.counts.loads - before == 8 + 1
    engine.abort(gone.request_id)
    other = engine.add("other", PROMPTS[3], SHORT)
    while not other.finished:
        engine.step()
    assert not waits.finished
    run_all(decode, 200_000)
    assert [list(one.output_token_ids) for one in (waits, same, other)] == [want[0], want[0], want[3]]
    assert waits.metrics.num_cached_tokens == 32
    settled(decode)


def test_an_exception_gives_up_the_states_on_their_way(
    fresh: tuple[LLM, LLM], want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = fresh
    answer = prefilled(prefill, MIXED)
    slowed(decode, monkeypatch)
    waits = decode.engine.add("waits", PROMPTS[0], SHORT, kv_transfer_params=answer)
    decode.engine.step()
    other = decode.engine.add("other", PROMPTS[3], SHORT)
    with monkeypatch.context() as broken:
        broken.setattr(decode.engine.runner.model, "forward", None)
        with pytest.raises(TypeError):
            decode.engine.step()
    assert not checkpoints_of(decode)._loading
    run_all(decode, 200_000)
    assert [list(one.output_token_ids) for one in (waits, other)] == [want[0], want[3]]
    settled(decode)


def test_prefixes_are_forgotten_while_a_state_is_on_its_way(
    fresh: tuple[LLM, LLM], want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = fresh
    answer = prefilled(prefill, MIXED)
    slowed(decode, monkeypatch)
    waits = decode.engine.add("waits", PROMPTS[0], SHORT, kv_transfer_params=answer)
    decode.engine.step()
    decode.engine.forget_prefixes()
    prefill.engine.forget_prefixes()
    run_all(decode, 200_000)
    assert list(waits.output_token_ids) == want[0]
    settled(decode)


@pytest.mark.slow
def test_layers_of_a_drafter_go_with_the_states(tiny: Tiny, tmp_path: Path, want: list[list[int]]) -> None:
    path = tiny("bamba")
    head = {"drafter.name": "eagle", "drafter.path": str(head_folders.build(tmp_path, path, "eagle"))}
    prefill = LLM(path, **SMALL, **PREFILL, **head)
    decode = LLM(path, **SMALL, **head, **decode_settings(connector_of(prefill)._server.address))
    assert continued(decode, MIXED, prefilled(prefill, MIXED)) == want
    counts = transfers_of(decode).agreement.counts
    assert counts.loads > 20
    assert counts.lost == 0
    settled(decode)
