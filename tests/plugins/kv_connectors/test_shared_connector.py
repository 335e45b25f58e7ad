"""Blocks in memory that processes share: found by all, and safe against each other's evictions and deaths."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from engine_driver import random_prompts
from kv_tier_engines import PROMPTS, SHORT, SMALL, connector_of, events_of, in_shared_memory, settled, texts
from repository import SUPPORT, TESTS

from slotline.core import LLM
from slotline.plugins.kv_connectors.shared import table as table_module
from slotline.plugins.kv_connectors.shared.table import LockedError, SharedTable
from slotline.plugins.kv_connectors.stores.block_store import Fault, Key
from slotline.registry.errors import CapacityError, ConfigError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96, 161)]

Tiny = Callable[..., Path]
SIZE = 4096
IDENTITY = "a" * 64


@pytest.fixture(scope="module")
def want(tiny: Tiny) -> list[list[int]]:
    outputs = LLM(tiny("llama"), **SMALL).generate(PROMPTS, SHORT)
    return [list(one.outputs[0].token_ids) for one in outputs]


def test_a_second_engine_finds_what_the_first_has_computed(tiny: Tiny, want: list[list[int]], tmp_path: Path) -> None:
    path = tiny("llama")
    first = LLM(path, **SMALL, **in_shared_memory(tmp_path))
    second = LLM(path, **SMALL, **in_shared_memory(tmp_path))
    assert texts(first) == (want, 0)
    found, loaded = texts(second)
    assert found == want
    assert loaded == sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
    other = LLM(path, **SMALL, **in_shared_memory(tmp_path, name="other"))
    assert texts(other) == (want, 0)
    second.engine.forget_prefixes()  # as after new weights: it is on its own from now on
    later = random_prompts([30], seed=99)
    texts(second, later)
    assert texts(second, later)[1] > 0
    assert texts(first, later)[1] == 0
    settled(first)
    settled(second)
    del first, second, other
    gc.collect()
    assert list(tmp_path.iterdir()) == []  # the last one removes it


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from kv_tier_engines import SMALL, in_shared_memory, texts
from slotline.core import LLM
print(texts(LLM({model!r}, **SMALL, **in_shared_memory(Path({folder!r})))), flush=True)
"""


