"""KV events over ZeroMQ: what a subscriber rebuilds is what the pool can find."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engine_driver import random_prompts, tokens_of
from tiny_engines import DEFAULTS, everything_returned

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import ConfigError, NegotiationError

zmq = pytest.importorskip("zmq")
from kv_subscriber import Subscriber  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {
    **DEFAULTS, "block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 3, "memory": "80KiB",
}  # fmt: skip
LOADS: dict[str, Any] = {"kv_connector.name": "host_memory", "kv_connector.host_memory.memory": "4MiB"}
KEY = "extensions.kv_events"


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


@pytest.fixture
def events() -> Iterator[tuple[dict[str, Any], Callable[..., Subscriber]]]:
    """Settings of an engine that publishes, and a function that subscribes."""
    port, replay = free_ports()
    made = list[Subscriber]()

    def subscribe() -> Subscriber:
        made.append(Subscriber(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay}", "kv"))
        return made[-1]

    settings = {
        f"{KEY}.endpoint": f"tcp://*:{port}", f"{KEY}.replay_endpoint": f"tcp://*:{replay}", f"{KEY}.topic": "kv@tiny",
    }  # fmt: skip
    yield settings, subscribe
    for one in made:
        one.close()


def findable(llm: LLM, *, whole: bool = False) -> set[tuple[int, Any]]:
    pool = llm.engine.scheduler.cache.pool
    keys = pool.findable().values()
    return {(group, one if whole else int.from_bytes(one[-8:], "big")) for group, one in keys}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", LOADS),
        pytest.param("gemma2", {"scheduler.async": True, f"{KEY}.hashes": "bytes"}, marks=pytest.mark.slow),
        pytest.param("llama", {"drafter.name": "ngram", "drafter.tokens": 3}, marks=pytest.mark.slow),
    ],
    ids=["loads", "windows", "drafts"],
)
def test_a_subscriber_rebuilds_the_findable_blocks(
    tiny: Tiny, events: Any, family: str, settings: dict[str, Any]
) -> None:
    """Under random traffic with shared prefixes, preemption, evictions, loads, aborts and forgotten prefixes."""
    given, subscribe = events
    llm = LLM(tiny(family), **SMALL, **given, **settings)
    reader, rng, whole = subscribe(), Random(7), f"{KEY}.hashes" in settings
    base = random_prompts([33, 40, 37, 26], seed=5)
    known: dict[Any, tuple[int, ...]] = {}
    for turn in range(6):
        ends = random_prompts([rng.randrange(1, 12) for _ in range(5)], turn)
        prompts = [rng.choice(base)[: rng.randrange(9, 26)] + end for end in ends]
        tokens_of(llm, prompts, SHORT)
        if turn == 2:
            llm.engine.add("left", base[0], SHORT)
            for _ in range(4):
                llm.engine.step()
            llm.engine.abort("left")
            tokens_of(llm, prompts[:1], SHORT)
        if turn == 3:
            llm.engine.forget_prefixes()
        reader.read()
        assert set(reader.blocks) == findable(llm, whole=whole)
        assert reader.blocks or turn == 3
        for key in reader.blocks:  # equal hashes are of equal tokens, whenever they are told
            prefix = tuple(reader.prefix(key[1], key[0]))
            assert known.setdefault((key, len(prefix)), prefix) == prefix
    assert {"BlockStored", "BlockRemoved", "AllBlocksCleared"} == set(reader.names)
    assert reader.replicas == {0}
    prefixes = {tuple(reader.prefix(one, group)) for group, one in reader.blocks}
    assert any(tuple(prompt[: len(prefix)]) == prefix for prompt in prompts for prefix in prefixes if prefix)
    late = subscribe()
    assert late.ask_again(0) == list(range(reader.next))
    assert late.blocks == reader.blocks
    assert late.ask_again(reader.next - 2) == [reader.next - 2, reader.next - 1]
    everything_returned(llm)


class Held:
    """A socket that takes messages once the gate is open."""

    def __init__(self, pub: Any) -> None:
        self.pub, self.gate, self.close = pub, threading.Event(), pub.close

    def send_multipart(self, frames: Any) -> None:
        assert self.gate.wait(60)
        self.pub.send_multipart(frames)


def test_a_full_queue_loses_nothing_and_keeps_no_step_waiting(tiny: Tiny, events: Any) -> None:
    given, subscribe = events
    llm = LLM(tiny("llama"), **{**SMALL, **given, f"{KEY}.max_queue_size": 1})
    publisher = llm.engine.extension("kv_events")._publisher
    reader, prompts = subscribe(), random_prompts([33, 40, 37, 26], seed=5)
    held = publisher._pub = Held(publisher._pub)
    want = tokens_of(LLM(tiny("llama"), **SMALL), prompts, SHORT)
    assert tokens_of(llm, prompts, SHORT) == want
    assert publisher._queue.full()
    held.gate.set()
    reader.read()
    assert reader.next == 2
    assert set(reader.blocks) != findable(llm)
    assert tokens_of(llm, prompts[::-1], SHORT) == want[::-1]
    reader.read()
    assert set(reader.blocks) == findable(llm)


def test_the_port_is_refused_while_another_has_it_and_free_once_that_engine_has_gone(tiny: Tiny, events: Any) -> None:
    given, _ = events
    first = LLM(tiny("llama"), **SMALL, **given)
    with pytest.raises(ConfigError, match=r"extensions\.kv_events\.endpoint = .* cannot be had.*in use"):
        LLM(tiny("llama"), **SMALL, **given)
    del first
    gc.collect()
    LLM(tiny("llama"), **SMALL, **given)


def test_each_replica_publishes_at_a_place_of_its_own() -> None:
    from slotline.plugins.kv_events.publisher import endpoint_of

    assert endpoint_of("tcp://*:5557", 0) == "tcp://*:5557"
    assert endpoint_of("tcp://*:5557", 2) == "tcp://*:5559"
    assert endpoint_of("tcp://[::1]:80", 1) == "tcp://[::1]:81"
    assert endpoint_of("ipc:///tmp/events", 3) == "ipc:///tmp/events_dp3"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("endpoint", "5557", "endpoint = '5557' is no endpoint"),
        ("endpoint", "tcp://*:x", "cannot be had"),
        ("replay_endpoint", "udp://x", "replay_endpoint = 'udp://x' is no endpoint"),
        ("buffer_steps", 0, "buffer_steps = 0 is not allowed"),
        ("hashes", "hex", "hashes"),
    ],
)
def test_bad_settings_are_named(tiny: Tiny, key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tiny("llama"), **SMALL, **{f"{KEY}.{key}": value})


def test_a_missing_package_and_a_cache_without_prefixes_are_refused(
    tiny: Tiny, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, _ = events
    with pytest.raises(NegotiationError, match=r"'kv_events'.*requires 'prefix_caching'"):
        LLM(tiny("llama"), **SMALL, **given, enable_prefix_caching=False)
    monkeypatch.setattr("slotline.plugins.kv_events.find_spec", lambda name: None if name == "zmq" else name)
    with pytest.raises(NegotiationError, match=r"the package zmq is not installed.*slotline\[events\]"):
        LLM(tiny("llama"), **SMALL, **given)
