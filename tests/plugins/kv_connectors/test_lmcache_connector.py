"""Blocks in LMCache's own server and in its folders, where the package is installed: `.ci/lmcache` has it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kv_tier_engines import PROMPTS, SHORT, SMALL, connector_of, events_of, settled, texts

from slotline.core import LLM
from slotline.plugins.kv_connectors.lmcache import probe
from slotline.registry.descriptor import DeviceInfo
from slotline.registry.errors import ConfigError, NegotiationError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96)]
needs_lmcache = pytest.mark.skipif(
    find_spec("lmcache") is None, reason="needs lmcache, in an environment of its own: see .ci/lmcache"
)

Tiny = Callable[..., Path]
EVERY = sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)


@pytest.mark.skipif(find_spec("lmcache") is not None, reason="lmcache is installed")
def test_without_the_package_it_is_refused_with_the_command_that_installs_it(tiny: Tiny) -> None:
    with pytest.raises(NegotiationError, match=r"pip install 'slotline\[lmcache\]'"):
        LLM(tiny("llama"), **SMALL, **{"kv_connector.name": "lmcache"})


def test_the_probe_asks_for_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotline.plugins.kv_connectors.lmcache.find_spec", lambda _: None)
    assert "slotline[lmcache]" in probe(DeviceInfo(type="cpu"))


SERVER = """
import socket, sys
from lmcache.v1.server.__main__ import LMCacheServer
bind = socket.socket.bind
def at_once(self, address):
    self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # LMCache leaves it out, and waits a minute then
    return bind(self, address)
socket.socket.bind = at_once
LMCacheServer("127.0.0.1", int(sys.argv[1]), "cpu").run()
"""


class Server:
    """LMCache's server in a process of its own, which can be killed, stopped and started again."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.start()

    @property
    def url(self) -> str:
        return f"lm://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-c", SERVER, str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        latest = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None
                assert time.monotonic() < latest
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.kill()


@pytest.fixture(scope="module")
def want(tiny: Tiny) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in LLM(tiny("llama"), **SMALL).generate(PROMPTS, SHORT)]


def in_lmcache(url: str, **options: Any) -> dict[str, Any]:
    """Settings of an engine whose blocks are in a store. It waits for what the store has, unless told otherwise."""
    given = {"url": url, "staging": "1MiB", "lookup": 5.0, **options}
    return {"kv_connector.name": "lmcache", **{f"kv_connector.lmcache.{key}": value for key, value in given.items()}}


@needs_lmcache
def test_one_engine_finds_what_another_has_saved(tiny: Tiny, want: list[list[int]], server: Server) -> None:
    first = LLM(tiny("llama"), **SMALL, **in_lmcache(server.url))
    assert texts(first) == (want, 0)
    assert texts(first) == (want, EVERY)
    second = LLM(tiny("llama"), **SMALL, **in_lmcache(server.url))
    assert texts(second) == (want, EVERY)
    assert texts(LLM(tiny("llama_deep"), **SMALL, **in_lmcache(server.url)))[1] == 0
    first.engine.forget_prefixes()  # as for other weights
    assert texts(first) == (want, 0)
    for one in (first, second):
        settled(one)


@needs_lmcache
def test_wrong_bytes_are_misses_and_are_saved_again(tiny: Tiny, want: list[list[int]], server: Server) -> None:
    llm = LLM(tiny("llama"), **SMALL, **in_lmcache(server.url))
    texts(llm)
    store = connector_of(llm)._store
    from slotline.plugins.kv_connectors.lmcache.remote import Remote
    from slotline.plugins.kv_connectors.lmcache.store import _name

    remote = Remote(server.url, store._size, 10.0, 60.0)
    for key in list(store._known)[:3]:
        name = _name(key, store._identity)
        value = remote.get(name)
        assert value is not None
        value[-9] ^= 1
        remote.put(name, [value])
    found, loaded = texts(llm)
    assert found == want
    assert loaded < EVERY
    assert events_of(llm)["corrupt"] > 0
    texts(llm)
    assert texts(llm) == (want, EVERY)
    settled(llm)


@needs_lmcache
def test_a_server_that_dies_costs_its_hits_until_it_is_back(tiny: Tiny, want: list[list[int]], server: Server) -> None:
    llm = LLM(tiny("llama"), **SMALL, **in_lmcache(server.url))
    texts(llm)
    server.kill()
    for _ in range(2):
        found, loaded = texts(llm)
        assert found == want
        assert loaded < EVERY
    assert events_of(llm)["skipped_gone"] > 0
    server.start()
    connector_of(llm)._store._out_until = 0.0
    texts(llm)
    assert texts(llm) == (want, EVERY)
    settled(llm)


@needs_lmcache
def test_a_server_that_hangs_stalls_no_step(tiny: Tiny, want: list[list[int]], server: Server) -> None:
    llm = LLM(tiny("llama"), **SMALL, **in_lmcache(server.url, timeout=1.0, lookup=0.005))
    texts(llm)
    store = connector_of(llm)._store
    os.kill(server.process.pid, signal.SIGSTOP)
    store.lost(unknown := next(iter(store._known)))
    before = time.perf_counter()
    store.look_up([unknown], 0.005)
    assert time.perf_counter() - before < 0.5
    assert texts(llm)[0] == want
    os.kill(server.process.pid, signal.SIGCONT)
    store._out_until = 0.0
    texts(llm)
    assert texts(llm) == (want, EVERY)
    settled(llm)


@needs_lmcache
def test_other_stores_of_lmcache_work_by_their_address(tiny: Tiny, want: list[list[int]], tmp_path: Path) -> None:
    """A folder, which LMCache writes by itself."""
    llm = LLM(tiny("llama"), **SMALL, **in_lmcache(f"fs://host:0{tmp_path}/"))
    assert texts(llm) == (want, 0)
    assert texts(LLM(tiny("llama"), **SMALL, **in_lmcache(f"fs://host:0{tmp_path}/"))) == (want, EVERY)
    assert len(list(tmp_path.rglob("*.data"))) == events_of(llm)["saved"]


@needs_lmcache
def test_what_a_store_does_not_keep_is_not_held(tiny: Tiny, want: list[list[int]]) -> None:
    """LMCache's black hole takes everything and has nothing."""
    llm = LLM(tiny("llama"), **SMALL, **in_lmcache("blackhole://"))
    for _ in range(2):
        assert texts(llm) == (want, 0)
    assert events_of(llm)["refused"] > 0
    assert events_of(llm)["saved"] == 0


@needs_lmcache
def test_a_store_that_cannot_be_used_is_refused_with_a_remedy(tiny: Tiny) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for url, what in (
        (f"lm://127.0.0.1:{port}", "cannot be reached"),
        ("what://a:1", "No adapter"),
        ("here", "scheme"),
    ):
        with pytest.raises(ConfigError, match=what):
            LLM(tiny("llama"), **SMALL, **in_lmcache(url))


@needs_lmcache
def test_a_value_is_filled_up_and_comes_back_whole(server: Server) -> None:
    from slotline.plugins.kv_connectors.lmcache.remote import Remote

    remote = Remote(server.url, 1000, 10.0, 60.0)
    assert not remote.has(7)
    assert remote.get(7) is None
    remote.put(7, [b"ab", np.arange(10).astype(np.uint8)])
    assert remote.has(7)
    value = remote.get(7)
    assert value is not None
    assert value.tobytes() == b"ab" + bytes(range(10)) + bytes(988)
    remote.close()
