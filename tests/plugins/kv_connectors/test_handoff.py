"""Prefill apart from decode: an engine computes prompts, another one continues them with the same text."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import head_folders
import pytest
from engine_driver import run_all
from handoff_engines import (
    KEY,
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
from lora_cases import PeftOracle
from replica_threads import replicas_as_threads
from thread_ranks import ThreadRanks

from slotline.core import LLM, LoRARequest
from slotline.plugins.kv_connectors.handoff import peer as peers
from slotline.ranks.replicas.reports import NUMBER
from slotline.registry.errors import CapacityError, ConfigError, RequestError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96)]

Tiny = Callable[..., Path]


@pytest.fixture(scope="module")
def pair(tiny: Tiny) -> tuple[LLM, LLM]:
    prefill = LLM(tiny("llama"), **SMALL, **PREFILL)
    return prefill, LLM(tiny("llama"), **SMALL, **decode_settings(connector_of(prefill)._server.address))


@pytest.fixture(scope="module")
def want(tiny: Tiny) -> list[list[int]]:
    return continued(LLM(tiny("llama"), **SMALL), MIXED, None)


@pytest.fixture
def fresh(pair: tuple[LLM, LLM]) -> tuple[LLM, LLM]:
    for llm in pair:
        llm.engine.forget_prefixes()
        settled(llm)
    for one in connector_of(pair[1])._peers.values():
        one._failed_at = None
    return pair


@pytest.mark.parametrize("way", ["memory", "connection"])
def test_the_text_is_one_engines_and_only_the_last_block_is_computed(
    fresh: tuple[LLM, LLM], want: list[list[int]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = fresh
    (peer,) = connector_of(decode)._peers.values()
    if way == "connection":
        peer._disconnect()
        monkeypatch.setattr(peers, "_mapped", lambda path, secret: None)
    before = transfers_of(decode).agreement.counts
    answer = prefilled(prefill, MIXED)
    assert continued(decode, MIXED, answer) == want
    counts = transfers_of(decode).agreement.counts
    blocks = {tuple(prompt[: 4 * n]) for prompt in MIXED for n in range(1, (len(prompt) - 1) // 4 + 1)}
    assert (counts.loads - before.loads, counts.lost - before.lost) == (len(blocks), 0)
    assert peer.mapped == (way == "memory")
    request = decode.engine.add("again", PROMPTS[1], SHORT)
    run_all(decode)
    assert request.metrics.num_cached_tokens == (len(PROMPTS[1]) - 1) // 4 * 4
    settled(prefill)
    settled(decode)


def test_others_run_while_blocks_are_on_their_way_and_an_aborted_request_gives_all_back(
    fresh: tuple[LLM, LLM], want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = fresh
    answer = prefilled(prefill, MIXED)
    (peer,) = connector_of(decode)._peers.values()
    load = peer._load

    def slowly(left: Any, prompt: str) -> None:
        time.sleep(0.5)
        load(left, prompt)

    monkeypatch.setattr(peer, "_load", slowly)
    waiting = decode.engine.add("waits", PROMPTS[1], SHORT, kv_transfer_params=answer)
    left = decode.engine.add("left", PROMPTS[0], SHORT, kv_transfer_params=answer)
    other = decode.engine.add("other", PROMPTS[3], SHORT)
    while not other.finished:
        decode.engine.step()
    assert not waiting.finished
    decode.engine.abort(left.request_id)
    run_all(decode, 200_000)
    assert [list(one.output_token_ids) for one in (waiting, other)] == [want[1], want[3]]
    settled(decode)


def test_an_exception_of_a_step_waits_for_what_is_under_way(
    fresh: tuple[LLM, LLM], want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = fresh
    answer = prefilled(prefill, MIXED)
    (peer,) = connector_of(decode)._peers.values()
    load, done = peer._load, list[int]()

    def slowly(left: Any, prompt: str) -> None:
        time.sleep(0.3)
        done.append(len(left))
        load(left, prompt)

    monkeypatch.setattr(peer, "_load", slowly)
    request = decode.engine.add("waits", PROMPTS[0], SHORT, kv_transfer_params=answer)
    decode.engine.step()
    second = decode.engine.add("next", PROMPTS[1], SHORT, kv_transfer_params=answer)
    decode.engine.step()
    other = decode.engine.add("other", PROMPTS[3], SHORT)
    model = decode.engine.runner.model
    with monkeypatch.context() as broken:
        broken.setattr(model, "forward", None)
        with pytest.raises(TypeError):
            decode.engine.step()
    assert len(done) == 1  # the second batch was not asked for any more
    assert not transfers_of(decode).coming
    run_all(decode, 200_000)
    assert [list(one.output_token_ids) for one in (request, second, other)] == [want[0], want[1], want[3]]
    settled(decode)


@pytest.mark.parametrize("fault", ["gone", "dies", "silent", "rubbish", "other-model", "corrupt", "evicted"])
def test_whatever_a_peer_does_the_text_is_right_and_nobody_waits_for_ever(
    tiny: Tiny, fresh: tuple[LLM, LLM], want: list[list[int]], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = fresh
    (peer,) = connector_of(decode)._peers.values()
    monkeypatch.setattr(peer, "_timeout", 0.3)
    answer = prefilled(prefill, MIXED)
    before = transfers_of(decode).agreement.counts
    peer._disconnect()
    if fault in ("gone", "silent", "rubbish", "dies"):
        listener = socket.create_server(("127.0.0.1", 0))
        monkeypatch.setattr(peer, "_address", listener.getsockname())
        if fault == "gone":
            listener.close()
        elif fault != "silent":

            def serve() -> None:
                while True:
                    try:
                        connection, _ = listener.accept()
                    except OSError:
                        return
                    with connection:
                        connection.recv(10)
                        if fault == "rubbish":
                            connection.sendall(b"\x00\x00\x00\x05[1,2]" + b"\xff" * 100)

            Thread(target=serve, daemon=True).start()
    elif fault == "other-model":
        monkeypatch.setattr(connector_of(decode)._identity, "text", "another")
    elif fault == "corrupt":
        received, rows = peer._received, connector_of(prefill)._store._bytes[64:]

        def overwritten(connection: Any) -> Any:
            answer = received(connection)
            if "path" not in answer:
                rows[::7] ^= 1
            return answer

        monkeypatch.setattr(peer, "_received", overwritten)
    else:
        store = connector_of(prefill)._store
        for key in store.keys()[::2]:
            store.drop(key)
    assert continued(decode, MIXED, answer) == want
    assert transfers_of(decode).agreement.counts.lost > before.lost
    settled(decode)
    if fault in ("gone", "silent", "rubbish", "dies"):
        listener.close()


def test_a_peer_that_was_started_again_is_found_again(
    tiny: Tiny, fresh: tuple[LLM, LLM], want: list[list[int]]
) -> None:
    prefill, decode = fresh
    answer = prefilled(prefill, MIXED)
    assert continued(decode, MIXED, answer) == want
    (peer,) = connector_of(decode)._peers.values()
    for one in list(connector_of(prefill)._server._connections):
        one.shutdown(socket.SHUT_RDWR)
    decode.engine.forget_prefixes()
    prefill.engine.forget_prefixes()
    answer, before = prefilled(prefill, MIXED), transfers_of(decode).agreement.counts
    assert continued(decode, MIXED, answer) == want
    counts = transfers_of(decode).agreement.counts
    assert counts.loads > before.loads
    assert counts.lost == before.lost
    assert peer.is_well


def test_one_side_with_other_weights_gets_no_blocks(fresh: tuple[LLM, LLM], want: list[list[int]]) -> None:
    prefill, decode = fresh
    decode.engine.forget_prefixes()  # as reload_weights does
    answer, before = prefilled(prefill, MIXED), transfers_of(decode).agreement.counts
    assert continued(decode, MIXED, answer) == want
    counts = transfers_of(decode).agreement.counts
    assert counts.loads - before.loads == counts.lost - before.lost > 0
    prefill.engine.forget_prefixes()


def test_requests_name_no_peer_that_is_not_configured(fresh: tuple[LLM, LLM], want: list[list[int]]) -> None:
    _, decode = fresh
    for params in (
        {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1},
        {"do_remote_prefill": True, "remote_host": ["x"], "remote_port": None},
        {"do_remote_prefill": True},
        {"do_remote_prefill": False, "remote_host": 3},
        {},
    ):
        decode.engine.forget_prefixes()
        assert continued(decode, MIXED, params) == want
    settled(decode)
    for wrong in (3, "x", [1], {1: 2}):
        with pytest.raises(RequestError, match="kv_transfer_params="):
            decode.engine.add("wrong", PROMPTS[0], SHORT, kv_transfer_params=wrong)
    assert not decode.engine.requests


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "drafts": ("llama", {"drafter.name": "ngram", "drafter.tokens": 3}),
    "overlapping": ("llama", {"scheduler.async": True}),
    "int8": ("llama", {"cache.dtype": "int8"}),
    "windows": ("gemma2", {}),
    "states": ("mamba2", {}),
    "hybrid": ("bamba", {"drafter.name": "ngram", "drafter.tokens": 3}),
    "delta": ("qwen3_next", {"scheduler.async": True}),
    "windows and states": ("recurrent_gemma", {"drafter.name": "ngram", "drafter.tokens": 3}),
}


@pytest.mark.parametrize(
    "kind", [one if one == "drafts" else pytest.param(one, marks=pytest.mark.slow) for one in KINDS]
)
def test_with_drafts_and_other_caches(tiny: Tiny, kind: str) -> None:
    family, settings = KINDS[kind]
    path = tiny(family)
    prefill = LLM(path, **SMALL, **PREFILL, **settings)
    decode = LLM(path, **SMALL, **decode_settings(connector_of(prefill)._server.address), **settings)
    expected = continued(LLM(path, **SMALL, **settings), MIXED, None)
    assert continued(decode, MIXED, prefilled(prefill, MIXED)) == expected
    counts = transfers_of(decode).agreement.counts
    assert counts.loads > (3 if kind == "states" else 10)
    assert counts.lost == 0
    settled(prefill)
    settled(decode)


@pytest.mark.slow
def test_layers_of_a_drafter_are_handed_on_to_an_engine_that_has_it_too(tiny: Tiny, tmp_path: Path) -> None:
    path = tiny("llama")
    head = {"drafter.name": "eagle", "drafter.path": str(head_folders.build(tmp_path, path, "eagle"))}
    prefill = LLM(path, **SMALL, **PREFILL, **head)
    peer = decode_settings(connector_of(prefill)._server.address)
    expected, answer = continued(LLM(path, **SMALL), MIXED, None), prefilled(prefill, MIXED)
    for settings, loses in ((head, False), ({}, True)):
        decode = LLM(path, **SMALL, **peer, **settings)
        assert continued(decode, MIXED, answer) == expected
        counts = transfers_of(decode).agreement.counts
        assert counts.loads > 20
        assert counts.lost == (counts.loads if loses else 0)


@pytest.mark.slow
def test_each_rank_loads_from_the_same_rank_of_the_peer(tiny: Tiny, want: list[list[int]]) -> None:
    with socket.socket() as one:  # whose neighbour is most likely free too
        one.bind(("127.0.0.1", 0))
        address = one.getsockname()
    path, named = tiny("llama"), {f"{KEY}.address": "{}:{}".format(*address)}
    with pytest.raises(ConfigError, match="has no port, and this engine has several ranks"):
        ThreadRanks(path, **SMALL, **PREFILL)
    prefill = ThreadRanks(path, **SMALL, **PREFILL, **named)
    decode = ThreadRanks(path, **SMALL, **decode_settings(address))
    answer = prefill.same(lambda llm: prefilled(llm, MIXED))
    assert (answer["remote_host"], answer["remote_port"]) == address
    assert decode.same(lambda llm: continued(llm, MIXED, answer)) == want
    counts = decode.same(lambda llm: transfers_of(llm).agreement.counts)
    assert counts.loads > 20
    assert (counts.lost, counts.failed) == (0, (0, 0))
    for ranks in (prefill, decode):
        ranks.each(settled)
        ranks.close()


def test_replicas_continue_what_another_engine_has_computed(
    tiny: Tiny, want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("llama")
    prefill = LLM(path, **SMALL, **PREFILL)
    answer = prefilled(prefill, MIXED)
    prompts = [{"prompt_token_ids": one, "kv_transfer_params": answer} for one in MIXED]
    with replicas_as_threads():
        decode = decode_settings(connector_of(prefill)._server.address)
        llm = LLM(path, **SMALL, **decode, **{"parallel.data": 2})
        outputs = llm.generate(prompts, SHORT)
        llm.close()
    assert [list(one.outputs[0].token_ids) for one in outputs] == want
    assert sum(one.metrics.num_loaded_tokens for one in outputs) > 100
    monkeypatch.setenv(NUMBER, "1")  # of a process of a replica
    with pytest.raises(ConfigError, match=r"role = 'prefill' hands out blocks at one address, and parallel\.data"):
        LLM(path, **SMALL, **PREFILL)


def test_adapters_of_the_same_files_are_handed_on(tiny: Tiny, tmp_path: Path) -> None:
    path, settings = tiny("llama"), {"lora.name": "torch"}
    oracle = PeftOracle(path, tmp_path, {"mine": {}, "other": {}})
    shutil.copytree(tmp_path / "mine", tmp_path / "copy")
    mine, copy, other = (LoRARequest(name, 1, str(tmp_path / name)) for name in ("mine", "copy", "other"))
    prefill = LLM(path, **SMALL, **PREFILL, **settings)
    decode = LLM(path, **SMALL, **decode_settings(connector_of(prefill)._server.address), **settings)
    one = LLM(path, **SMALL, **settings)
    expected, plain = continued(one, MIXED, None, lora_request=mine), continued(one, MIXED, None)
    assert expected != plain
    assert oracle.names
    answer = prefilled(prefill, MIXED, lora_request=mine)
    assert continued(decode, MIXED, answer, lora_request=copy) == expected
    before = transfers_of(decode).agreement.counts
    assert (before.loads > 20, before.lost) == (True, 0)
    assert continued(decode, MIXED, answer) == plain  # the blocks of an adapter are nobody else's
    decode.remove_lora(1)
    one.remove_lora(1)
    assert continued(decode, MIXED, answer, lora_request=other) == continued(one, MIXED, None, lora_request=other)
    counts = transfers_of(decode).agreement.counts
    assert counts.loads - before.loads == counts.lost > 0


def test_bad_settings_are_named(tiny: Tiny, pair: tuple[LLM, LLM]) -> None:
    path, (host, port) = tiny("llama"), connector_of(pair[0])._server.address
    for key, value, kind, text in (
        ("address", f"{host}:{port}", ConfigError, f"address = '{host}:{port}' cannot be had: Address already in use"),
        ("address", "7000", ConfigError, "'7000' is no address"),
        ("address", "0.0.0.0:7000", ConfigError, "names no machine"),
        ("role", "decode", ConfigError, "peers is empty"),
        ("role", "neither", ConfigError, "role"),
        ("peers", ("x",), ConfigError, "'x' is no address"),
        ("timeout", 0, ConfigError, "timeout = 0"),
        ("memory", "10B", ConfigError, "10B"),
        ("memory", "1KB", CapacityError, "holds no block"),
    ):
        with pytest.raises(kind, match=text):
            LLM(path, **SMALL, **{"kv_connector.name": "handoff", f"{KEY}.{key}": value})
