"""Blocks in files: they survive the process, and no damage of a file becomes a wrong text."""

from __future__ import annotations

import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from engine_driver import add, random_prompts, run_all
from kv_tier_engines import PROMPTS, SHORT, SMALL, connector_of, events_of, on_disk, settled, texts
from repository import ROOT

from slotline.core import LLM, AsyncLLM, SamplingParams
from slotline.plugins.kv_connectors.disk.block_file import read_block, write_block
from slotline.plugins.kv_connectors.disk.file_reader import HEADER_BYTES
from slotline.plugins.kv_connectors.disk.store import DiskStore
from slotline.plugins.kv_connectors.stores.block_store import Counts, Fault, Key
from slotline.plugins.kv_connectors.stores.codecs import Int8Codes
from slotline.plugins.kv_connectors.stores.pace import Pace
from slotline.registry.errors import CapacityError, ConfigError
from slotline.server.metrics import Metrics

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96, 161)]

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
SIZE = 512


def block_files(folder: Path) -> list[Path]:
    """The files of blocks, in order."""
    return sorted(one for one in folder.rglob("*") if one.is_file())


@pytest.fixture(scope="module")
def want(tiny: Tiny) -> list[list[int]]:
    outputs = LLM(tiny("llama"), **SMALL).generate(PROMPTS, SHORT)
    return [list(one.outputs[0].token_ids) for one in outputs]


def test_blocks_survive_the_engine_and_belong_to_one_model(tiny: Tiny, want: list[list[int]], tmp_path: Path) -> None:
    """Other weights in the same folder of the same name are another model."""
    path = tiny("llama")
    first = LLM(path, **SMALL, **on_disk(tmp_path))
    assert texts(first) == (want, 0)
    assert events_of(first)["saved"] == len(block_files(tmp_path)) > 30
    settled(first)
    second = LLM(path, **SMALL, **on_disk(tmp_path))
    tokens, loaded = texts(second)
    assert tokens == want
    assert loaded == sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
    settled(second)
    assert texts(LLM(tiny("llama_deep"), **SMALL, **on_disk(tmp_path)))[1] == 0
    changed = tmp_path / "changed"
    copytree(path, changed)
    size = (weights := next(changed.glob("*.safetensors"))).stat().st_size
    found = LLM(changed, **SMALL, **on_disk(tmp_path))
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    assert weights.stat().st_size == size
    other = LLM(changed, **SMALL, **on_disk(tmp_path))
    assert len({connector_of(one)._store.identity for one in (second, found, other)}) == 3


def test_blocks_of_before_a_reset_are_found_by_nobody_who_has_other_weights(
    tiny: Tiny, want: list[list[int]], tmp_path: Path
) -> None:
    path = tiny("llama")
    first = LLM(path, **SMALL, **on_disk(tmp_path))
    texts(first)
    first.engine.forget_prefixes()
    assert texts(first) == (want, 0)
    assert texts(first)[1] > 0
    later = random_prompts([30], seed=99)
    texts(first, later)
    assert texts(LLM(path, **SMALL, **on_disk(tmp_path)), later)[1] == 0


def _flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


