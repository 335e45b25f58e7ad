"""Connectors in order: what one gives up goes to the next, and what the next has comes back to the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import add, random_prompts, run_all
from kv_tier_engines import PROMPTS, SHORT, SMALL, connector_of, events_of, in_tiers, settled, texts
from repository import SUPPORT

from slotline.core import LLM, SamplingParams
from slotline.plugins.kv_connectors.host_memory import HostMemoryOptions
from slotline.plugins.kv_connectors.host_memory.memory import HostMemory
from slotline.plugins.kv_connectors.stores.block_store import Key
from slotline.plugins.kv_connectors.stores.eviction import LeastRecentlyUsed, policy_of
from slotline.plugins.kv_connectors.tiers import tiers
from slotline.plugins.kv_transfer.block_copy import CacheBlockCopy
from slotline.registry.contracts import CacheBlock, ConnectorGroup, KVConnectorContext
from slotline.registry.errors import NegotiationError, PluginLoadError, PluginNotFoundError
from slotline.testing import Outcome, check_plugin

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96, 161)]

Tiny = Callable[..., Path]
TIGHT: dict[str, Any] = {**SMALL, "max_model_len": 64, "memory": "80KiB"}


@pytest.fixture(scope="module")
def want(tiny: Tiny) -> list[list[int]]:
    outputs = LLM(tiny("llama"), **SMALL).generate(PROMPTS, SHORT)
    return [list(one.outputs[0].token_ids) for one in outputs]


@pytest.fixture(scope="module")
def block(tiny: Tiny) -> int:
    """Bytes of a block."""
    return LLM(tiny("llama"), **SMALL).plan.pool.block_bytes


def alone(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Tokens of prompts served one by one, and of each how many were loaded."""
    outputs = [llm.generate([prompt], SHORT)[0] for prompt in prompts]
    return [list(o.outputs[0].token_ids) for o in outputs], [o.metrics.num_loaded_tokens for o in outputs]


@pytest.mark.parametrize("lower", ["disk", "shared", "slow", "few"])
def test_what_host_memory_gives_up_comes_back_from_below(
    lower: str, tiny: Tiny, want: list[list[int]], block: int, tmp_path: Path
) -> None:
    """The pool holds one request or two, host memory a few blocks, the tier below all. Loads at once and later."""
    options = {"folder": str(tmp_path), "staging": "1MiB"} if lower in ("disk", "shared") else {}
    inline = {"slow": ("slow_connector.py:Slow",), "few": ("failing_connector.py:Failing",)}.get(lower, ())
    name = "failing" if lower == "few" else lower
    settings = in_tiers("host_memory", name, **{f"{name}.{key}": value for key, value in options.items()})
    settings |= {"kv_connector.host_memory.memory": f"{4 * block // 1024}KiB"}
    settings |= {"plugins.inline": tuple(f"{SUPPORT / one}" for one in inline)}
    llm = LLM(tiny("llama"), **TIGHT, **settings)
    for _ in range(2):
        assert alone(llm, PROMPTS)[0] == want
    if hasattr(connector_of(llm), "flush"):
        assert connector_of(llm).flush(20.0)
    found, loaded = alone(llm, PROMPTS)
    assert found == want
    assert sum(loaded) > 40
    events = events_of(llm)
    assert events["promoted"] > 0
    assert events["host_memory_evicted"] > 0
    if options:
        assert events[f"{lower}_saved"] > 4
        assert events[f"{lower}_loaded"] > 0
    settled(llm)
    llm.engine.forget_prefixes()
    assert alone(llm, PROMPTS[:1])[1] == [0]


def test_a_hit_below_is_promoted_and_found_above_next_time(tiny: Tiny, want: list[list[int]], tmp_path: Path) -> None:
    path, folder = tiny("llama"), {"disk.folder": str(tmp_path), "disk.staging": "1MiB"}
    first = LLM(path, **SMALL, **{"kv_connector.name": "disk"}, **{f"kv_connector.{k}": v for k, v in folder.items()})
    assert texts(first)[0] == want
    for promote in (True, False):
        llm = LLM(path, **SMALL, **in_tiers("host_memory", "disk", **folder, **{"tiers.promote": promote}))
        assert texts(llm)[1] > 0
        before = events_of(llm)
        assert (before["promoted"] > 0) == promote
        assert before["host_memory_loaded"] == 0 < before["disk_loaded"]
        found, loaded = texts(llm)
        assert found == want
        assert loaded > 0
        after = events_of(llm)
        assert (after["host_memory_loaded"] > 0) == promote
        assert (after["disk_loaded"] == before["disk_loaded"]) == promote
        settled(llm)


