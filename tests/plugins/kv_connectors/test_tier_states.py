"""States in stores of blocks: a prompt goes on from the last boundary whose state is there, with the same text."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import run_all
from handoff_engines import MIXED
from kv_tier_engines import SHORT, SMALL, connector_of, events_of, in_shared_memory, in_tiers, on_disk, settled
from repository import SUPPORT

from slotline.core import LLM
from slotline.plugins.kv_connectors.stores.block_store import Key
from slotline.plugins.kv_connectors.stores.codecs import codec_of
from slotline.registry.contracts import AttentionLayer, ConnectorGroup, KVConnectorContext, StateLayer, StateTensorSpec
from slotline.registry.errors import CapacityError, NegotiationError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96, 161)]

Tiny = Callable[..., Path]
Tokens = list[list[int]]
TIGHT: dict[str, Any] = {**SMALL, "state.checkpoints": 1, "memory": "136KiB"}
"""Room for the states of three requests, one checkpoint, and the blocks of one request or two."""
HOST: dict[str, Any] = {"kv_connector.name": "host_memory", "kv_connector.host_memory.memory": "2MiB"}


def served(llm: LLM, *, together: bool = False) -> tuple[Tokens, list[int]]:
    """The tokens of prompts after all prefixes here are forgotten, and the cached tokens of each."""
    llm.engine.scheduler.cache.pool.reset()
    llm.engine.extension("states").checkpoints.reset()
    return without_forgetting(llm, together=together)


def without_forgetting(llm: LLM, *, together: bool = False) -> tuple[Tokens, list[int]]:
    """The tokens of prompts, and the cached tokens of each."""
    outputs = llm.generate(MIXED, SHORT) if together else [llm.generate([prompt], SHORT)[0] for prompt in MIXED]
    if hasattr(connector_of(llm), "flush"):
        assert connector_of(llm).flush(20.0)
    settled(llm)
    return [list(one.outputs[0].token_ids) for one in outputs], [one.metrics.num_cached_tokens for one in outputs]


@pytest.fixture(scope="module")
def want(tiny: Tiny) -> Tokens:
    return served_by(LLM(tiny("bamba"), **SMALL))


def served_by(llm: LLM) -> Tokens:
    """The tokens of an engine without a connector."""
    return [list(one.outputs[0].token_ids) for one in llm.generate(MIXED, SHORT)]


@pytest.fixture(scope="module")
def disk_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def first(tiny: Tiny, disk_folder: Path) -> LLM:
    return LLM(tiny("bamba"), **SMALL, **on_disk(disk_folder))


def states_of(folder: Path) -> list[Path]:
    """The files of states, whose group is the last one."""
    files = [one for one in folder.rglob("*-*") if one.is_file()]
    last = max(one.name.split("-")[0] for one in files)
    return sorted(one for one in files if one.name.startswith(f"{last}-"))


HITS = [32, 36, 36, 24, 32]
"""The whole blocks of the prompts."""


def test_a_restarted_engine_goes_on_from_the_states_on_disk(
    tiny: Tiny, first: LLM, disk_folder: Path, want: Tokens
) -> None:
    """The last prompt has the state behind the tokens that it shares with the first: both are found there."""
    assert served(first) == (want, [0, 0, 0, 0, 0])
    assert len(states_of(disk_folder)) == 6
    later = LLM(tiny("bamba"), **SMALL, **on_disk(disk_folder))
    assert served(later) == (want, HITS)
    changed = LLM(tiny("bamba", num_hidden_layers=5), **SMALL, **on_disk(disk_folder))
    assert served(changed)[1] == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("how", ["gone", "wrong byte", "version", "swapped"])
def test_without_a_state_an_earlier_boundary_counts(
    how: str, tiny: Tiny, first: LLM, disk_folder: Path, want: Tokens
) -> None:
    """The first prompt has states behind 16 tokens, with the last one, and behind 32."""
    served(first)
    store, request = connector_of(first)._store, first.engine.add("named", MIXED[0], SHORT)
    run_all(first, 200_000)
    keys = [Key(1, request.block_hashes[number]) for number in (7, 3)]
    states = [disk_folder / "v1" / store.name(key) for key in keys]
    data = [bytearray(one.read_bytes()) for one in states]
    if how == "gone":
        states[0].unlink()
        store.lost(keys[0])
    elif how == "swapped":
        states[0].write_bytes(data[1])
    else:
        data[0][8 if how == "version" else -9] ^= 1
        states[0].write_bytes(data[0])
    before = events_of(first)
    tokens, hits = served(first)
    assert tokens == want
    assert hits == [16 if how == "gone" else 0, *HITS[1:]]
    fault = {"wrong byte": "corrupt", "version": "other_version", "swapped": "foreign"}.get(how)
    assert fault is None or events_of(first)[fault] == before.get(fault, 0) + 1
    assert served(first) == (want, HITS)  # it has been saved again


@pytest.mark.parametrize("family", ["mamba2", "lfm2", "qwen3_next", "recurrent_gemma"])
@pytest.mark.slow
def test_all_kinds_of_states_come_back(family: str, tiny: Tiny, tmp_path: Path) -> None:
    path = tiny(family)
    tokens = served_by(LLM(path, **SMALL))
    one = LLM(path, **SMALL, **on_disk(tmp_path))
    assert served(one) == (tokens, [0, 0, 0, 0, 0])
    assert served(LLM(path, **SMALL, **on_disk(tmp_path))) == (tokens, HITS)


def test_a_second_engine_goes_on_from_shared_states(tiny: Tiny, want: Tokens, tmp_path: Path) -> None:
    """Of 256 KiB half is for six states, so that some make way for others."""
    settings = {**SMALL, **in_shared_memory(tmp_path, memory="256KiB", staging="1MiB")}
    engines = [LLM(tiny("bamba"), **settings) for _ in range(2)]
    assert served(engines[0]) == (want, [0, 0, 0, 0, 0])
    for number in (1, 0, 1):
        tokens, hits = served(engines[number], together=number == 1)
        assert tokens == want
        assert hits[:4] == HITS[:4]
    tables = connector_of(engines[0])._store.tables
    assert [table.count for table in tables] == [64, 6]
    slot = (tables[1].entries["state"] == 2).argmax()
    tables[1].slots[slot, 77] ^= 1
    tokens, hits = served(engines[1])
    assert tokens == want
    assert sum(hits) < sum(HITS)
    assert events_of(engines[1])["corrupt"] == 1
    del engines, tables
    gc.collect()
    assert list(tmp_path.iterdir()) == []


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "asynchronous": {"scheduler.async": True},
    "drafted": {"drafter.name": "ngram", "drafter.tokens": 3},
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("host_memory", "asynchronous"),
        ("tiers", "asynchronous"),
        pytest.param("tiers", "plain", marks=pytest.mark.slow),
        pytest.param("host_memory", "drafted", marks=pytest.mark.slow),
        pytest.param("tiers", "drafted", marks=pytest.mark.slow),
    ],
)
def test_states_stay_where_the_pool_has_no_room_for_them(
    name: str, mode: str, tiny: Tiny, want: Tokens, tmp_path: Path
) -> None:
    options = {"disk.folder": str(tmp_path), "disk.staging": "1MiB", "host_memory.memory": "64KiB"}
    settings = HOST if name == "host_memory" else in_tiers("host_memory", "disk", **options)
    llm = LLM(tiny("bamba"), **{**TIGHT, **MODES[mode], **settings})
    waits = any(one.key == "kv_connector loads" and "keeps states" in one.origin for one in llm.plan.settings)
    assert waits == (name == "host_memory")
    for number in range(4):
        tokens, hits = without_forgetting(llm, together=number == 1)
        assert tokens == want
    assert sum(hits) > 100
    events, prefix = events_of(llm), "" if name == "host_memory" else "host_memory_"
    assert events[f"{prefix}saved"] > 30
    if name == "tiers":
        assert events["host_memory_evicted"] > 10
        assert min(events["disk_saved"], events["disk_loaded"], events["promoted"]) > 10
        assert len(states_of(tmp_path)) >= 5
    llm.engine.forget_prefixes()
    assert served(llm)[1] == [0, 0, 0, 0, 0]


def test_a_state_that_made_way_before_its_save_is_not_saved_under_its_name(
    tiny: Tiny, want: Tokens, tmp_path: Path
) -> None:
    """Prompts of one length keep their states in the same step, in one slot."""
    settings = {**SMALL, "state.checkpoints": 1, "max_num_batched_tokens": 64, **on_disk(tmp_path)}
    prompts = [prompt[:20] for prompt in MIXED[:3]]
    tokens = [list(one.outputs[0].token_ids) for one in LLM(tiny("bamba"), **SMALL).generate(prompts, SHORT)]
    first = LLM(tiny("bamba"), **settings)
    for _ in range(2):
        assert [list(one.outputs[0].token_ids) for one in first.generate(prompts, SHORT)] == tokens
    assert connector_of(first).flush(20.0)
    assert events_of(first)["unsaved"] > 0
    second = LLM(tiny("bamba"), **settings)
    for prompt, expected in zip(prompts, tokens, strict=True):
        assert list(second.generate([prompt], SHORT)[0].outputs[0].token_ids) == expected


@pytest.mark.parametrize(
    "how", ["late", "some", *(pytest.param(how, marks=pytest.mark.slow) for how in ("load", "wait", "failed", "held"))]
)
def test_a_load_that_fails_in_its_step_makes_no_wrong_state(how: str, tiny: Tiny, want: Tokens) -> None:
    """The loads of this connector end in the step, and write something else if they fail."""
    inline = {"plugins.inline": (f"{SUPPORT / 'failing_connector.py'}:FailingStates",)}
    settings = {"kv_connector.name": "failing", "kv_connector.failing.how": how, "state.checkpoints": 8}
    llm = LLM(tiny("bamba"), **{**SMALL, **inline, **settings, "scheduler.async": True})
    for number in range(3):
        tokens, hits = served(llm, together=number == 1)
        assert tokens == want
    assert sum(hits) < sum(HITS)
    assert without_forgetting(llm) == (want, HITS)  # computed again, and kept


def test_what_takes_no_states_is_refused(tiny: Tiny) -> None:
    path = tiny("mamba2")
    inline = {"plugins.inline": (f"{SUPPORT / 'failing_connector.py'}:Failing",)}
    with pytest.raises(NegotiationError, match=r"keeps states .*'failing' does not declare that it takes states"):
        LLM(path, **SMALL, **inline, **{"kv_connector.name": "failing"})
    with pytest.raises(NegotiationError, match="'failing' does not declare that it takes states"):
        LLM(path, **SMALL, **inline, **in_tiers("host_memory", "failing"))
    layered = {"plugins.inline": (f"{SUPPORT / 'layer_connector.py'}:Layered",), "kv_connector.name": "layered"}
    with pytest.raises(NegotiationError, match="loads end layer by layer in the step"):
        LLM(path, **SMALL, **layered)


def test_a_memory_without_room_for_a_state_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    small = {"kv_connector.name": "host_memory", "kv_connector.host_memory.memory": "32KiB"}
    for settings in (small, in_shared_memory(tmp_path, memory="32KiB")):
        with pytest.raises(CapacityError, match="holds no state in the half that is for states: one takes 20992 bytes"):
            LLM(tiny("bamba"), **SMALL, **settings)
    with pytest.raises(CapacityError, match="set it to '21KiB' at least"):
        LLM(tiny("bamba"), **SMALL, **on_disk(tmp_path, size="20KiB"))


def test_eight_bits_leave_states_as_they_are() -> None:
    sizes = {"block_size": 4, "kernel_block_size": 4, "layout": "NHD"}
    tensor = StateTensorSpec(name="ssm", shape=(16, 4), dtype="float32")
    layer = StateLayer(name="m", index=1, state_kind="mamba1", tensors=(tensor,), facts={})
    attention = AttentionLayer(name="a", index=0, num_heads=1, num_kv_heads=1, head_size=8, head_size_v=8, scale=1.0)
    groups = (
        ConnectorGroup(name="full", layers=(attention,), kv_dtype="float32", block_bytes=256, **sizes),
        ConnectorGroup(name="states", layers=(), states=(layer,), kv_dtype="uint8", block_bytes=256, **sizes),
    )
    context: Any = KVConnectorContext(
        contract=1, groups=groups, caches={}, num_blocks=4, copy=None, device="cpu", model="m"
    )
    codec = codec_of("int8", context, "kv_connector.disk.codec")
    data = torch.randn(64).view(torch.uint8).numpy()
    assert codec.sizes == [64 + 8 * 4, 256]
    assert len(codec.encode(0, data)) == codec.sizes[0]
    kept = codec.encode(1, data).copy()
    codec.decode(1, kept, kept)
    assert np.array_equal(kept, data)