def _other_version(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[8:12] = (7).to_bytes(4, "little")
    file.write_bytes(data)


def _swapped(file: Path) -> None:
    other = next(one for one in block_files(file.parent) if one != file)
    file.write_bytes(other.read_bytes())


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a byte of the block is wrong": (lambda file: _flip(file, HEADER_BYTES + 5), "corrupt"),
    "a byte of the checksum is wrong": (lambda file: _flip(file, 13), "corrupt"),
    "the file is cut": (lambda file: os.truncate(file, HEADER_BYTES + 7), "truncated"),
    "the file is empty": (lambda file: os.truncate(file, 0), "truncated"),
    "the file has more bytes": (lambda file: file.write_bytes(file.read_bytes() + b"more"), "corrupt"),
    "the file is of another program": (lambda file: file.write_bytes(b"GIF89a" * 900), "foreign"),
    "the file is of another version": (_other_version, "other_version"),
    "the file holds another block": (_swapped, "foreign"),
    "the file has been removed": (Path.unlink, "missing"),
    "the file cannot be read": (lambda file: (file.unlink(), file.mkdir()), "unreadable"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_is_a_miss_counted_and_said_once(
    what: str, want: list[list[int]], disk: LLM, disk_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage, event = DAMAGE[what]
    assert texts(disk)[0] == want
    before = events_of(disk).get(event, 0)
    files = [one for one in block_files(disk_folder) if connector_of(disk)._store.identity in str(one)]
    for file in files[1:4]:
        damage(file)
    with caplog.at_level(logging.WARNING, "slotline"):
        found, loaded = texts(disk)
    assert found == want
    assert events_of(disk)[event] > before
    assert sum(f"counted as {event!r}" in one.message for one in caplog.records) <= 1
    assert loaded < sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
    disk.engine.forget_prefixes()
    settled(disk)


@pytest.fixture(scope="module")
def disk_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def disk(tiny: Tiny, disk_folder: Path) -> LLM:
    return LLM(tiny("llama"), **SMALL, **on_disk(disk_folder))


@contextmanager
def full_disk() -> Iterator[None]:
    """The system refuses files of more than 100 bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)


def test_a_full_disk_stops_saving_and_no_request(disk: LLM, disk_folder: Path, want: list[list[int]]) -> None:
    disk.engine.forget_prefixes()
    before = len(block_files(disk_folder))
    with full_disk():
        assert texts(disk) == (want, 0)
    assert len(block_files(disk_folder)) == before  # nothing unfinished either
    assert events_of(disk)["disk_full"] >= 1
    assert texts(disk) == (want, 0)
    assert events_of(disk)["skipped_full"] > 0
    connector_of(disk)._store._full_until = 0.0  # half a minute later
    texts(disk)
    assert texts(disk)[1] > 0


def test_a_read_that_hangs_gives_its_request_back(tiny: Tiny, want: list[list[int]], tmp_path: Path) -> None:
    """A named pipe in place of a file is opened only once somebody writes to it."""
    llm = LLM(tiny("llama"), **SMALL, **on_disk(tmp_path, threads=1), **{"kv_connector.load_timeout": 0.2})
    texts(llm)
    files = block_files(tmp_path)
    pipes = files[: len(files) // 2]
    for file in pipes:
        file.unlink()
        os.mkfifo(file)
    llm.engine.scheduler.cache.pool.reset()
    hangs = [add(llm, f"{i}", prompt, SHORT) for i, prompt in enumerate(PROMPTS[:2])]
    run_all(llm)
    assert [one.output_token_ids for one in hangs] == want[:2]
    assert events_of(llm)["late"] > 0
    assert llm.engine.extension("kv_transfer").held_blocks()  # the store might still write them
    for file in pipes:  # who opens them, as long as somebody reads, ends the wait
        handle = os.open(file, os.O_RDWR | os.O_NONBLOCK)
        time.sleep(0.05)
        os.close(handle)
        file.unlink(missing_ok=True)
    settled(llm)
    assert not llm.engine.extension("kv_transfer").held_blocks()
    assert texts(llm)[0] == want


def test_threads_read_once_a_process_that_reads_has_ended(
    tiny: Tiny, want: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is killed with reads under way, and no token is lost."""
    llm = LLM(tiny("llama"), **SMALL, **on_disk(tmp_path))
    texts(llm)
    assert texts(llm)[1] > 0
    processes = connector_of(llm)._readers._processes
    (process,) = [one._process for one in processes.values()]
    assert process.poll() is None
    process.send_signal(signal.SIGSTOP)
    llm.engine.scheduler.cache.pool.reset()
    waits = [add(llm, f"{i}", prompt, SHORT) for i, prompt in enumerate(PROMPTS[:2])]
    for _ in range(4):
        llm.engine.step()
    assert connector_of(llm)._asked
    process.kill()
    run_all(llm)
    assert [one.output_token_ids for one in waits] == want[:2]
    assert waits[0].metrics.num_loaded_tokens == 32
    assert events_of(llm)["no_reader"] == 1
    assert "threads of this one read" in caplog.text
    assert texts(llm)[0] == want
    settled(llm)


def test_processes_end_with_their_connector(tiny: Tiny, tmp_path: Path) -> None:
    llm = LLM(tiny("llama"), **SMALL, **on_disk(tmp_path))
    texts(llm, PROMPTS[:1])
    assert texts(llm, PROMPTS[:1])[1] == 32
    readers = connector_of(llm)._readers
    (process,) = [one._process for one in readers._processes.values()]
    readers._lose("is not needed any more", "a test")
    assert process.poll() is not None
    threads = LLM(tiny("llama"), **SMALL, **on_disk(tmp_path, readers="threads"))
    assert texts(threads, PROMPTS[:1])[1] == 32
    assert connector_of(threads)._readers is None


def test_a_step_beside_loads_copies_no_more_than_its_part(disk: LLM, want: list[list[int]]) -> None:
    """Beside a request that decodes, blocks are copied one by one, and their steps are those of the process beside."""
    disk.engine.forget_prefixes()
    texts(disk)
    disk.engine.scheduler.cache.pool.reset()
    connector, copied, number = connector_of(disk), list[int | None](), 0
    copy_read = connector._copy_read

    def noted(most: int | None) -> None:
        copied.append(most)
        copy_read(most)

    connector._copy_read = noted
    try:
        waits = None
        while waits is None or not waits.output_token_ids:
            if not any(one.request_id.startswith("runs") for one in disk.engine.scheduler.running):
                number += 1
                add(disk, f"runs {number}", [7, 8, 9], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
            disk.engine.step()
            waits = waits or add(disk, "waits", PROMPTS[0], SHORT)
        run_all(disk)
    finally:
        del connector._copy_read
    assert waits.output_token_ids == want[0]
    assert waits.metrics.num_loaded_tokens == 32
    assert set(copied) == {1}
    assert True in connector._readers._processes
    settled(disk)


def test_loads_get_their_part_of_the_work_between_polls_and_owe_what_they_took_beyond() -> None:
    def work(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    pace = Pace()
    pace.begin(None)
    assert not pace.beside
    assert pace.is_left  # nobody runs
    pace.end()
    pace.launched()
    work(0.02)
    pace.begin(None)
    assert pace.beside
    assert pace.is_left
    work(0.001)  # five times its part
    assert not pace.is_left
    pace.end()
    pace.launched()
    work(0.005)
    pace.begin(None)
    assert not pace.is_left
    pace.end()
    pace.launched()
    work(0.005)
    pace.begin(time.perf_counter() - 1000.0)  # an old load gets more
    assert pace.is_left
    pace.end()
    pace.begin(None)
    assert pace.is_left


def test_no_more_blocks_are_under_way_than_allowed(tiny: Tiny, want: list[list[int]], tmp_path: Path) -> None:
    llm = LLM(tiny("llama"), **SMALL, **on_disk(tmp_path), **{"kv_connector.max_loads": 3})
    texts(llm)
    found, loaded = texts(llm, [PROMPTS[0]])
    assert found == want[:1]
    assert loaded == 12


def test_the_files_keep_to_their_size(tiny: Tiny, want: list[list[int]], tmp_path: Path) -> None:
    size = LLM(tiny("llama"), **SMALL, **on_disk(tmp_path / "other")).plan.pool.block_bytes + HEADER_BYTES
    llm = LLM(tiny("llama"), **SMALL, **on_disk(tmp_path, size=f"{20 * size // 1024}KiB"))
    for _ in range(3):
        assert texts(llm)[0] == want
    total = sum(file.stat().st_size for file in block_files(tmp_path))
    assert 10 * size < total <= 20 * size
    assert events_of(llm)["evicted"] > 0
    settled(llm)


def store(folder: Path, size: str = "1MiB", identity: str = "i") -> DiskStore:
    """A store of blocks of `SIZE` bytes."""
    return DiskStore(str(folder), identity, [SIZE], size, Counts("test"))


def saved(one: DiskStore, names: list[bytes]) -> None:
    """Have a store keep blocks whose bytes are those of their names."""
    keys = [Key(0, name) for name in names]
    for ticket in one.reserve(keys, ()):
        assert ticket is not None
        data = np.resize(np.frombuffer(ticket.key.block_hash, np.uint8), SIZE)
        one.settle(ticket, written=one.write(ticket, data))


def test_the_least_recently_used_of_any_model_makes_way(tmp_path: Path) -> None:
    first = store(tmp_path, identity="another model")
    saved(first, [b"old"])
    os.utime(block_files(tmp_path)[0], (1.0, 1.0))
    second = store(tmp_path, f"{4 * (SIZE + HEADER_BYTES) / 1024}KiB")
    saved(second, [b"a", b"b", b"c"])
    second.used([Key(0, b"a")])
    saved(second, [b"d"])
    assert first.read(Key(0, b"old"), np.empty(SIZE, np.uint8)) is Fault.MISSING
    saved(second, [b"e"])
    assert second.held([Key(0, name) for name in (b"a", b"b", b"c", b"d", b"e")]) == [True, False, True, True, True]
    assert second.reserve([Key(0, b"f")], [Key(0, name) for name in (b"a", b"c", b"d", b"e")]) == [None]


def test_another_process_finds_new_files_and_misses_old_ones(tmp_path: Path) -> None:
    first, second = store(tmp_path), store(tmp_path)
    saved(first, [b"a", b"b"])
    assert second.held([Key(0, b"a")]) == [False]
    second._next_scan = 0.0
    second.refresh()
    while second._scans.under_way:
        second.refresh()
    assert second.held([Key(0, b"a"), Key(0, b"b")]) == [True, True]
    block_files(tmp_path)[0].unlink()
    second._next_scan = 0.0
    second.refresh()
    while second._scans.under_way:
        second.refresh()
    assert second.held([Key(0, b"a"), Key(0, b"b")]).count(True) == 1


def test_a_killed_process_leaves_whole_files_and_nothing_else(tmp_path: Path) -> None:
    for seconds in (0.02, 0.05, 0.08):
        child = os.fork()
        if not child:
            one, number = store(tmp_path, "64MiB"), 0
            while True:
                saved(one, [number.to_bytes(4, "big")])
                number += 1
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    (tmp_path / "v1" / "i" / ".0-00.999999999.1.tmp").write_bytes(b"half")
    again = store(tmp_path, "64MiB")
    assert not [file for file in block_files(tmp_path) if file.suffix == ".tmp"]
    keys = [Key(0, bytes.fromhex(file.name[2:])) for file in block_files(tmp_path)]
    assert keys
    for key in keys:
        data = np.empty(SIZE, np.uint8)
        assert again.read(key, data) is None
        assert data.tobytes() == np.resize(np.frombuffer(key.block_hash, np.uint8), SIZE).tobytes()


def test_every_wrong_byte_of_a_file_is_found(tmp_path: Path) -> None:
    path, data, key = tmp_path / "0-aa", np.arange(SIZE).astype(np.uint8), Key(0, b"\xaa")
    write_block(path, key, "i", data, fsync=True)
    good, into = path.read_bytes(), np.empty(SIZE, np.uint8)
    assert read_block(path, key, "i", into) is None
    assert (into == data).all()
    for at in range(0, len(good), 3):
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
        assert read_block(path, key, "i", into) is not None, at
    for size in range(0, len(good), 31):
        path.write_bytes(good[:size])
        assert read_block(path, key, "i", into) is not None, size


def test_wrong_options_are_refused_with_a_remedy(tiny: Tiny, tmp_path: Path) -> None:
    path = tiny("llama")
    with pytest.raises(CapacityError, match="holds no block"):
        LLM(path, **SMALL, **on_disk(tmp_path, size="1KiB"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        LLM(path, **SMALL, **on_disk(tmp_path / "file"))
    with pytest.raises(ConfigError, match="threads"):
        LLM(path, **SMALL, **on_disk(tmp_path, threads=0))


def test_events_are_in_the_metrics(tiny: Tiny, tmp_path: Path) -> None:
    llm = AsyncLLM(tiny("llama"), **SMALL, **on_disk(tmp_path))
    llm.front.add("a", PROMPTS[0], SHORT)
    while llm.front.has_work:
        llm.front.step()
    connector_of(llm).flush(20.0)
    lines = [one for one in Metrics(llm, "m").text().decode().splitlines() if 'event="saved"' in one]
    assert len(lines) == 1
    assert lines[0].startswith("slotline:kv_connector_events_total")
    assert float(lines[0].split()[-1]) == len(block_files(tmp_path))


def test_eight_bits_are_kept_apart_from_whole_numbers_and_said_in_the_plan(tiny: Tiny, tmp_path: Path) -> None:
    path = tiny("llama")
    first = LLM(path, **SMALL, **on_disk(tmp_path))
    texts(first, PROMPTS[:1])
    whole = block_files(tmp_path)[0].stat().st_size - HEADER_BYTES
    llm = LLM(path, **SMALL, **on_disk(tmp_path, codec="int8"))
    assert "keys and values are kept in eight bits" in " ".join(llm.plan.explain().split())
    assert "eight bits" not in first.plan.explain()
    assert texts(llm, PROMPTS[:1])[1] == 0
    assert texts(llm, PROMPTS[:1])[1] == 32
    sizes = {file.stat().st_size - HEADER_BYTES for file in block_files(tmp_path)}
    width = llm.engine.runner.model.facts.layers[0].head_size
    assert sizes == {whole, whole // 4 * (width + 4) // width}
    assert texts(first, PROMPTS[:1])[1] == 32
    settled(llm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eight_bits_are_off_by_half_a_step_of_their_vector_at_most(dtype: torch.dtype) -> None:
    vectors = torch.randn(40, 16, generator=torch.manual_seed(1)) * torch.logspace(-3, 2, 40)[:, None]
    vectors[3] = 0.0
    row = vectors.to(dtype).view(torch.uint8).flatten().numpy()
    codec = Int8Codes([16], [dtype], [40 * 20])
    stored = codec.encode(0, row)
    assert stored is not None
    assert len(stored) == codec.sizes[0]
    back = np.empty_like(row)
    codec.decode(0, stored, back)
    found, old = (torch.from_numpy(one).view(dtype).view(40, 16).float() for one in (back, row))
    largest = old.abs().amax(1, keepdim=True)
    rounding = largest * torch.finfo(dtype).eps
    assert ((found - old).abs() <= largest / 127 * 0.5001 + rounding).all()
    assert not torch.equal(found, old)
    row[:] = torch.full((40, 16), float("inf"), dtype=dtype).view(torch.uint8).flatten().numpy()
    assert codec.encode(0, row) is None


def test_eight_bits_are_refused_for_caches_of_another_form(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not plain keys and values"):
        LLM(tiny("deepseek_v2"), **SMALL, **on_disk(tmp_path, codec="int8"))
    with pytest.raises(ConfigError, match=r"not plain keys and values|dtype int8"):
        LLM(tiny("llama"), **SMALL, **on_disk(tmp_path, codec="int8"), **{"cache.dtype": "int8"})


def test_the_page_has_each_fault_with_its_count() -> None:
    page = (ROOT / "docs" / "kv-tiers.md").read_text(encoding="utf-8")
    assert [what for what, (_, event) in DAMAGE.items() if f"| {what} | `{event}` |" not in page] == []