@pytest.mark.slow
def test_another_process_has_hits(tiny: Tiny, want: list[list[int]], tmp_path: Path) -> None:
    path = tiny("llama")
    first = LLM(path, **SMALL, **in_shared_memory(tmp_path))
    assert texts(first) == (want, 0)
    paths = [str(SUPPORT), str(TESTS)]
    code = SCRIPT.format(paths=paths, model=str(path), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    loaded = sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
    assert done.stdout.strip() == str((want, loaded))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_small_memory_evicts_and_texts_stay(tiny: Tiny, want: list[list[int]], tmp_path: Path) -> None:
    block = LLM(tiny("llama"), **SMALL, **in_shared_memory(tmp_path)).plan.pool.block_bytes
    memory = f"{30 * block // 1024}KiB"
    engines = [LLM(tiny("llama"), **SMALL, **in_shared_memory(tmp_path, memory=memory, name="small")) for _ in "ab"]
    loaded = 0
    for prompts in (PROMPTS, PROMPTS, PROMPTS[:2], PROMPTS[:2]):
        for llm in engines:
            found, count = texts(llm, prompts)
            loaded += count
            assert found == want[: len(prompts)]
    assert loaded > 0
    assert sum(events_of(llm)["evicted"] for llm in engines) > 0
    assert connector_of(engines[0])._store.tables[0].count == 30


def made(folder: Path, slots: int = 8) -> SharedTable:
    """A table of so many slots."""
    return SharedTable(folder / "table", IDENTITY, SIZE, slots * SIZE)


def content(name: bytes) -> np.ndarray:
    """The bytes of a block."""
    return np.resize(np.frombuffer(name, np.uint8), SIZE)


def save(table: SharedTable, name: bytes) -> bool:
    """Save a block."""
    ((slot,), _) = table.reserve([Key(0, name)], ())
    return slot is not None and table.write(slot, content(name))


def write_on(table: SharedTable, names: list[bytes], at: int) -> None:
    """Save blocks until the process is killed. As a store does, leave one out while the lock is taken."""
    try:
        while True:
            with suppress(LockedError):
                save(table, names[at % len(names)])
            at += 1
    finally:
        os._exit(1)  # a forked process must not go on with the tests


def test_processes_that_evict_each_others_blocks_never_read_wrong_bytes(tmp_path: Path) -> None:
    """Two processes write all the time, are killed while they do, and a third one reads."""
    table = made(tmp_path)
    names = [bytes([65 + i]) * 3 for i in range(24)]
    read = missed = 0
    for _ in range(2):
        children = []
        for number in range(2):
            child = os.fork()
            if not child:
                write_on(made(tmp_path), names, number)
            children.append(child)
        until = time.monotonic() + 0.7
        while time.monotonic() < until:
            for name in names:
                data = np.empty(SIZE, np.uint8)
                if table.read(Key(0, name), data) is None:
                    assert (data == content(name)).all()
                    read += 1
                else:
                    missed += 1
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert read > 20
    assert missed > 20
    assert save(table, b"later")  # nothing that they held stops others
    assert table.held([Key(0, b"later")]) == [True]


def test_a_process_that_dies_with_the_lock_stops_nobody(tmp_path: Path) -> None:
    table = made(tmp_path)
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        with made(tmp_path)._locked(1.0):
            os.write(told, b"x")
            time.sleep(60.0)
    os.read(ready, 1)
    with pytest.raises(LockedError):
        table.reserve([Key(0, b"a")], ())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert save(table, b"a")
    os.close(ready)
    os.close(told)


def test_a_block_that_a_dead_process_was_writing_makes_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = made(tmp_path, slots=1)
    child = os.fork()
    if not child:
        made(tmp_path).reserve([Key(0, b"half")], ())
        os._exit(0)
    os.waitpid(child, 0)
    assert table.held([Key(0, b"half")]) == [False]
    assert save(table, b"a")
    ((slot,), _) = table.reserve([Key(0, b"b")], ())
    assert table.reserve([Key(0, b"c")], ())[0] == [None]  # by a process that lives
    monkeypatch.setattr(table_module, "STALE_SECONDS", -1.0)
    assert save(table, b"c")
    assert slot is not None
    assert not table.write(slot, content(b"b"))  # too late: the slot is another's
    data = np.empty(SIZE, np.uint8)
    assert table.read(Key(0, b"c"), data) is None
    assert (data == content(b"c")).all()


def test_wrong_bytes_are_found_and_forgotten(tmp_path: Path) -> None:
    table, data = made(tmp_path), np.empty(SIZE, np.uint8)
    assert save(table, b"a")
    table.slots[table.entries["state"].argmax(), 77] ^= 1
    assert table.read(Key(0, b"a"), data) is Fault.CORRUPT
    assert table.read(Key(0, b"a"), data) is Fault.MISSING
    assert table.read(Key(1, b"a"), data) is Fault.MISSING


def test_blocks_that_are_being_loaded_stay(tmp_path: Path) -> None:
    table = made(tmp_path, slots=2)
    assert save(table, b"a")
    assert save(table, b"b")
    table.used([Key(0, b"a")])
    slots, evicted = table.reserve([Key(0, b"c"), Key(0, b"d")], [Key(0, b"b")])
    assert [slot is not None for slot in slots] == [True, False]
    assert evicted == 1
    assert table.held([Key(0, b"b"), Key(0, b"a")]) == [True, False]


def test_what_cannot_be_used_is_refused_with_a_remedy(tiny: Tiny, tmp_path: Path) -> None:
    path = tiny("llama")
    with pytest.raises(CapacityError, match="holds no block"):
        LLM(path, **SMALL, **in_shared_memory(tmp_path, memory="1KiB"))
    with pytest.raises(ConfigError, match="cannot be used"):
        LLM(path, **SMALL, **in_shared_memory(tmp_path / "absent"))
    with pytest.raises(CapacityError, match="cannot be had"):
        LLM(path, **SMALL, **in_shared_memory(tmp_path, memory="900TiB"))
    (tmp_path / "table").write_bytes(b"GIF89a" * 900)
    with pytest.raises(ConfigError, match="no store of these blocks"):
        made(tmp_path)