def test_a_tier_that_does_not_say_what_it_gives_up_shares_its_saves(
    tiny: Tiny, want: list[list[int]], tmp_path: Path
) -> None:
    settings = in_tiers("failing", "disk", **{"disk.folder": str(tmp_path), "disk.staging": "1MiB"})
    settings |= {"plugins.inline": (f"{SUPPORT / 'failing_connector.py'}:Failing",)}
    llm = LLM(tiny("llama"), **TIGHT, **settings)
    for how in ("never", "load", "save", "some"):
        connector_of(llm)._tiers[0].connector.how = how
        for _ in range(2):
            assert alone(llm, PROMPTS)[0] == want
        assert events_of(llm)["disk_saved"] > 0
    settled(llm)


def test_three_tiers_in_a_row(tiny: Tiny, want: list[list[int]], block: int, tmp_path: Path) -> None:
    few = f"{4 * block // 1024}KiB"
    names = {"disk.folder": str(tmp_path), "disk.staging": "1MiB", "host_memory.memory": few}
    names |= {"shared.folder": str(tmp_path), "shared.memory": few, "shared.staging": "1MiB"}
    llm = LLM(tiny("llama"), **TIGHT, **in_tiers("host_memory", "shared", "disk", **names))
    for _ in range(3):
        assert alone(llm, PROMPTS)[0] == want
    assert events_of(llm)["disk_saved"] > 0
    assert "host_memory, then shared, then disk" in " ".join(llm.plan.explain().split())
    settled(llm)


def test_a_step_begins_a_part_of_the_loads_of_a_tier_in_memory(
    tiny: Tiny, want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "HOST_BYTES", 1)
    at_once = list[int]()
    start = HostMemory.start
    monkeypatch.setattr(
        HostMemory, "start", lambda own, saves, loads: (at_once.append(len(loads)), start(own, saves, loads))[1]
    )
    llm = LLM(tiny("llama"), **TIGHT, **in_tiers("host_memory"))
    assert alone(llm, PROMPTS)[0] == want
    found, loaded = alone(llm, PROMPTS)
    assert found == want
    assert sum(loaded) > 40
    assert max(at_once) == 1
    assert sum(at_once) > 4
    settled(llm)


