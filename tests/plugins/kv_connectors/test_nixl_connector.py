"""Blocks in files that NIXL reads and writes, where the package is installed: CI has it."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from kv_tier_engines import PROMPTS, SHORT, SMALL, events_of, on_disk, settled, texts

from slotline.core import LLM
from slotline.plugins.kv_connectors.disk.block_file import SYSTEM_CALLS, Transport, read_block, write_block
from slotline.plugins.kv_connectors.disk.file_reader import HEADER_BYTES
from slotline.plugins.kv_connectors.nixl import probe
from slotline.plugins.kv_connectors.stores.block_store import Fault, Key
from slotline.registry.descriptor import DeviceInfo
from slotline.registry.errors import NegotiationError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96)]
needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs nixl: pip install 'slotline[nixl]'")

Tiny = Callable[..., Path]
KEY = Key(0, b"\xaa")
APIS = ("auto", "uring", "aio", "posix_aio")


@pytest.mark.skipif(find_spec("nixl") is not None, reason="nixl is installed")
def test_without_the_package_it_is_refused_with_the_command_that_installs_it(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(NegotiationError, match=r"pip install 'slotline\[nixl\]'"):
        LLM(tiny("llama"), **SMALL, **on_disk(tmp_path, name="nixl"))


def test_the_probe_asks_for_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotline.plugins.kv_connectors.nixl.find_spec", lambda _: None)
    assert "slotline[nixl]" in probe(DeviceInfo(type="cpu"))


@needs_nixl
def test_blocks_survive_the_engine_and_are_those_of_disk(tiny: Tiny, tmp_path: Path) -> None:
    """One form of files: NIXL's are found by `disk`, and damaged ones are misses."""
    path = tiny("llama")
    want = [list(one.outputs[0].token_ids) for one in LLM(path, **SMALL).generate(PROMPTS, SHORT)]
    llm = LLM(path, **SMALL, **on_disk(tmp_path, name="nixl"))
    every = sum((len(prompt) - 1) // 4 * 4 for prompt in PROMPTS)
    assert texts(llm) == (want, 0)
    assert texts(llm) == (want, every)
    files = sorted(file for file in tmp_path.rglob("*") if file.is_file())
    assert events_of(llm)["saved"] == len(files) > 30
    for file in files[1:3]:
        os.truncate(file, HEADER_BYTES + 7)
    for file in files[3:5]:
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    found, loaded = texts(llm)
    assert found == want
    assert loaded < every
    assert events_of(llm)["truncated"] > 0
    assert events_of(llm)["corrupt"] > 0
    settled(llm)
    assert texts(LLM(path, **SMALL, **on_disk(tmp_path))) == (want, every)


@pytest.fixture(params=APIS)
def transport(request: pytest.FixtureRequest) -> Transport:
    from slotline.plugins.kv_connectors.nixl.files import FileTransfers

    return FileTransfers(request.param)


@needs_nixl
@pytest.mark.parametrize("size", [1, 4096, 300_001])
def test_each_api_moves_the_bytes_that_the_system_moves(transport: Transport, size: int, tmp_path: Path) -> None:
    path, data, into = tmp_path / "0-aa", np.arange(size).astype(np.uint8), np.empty(size, np.uint8)
    write_block(path, KEY, "i", data, fsync=False, transport=transport)
    assert read_block(path, KEY, "i", into, transport=SYSTEM_CALLS) is None
    assert (into == data).all()
    into[:] = 0
    assert read_block(path, KEY, "i", into, transport=transport) is None
    assert (into == data).all()


@needs_nixl
def test_no_wrong_file_is_taken_for_a_block(transport: Transport, tmp_path: Path) -> None:
    path, data, into = tmp_path / "0-aa", np.arange(512).astype(np.uint8), np.empty(512, np.uint8)
    write_block(path, KEY, "i", data, fsync=True, transport=transport)
    good = path.read_bytes()
    for content, fault in (
        (b"", Fault.TRUNCATED),
        (good[:100], Fault.TRUNCATED),
        (good[:-1], Fault.TRUNCATED),
        (good + b"more", Fault.CORRUPT),
        (good[:-1] + b"!", Fault.CORRUPT),
        (b"GIF89a" * 200, Fault.FOREIGN),
    ):
        path.write_bytes(content)
        assert read_block(path, KEY, "i", into, transport=transport) is fault
    path.unlink()
    assert read_block(path, KEY, "i", into, transport=transport) is Fault.MISSING
    path.mkdir()
    with pytest.raises(OSError, match="NIXL"):
        read_block(path, KEY, "i", into, transport=transport)


@needs_nixl
def test_a_full_disk_has_the_number_of_the_system(transport: Transport, tmp_path: Path) -> None:
    before, old = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="large") as raised:
            write_block(tmp_path / "0-aa", KEY, "i", np.zeros(512, np.uint8), fsync=False, transport=transport)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert raised.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())


@needs_nixl
def test_nixl_leaves_our_log_as_it_was_and_writes_none_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    from slotline.plugins.kv_connectors.nixl.files import FileTransfers

    raises = logging.raiseExceptions
    FileTransfers("auto").agent()
    assert not logging.getLogger("slotline").disabled
    assert logging.raiseExceptions == raises
    assert capfd.readouterr().out == ""
