"""Blocks that are handed over layer by layer, while the prompt is still being computed."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from engine_driver import run_all
from handoff_engines import (
    KEY,
    MIXED,
    PREFILL,
    PROMPTS,
    SHORT,
    SMALL,
    asked_early,
    connector_of,
    continued,
    decode_settings,
    prefill_all,
    settled,
    transfers_of,
)

from slotline.core import LLM
from slotline.plugins.kv_connectors.handoff import peer as peers
from slotline.registry.errors import NegotiationError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96)]

Tiny = Callable[..., Path]


@pytest.fixture(scope="module")
def pair(tiny: Tiny) -> tuple[LLM, LLM]:
    prefill = LLM(tiny("llama"), **SMALL, **PREFILL)
    address = connector_of(prefill)._server.address
    return prefill, LLM(tiny("llama"), **SMALL, **decode_settings(address, timeout=2.0))


@pytest.fixture(scope="module")
def want(tiny: Tiny) -> list[list[int]]:
    return continued(LLM(tiny("llama"), **SMALL), MIXED, None)


@pytest.fixture
def fresh(pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, LLM]:
    for llm in pair:
        llm.engine.forget_prefixes()
        settled(llm)
    for one in lanes(pair[1]):
        one._failed_at = None
    monkeypatch.setattr(connector_of(pair[0])._server, "_timeout", 1.0)
    return pair


def lanes(llm: LLM) -> list[Any]:
    connector = connector_of(llm)
    return [lane for peer, early in connector._early.items() for lane in (peer, *early)]


def lost_of(llm: LLM) -> int:
    return int(transfers_of(llm).agreement.counts.lost)


@contextmanager
def before_the_last_layer(prefill: LLM, act: Callable[[], None]) -> Iterator[list[float]]:
    """Do something each time that the last layer is about to attend. Where the times of these are noted."""
    routes, times = prefill.engine.runner.router.routes, list[float]()
    last = max(routes)
    write, forward, cache, position = routes[last]

    def attend(*given: Any, **more: Any) -> Any:
        act()
        times.append(time.monotonic())
        return forward(*given, **more)

    routes[last] = write, attend, cache, position
    yield times
    routes[last] = write, forward, cache, position


@pytest.mark.parametrize("way", ["memory", "connection"])
def test_the_bytes_of_the_first_layer_have_arrived_before_the_last_layer_is_computed(
    fresh: tuple[LLM, LLM], want: list[list[int]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = fresh
    for one in lanes(decode):
        one._disconnect()
    if way == "connection":
        monkeypatch.setattr(peers, "_mapped", lambda path, secret: None)
    arrived, blocks, rows_of = Event(), set[int](), peers.Peer._read_parts
    first_layer = connector_of(prefill)._saver._groups[0].layer_bytes[0]

    def noted(peer: Any, connection: Any, parts: Any, rows: Any) -> None:
        rows_of(peer, connection, parts, rows)
        for index, _, first, end in parts:
            if first == 0:
                assert end == first_layer  # and nothing of a layer that is not computed
                assert bytes(rows[index][:end].tolist()) != bytes(end)
                blocks.add(index)
        if blocks:
            arrived.set()

    monkeypatch.setattr(peers.Peer, "_read_parts", noted)
    (request,) = asked_early(decode, prefill, PROMPTS[1:2])
    before = lost_of(decode)

    def here() -> None:
        assert arrived.wait(5), "nothing of the first layer came while the step ran"
        arrived.clear()
        blocks.clear()

    with before_the_last_layer(prefill, here) as times:
        prefill_all(prefill, PROMPTS[1:2])
    assert len(times) == 2  # two parts of the prompt
    run_all(decode, 200_000)
    assert list(request.output_token_ids) == want[1]
    assert request.metrics.num_cached_tokens == (len(PROMPTS[1]) - 1) // 4 * 4
    assert lost_of(decode) == before
    assert any(lane.mapped for lane in lanes(decode)) == (way == "memory")
    for llm in fresh:
        settled(llm)


def test_saved_layers_are_not_copied_again(fresh: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, _ = fresh
    copy = transfers_of(prefill).connector._saver._copy
    whole, parts = list[int](), list[int]()
    to_host, by_layer = copy.to_host, copy.begin_layer_to_host
    monkeypatch.setattr(copy, "to_host", lambda *given: (whole.extend(given[1]), to_host(*given))[1])
    monkeypatch.setattr(copy, "begin_layer_to_host", lambda *given: (parts.extend(given[2]), by_layer(*given))[1])
    prefill_all(prefill, PROMPTS[:1])
    settled(prefill)
    layers = len(connector_of(prefill)._saver._groups[0].layers)
    assert not whole
    assert len(parts) == len(PROMPTS[0]) // 4 * layers


@pytest.mark.parametrize("fault", ["nobody", "gone", "aborted", "corrupt", "step fails", "part fails"])
def test_whatever_happens_while_layers_come_the_text_is_right_and_nobody_waits_for_ever(
    fresh: tuple[LLM, LLM], want: list[list[int]], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = fresh
    before, store = lost_of(decode), connector_of(prefill)._store
    requests = asked_early(decode, prefill, MIXED[:2])
    latest, tried = time.monotonic() + 20, list[int]()

    def act() -> None:
        tried.append(1)
        if fault == "gone":
            for one in list(connector_of(prefill)._server._connections):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        elif fault == "aborted":
            prefill.engine.abort("p0")
        elif fault == "step fails" and len(tried) == 1:
            raise RuntimeError("the last layer")

    if fault == "part fails":
        monkeypatch.setattr(store, "wrote", None)
    elif fault == "corrupt":
        read = peers.Peer._read_parts

        def corrupted(peer: Any, connection: Any, parts: Any, rows: Any) -> None:
            read(peer, connection, parts, rows)
            for index, _, first, _ in parts:
                rows[index][first] ^= index % 2

        monkeypatch.setattr(peers.Peer, "_read_parts", corrupted)
    if fault == "nobody":
        other = decode.engine.add("other", PROMPTS[3], SHORT)
        while not other.finished:
            decode.engine.step()
        assert list(other.output_token_ids) == want[3]
    else:
        with before_the_last_layer(prefill, act):
            prefill_all(prefill, MIXED[:2])
    while not all(request.finished for request in requests):
        decode.engine.step()
        assert time.monotonic() < latest
    assert [list(request.output_token_ids) for request in requests] == want[:2]
    lost = lost_of(decode) - before
    assert (lost == 0) == (fault in ("step fails", "part fails"))
    monkeypatch.undo()
    for llm in fresh:
        settled(llm)
    decode.engine.forget_prefixes()
    prefill.engine.forget_prefixes()


def test_a_request_that_is_aborted_while_layers_come_gives_all_back(
    fresh: tuple[LLM, LLM], want: list[list[int]]
) -> None:
    prefill, decode = fresh
    left, stays = asked_early(decode, prefill, MIXED[:2])
    with before_the_last_layer(prefill, lambda: decode.engine.abort(left.request_id)):
        prefill_all(prefill, MIXED[:2])
    run_all(decode, 200_000)
    assert list(stays.output_token_ids) == want[1]
    settled(decode)


def test_an_exception_of_a_step_does_not_wait_for_a_prompt(fresh: tuple[LLM, LLM], want: list[list[int]]) -> None:
    prefill, decode = fresh
    (request,) = asked_early(decode, prefill, PROMPTS[:1])
    (lane,) = [one for one in lanes(decode) if one.under_way]
    while lane._connection is None:
        time.sleep(0.001)
    begun = time.monotonic()
    transfers_of(decode).finish()
    assert time.monotonic() - begun < 0.5
    run_all(decode, 200_000)
    assert list(request.output_token_ids) == want[0]
    settled(decode)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "overlapping": ("llama", {"scheduler.async": True}),
    "drafts": ("llama", {"drafter.name": "ngram", "drafter.tokens": 3}),
    "int8": ("llama", {"cache.dtype": "int8"}),
    "windows": ("gemma2", {}),
    "latent": ("deepseek_v2", {}),
    "hybrid": ("bamba", {"scheduler.async": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_with_other_caches(tiny: Tiny, kind: str) -> None:
    family, settings = KINDS[kind]
    path = tiny(family)
    expected = continued(LLM(path, **SMALL, **settings), MIXED, None)
    prefill = LLM(path, **SMALL, **PREFILL, **settings)
    decode = LLM(path, **SMALL, **decode_settings(connector_of(prefill)._server.address), **settings)
    requests = asked_early(decode, prefill, MIXED)
    prefill_all(prefill, MIXED)
    run_all(decode, 200_000)
    assert [list(request.output_token_ids) for request in requests] == expected
    counts = transfers_of(decode).agreement.counts
    assert counts.loads > 10
    assert counts.lost == 0
    settled(prefill)
    settled(decode)


def test_the_plan_says_how_blocks_are_handed_over(tiny: Tiny, pair: tuple[LLM, LLM]) -> None:
    def said(llm: LLM) -> tuple[str, str, str]:
        (one,) = [one for one in llm.plan.settings if one.key == "kv_connector transfers"]
        return one.asked, one.resolved, one.origin

    assert said(pair[0])[:2] == ("may", "layer by layer")
    assert said(pair[1])[:2] == ("never", "whole steps")  # an engine that decodes
    path, halves = tiny("llama"), {**SMALL, "scheduler.microbatches": 2, "max_num_batched_tokens": 2048}
    asked, resolved, why = said(LLM(path, **halves, **PREFILL))
    assert (asked, resolved) == ("may", "whole steps")
    assert "scheduler.microbatches = 2: a layer does not run once in a step" in why
    with pytest.raises(NegotiationError, match=r"handoff.*a layer does not run once in a step"):
        LLM(path, **halves, **PREFILL, **{f"{KEY}.layers": "on"})