def test_beside_a_request_that_decodes_blocks_of_a_tier_in_memory_come_one_by_one(
    tiny: Tiny, want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = list[int]()
    start = HostMemory.start

    def noted(own: HostMemory, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        at_once.append(len(loads))
        start(own, saves, loads)

    monkeypatch.setattr(HostMemory, "start", noted)
    llm = LLM(tiny("llama"), **{**TIGHT, "memory": "160KiB"}, **in_tiers("host_memory"))
    for _ in range(2):
        assert alone(llm, PROMPTS)[0] == want
        alone(llm, random_prompts([48] * 4, seed=8))  # in whose place they are loaded
    assert max(at_once) > 1
    long = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    runs = add(llm, "runs", [7, 8, 9], long)
    for _ in range(3):
        llm.engine.step()
    at_once.clear()
    assert not runs.finished
    waits = add(llm, "waits", PROMPTS[0], SHORT)
    run_all(llm)
    assert waits.output_token_ids == want[0]
    assert waits.metrics.num_loaded_tokens > 4
    assert at_once.count(1) > 1  # the rest once the other has ended
    settled(llm)


def test_a_tier_slower_than_computing_is_left_out_and_the_others_serve(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = random_prompts([110, 105, 100], seed=6)
    settings: dict[str, Any] = {**TIGHT, "max_model_len": 128, "memory": "160KiB", "kv_connector.leave_out_slow": True}
    settings |= {"plugins.inline": (f"{SUPPORT / 'failing_connector.py'}:Failing",)}
    llm = LLM(tiny("llama"), **settings, **in_tiers("failing", "host_memory"))
    want = alone(llm, prompts)[0]
    assert alone(llm, prompts)[0] == want
    tier = connector_of(llm)._tiers[0]
    tier.connector.how = "slow"
    while not events_of(llm)["failing_left_out"]:
        found, loaded = alone(llm, prompts)
        assert found == want
        assert sum(loaded) > 0
    assert "tier failing takes" in caplog.text
    assert "it is left out for 10 s" in caplog.text
    tier.connector.how = "load"  # it would raise
    before = events_of(llm)["host_memory_loaded"]
    found, loaded = alone(llm, prompts)
    assert found == want
    assert sum(loaded) > 0
    assert events_of(llm)["host_memory_loaded"] > before
    assert events_of(llm)["failing_left_out"] == 1
    assert events_of(llm)["left_out"] == 0  # as a whole
    tier.speed._until, tier.connector.how = 0.0, "never"  # later
    before = events_of(llm)["host_memory_loaded"]
    assert sum(alone(llm, prompts)[1]) > 0
    assert events_of(llm)["host_memory_loaded"] == before
    settled(llm)


def test_tiers_that_cannot_be_built_are_refused(tiny: Tiny) -> None:
    path = tiny("llama")
    for names, text in (
        (("host_memory", "host_memory"), "'host_memory' is named twice"),
        (("tiers", "disk"), "'tiers' is itself made of others"),
        ((), "tiers names no connector"),
    ):
        with pytest.raises(NegotiationError, match=text):
            LLM(path, **SMALL, **in_tiers(*names))
    with pytest.raises(PluginNotFoundError, match="absent"):
        LLM(path, **SMALL, **in_tiers("host_memory", "absent"))


class Newest(LeastRecentlyUsed):
    """A policy of somebody else's: the newest goes first."""

    def victims(self) -> Iterator[Key]:
        return reversed(self._order)


@pytest.mark.parametrize(("name", "order"), [("lru", "bcad"), ("lfu", "bcda"), (f"{__name__}:Newest", "dacb")])
def test_policies_say_which_blocks_go_first(name: str, order: str) -> None:
    policy = policy_of(name, "policy")
    for one in b"abc":
        policy.add(Key(0, bytes([one])))
    policy.use(Key(0, b"a"))
    policy.use(Key(0, b"a"))
    policy.add(Key(0, b"x"))
    policy.remove(Key(0, b"x"))
    policy.add(Key(0, b"d"))
    assert b"".join(key.block_hash for key in policy.victims()).decode() == order


@pytest.mark.parametrize(("name", "gone"), [("lru", "bc"), ("lfu", "cb")])
def test_host_memory_gives_up_blocks_in_the_order_of_its_policy(name: str, gone: str) -> None:
    """It says what it gives up, with its bytes, before it writes over them."""
    caches, given_up = torch.arange(32, dtype=torch.uint8)[:, None].repeat(1, 512), list[tuple[str, int]]()
    context = KVConnectorContext(
        contract=1,
        groups=(
            ConnectorGroup(
                name="g", layers=(), kv_dtype="uint8", layout="", block_size=4, kernel_block_size=4, block_bytes=512
            ),
        ),
        caches={},
        num_blocks=32,
        copy=CacheBlockCopy([[caches[:, None]]]),
        device="cpu",
        model="m",
        options=HostMemoryOptions(memory="2KiB", policy=name),
        evicted=lambda blocks: given_up.extend((one.block_hash.decode(), int(one.row[7])) for one in blocks),
    )
    memory = HostMemory(context)
    memory.start([CacheBlock(0, one.encode(), at) for at, one in enumerate("abc", 1)], ())
    for hit in "aabbc":
        memory.start((), [CacheBlock(0, hit.encode(), 20)])
    memory.start([CacheBlock(0, b"d", 4)], ())
    memory.start((), [CacheBlock(0, b"d", 20)])
    memory.start((), [CacheBlock(0, b"d", 20), CacheBlock(0, b"a", 21)])
    memory.start([CacheBlock(0, b"e", 5), CacheBlock(0, b"f", 6)], ())
    assert "".join(one for one, _ in given_up) == gone
    assert caches[20, 0] == 4
    assert all("_abcd".index(one) == value for one, value in given_up)
    assert memory.counts()["evicted"] == 2


def test_a_policy_that_is_none_is_refused(tiny: Tiny) -> None:
    settings = {"kv_connector.name": "host_memory", "kv_connector.host_memory.memory": "1MiB"}
    for name, text in (("mru", "is no policy"), ("builtins:dict", "it lacks add"), ("absent:X", "absent")):
        with pytest.raises(PluginLoadError, match=text):
            LLM(tiny("llama"), **SMALL, **settings, **{"kv_connector.host_memory.policy": name})


def test_blocks_that_a_promotion_gave_up_do_not_outlast_a_reset() -> None:
    """The check resets between loads from the lower tier, each of which the upper one makes room for."""
    records = check_plugin("kv_connector:tiers", only=lambda item: item.id == "kv_connector.fuzz.traffic", device="cpu")
    assert [(record.outcome, record.reason) for record in records] == [(Outcome.PASSED, "")]
