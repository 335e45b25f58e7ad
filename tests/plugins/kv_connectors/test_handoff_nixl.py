"""Blocks that go from engine to engine by NIXL's plugin UCX, where the package is installed: CI has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from engine_driver import run_all
from handoff_engines import (
    KEY,
    MIXED,
    PREFILL,
    SMALL,
    asked_early,
    connector_of,
    continued,
    decode_settings,
    prefill_all,
    prefilled,
    settled,
    transfers_of,
)

from slotline.core import LLM
from slotline.plugins.kv_connectors.handoff.peer import Identity, Inbox, Peer
from slotline.registry.contracts import CacheBlock
from slotline.registry.errors import ConfigError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96)]
needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs nixl: pip install 'slotline[nixl]'")

Tiny = Callable[..., Path]
BY_NIXL = {f"{KEY}.transport": "nixl"}
SIZE = 300_000


@pytest.mark.skipif(find_spec("nixl") is not None, reason="nixl is installed")
def test_without_the_package_it_is_refused_with_the_command_that_installs_it(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="NIXL cannot be imported") as raised:
        LLM(tiny("llama"), **SMALL, **PREFILL, **BY_NIXL)
    assert raised.value.fix == "pip install 'slotline[nixl]'"


@needs_nixl
def test_the_text_is_one_engines_and_only_the_last_block_is_computed(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = LLM(tiny("llama"), **SMALL, **PREFILL, **BY_NIXL)
    decode = LLM(tiny("llama"), **SMALL, **decode_settings(connector_of(prefill)._server.address), **BY_NIXL)
    want = continued(LLM(tiny("llama"), **SMALL), MIXED, None)
    answer = prefilled(prefill, MIXED)
    assert continued(decode, MIXED, answer) == want
    counts = transfers_of(decode).agreement.counts
    blocks = {tuple(prompt[: 4 * n]) for prompt in MIXED for n in range(1, (len(prompt) - 1) // 4 + 1)}
    assert (counts.loads, counts.lost) == (len(blocks), 0)
    (peer,) = connector_of(decode)._peers.values()
    assert peer._far is not None
    assert not peer.mapped
    for llm in (prefill, decode):
        llm.engine.forget_prefixes()
        settled(llm)
    requests = asked_early(decode, prefill, MIXED[:2])
    prefill_all(prefill, MIXED[:2])
    run_all(decode, 200_000)
    assert [list(request.output_token_ids) for request in requests] == want[:2]
    assert sum(request.metrics.num_loaded_tokens for request in requests) == 32 + 36
    assert transfers_of(decode).agreement.counts.lost == 0
    other = LLM(tiny("llama"), **SMALL, **PREFILL)  # which does not name NIXL
    wrong = LLM(tiny("llama"), **SMALL, **decode_settings(connector_of(other)._server.address), **BY_NIXL)
    assert continued(wrong, MIXED[:1], prefilled(other, MIXED[:1])) == want[:1]
    assert "the peer has no kv_connector.handoff.transport = 'nixl'" in caplog.text
    run_all(wrong)
    settled(wrong)


PROCESS = """
import sys
import time
from slotline.plugins.kv_connectors.handoff.items import Items
from slotline.plugins.kv_connectors.handoff.peer import Identity
from slotline.plugins.kv_connectors.handoff.server import BlockServer
from slotline.plugins.kv_connectors.handoff.store import Store
size = int(sys.argv[1])
store = Store(8 * size, [size])
for key, row in store.take([(0, bytes([n])) for n in range(4)], ()):
    row[:] = 10 + key[1][0]
store.publish([(0, bytes([n])) for n in range(4)])
server = BlockServer(store, Items(1024), ("127.0.0.1", 0), Identity("i"), timeout=2.0, nixl=True)
store.row((0, b"\\x03"))[5] = 1
for row in store._rows_of[0].checksums:
    store._rows_of[0].checksums[row] ^= row == store._rows_of[0].row_of[0, b"\\x03"]
print(server.address[1], flush=True)
time.sleep(600)
"""


def _ended(inbox: Inbox, count: int) -> dict[int, torch.Tensor | None]:
    ended, latest = dict[int, torch.Tensor | None](), time.monotonic() + 30
    while len(ended) < count:
        ended |= {block.block: row for block, row in inbox.take()}
        assert time.monotonic() < latest
        time.sleep(0.005)
    return ended


@needs_nixl
def test_blocks_of_another_process_come_whole_and_its_end_costs_the_blocks_alone() -> None:
    """Another process has four blocks. The checksum of one is wrong, and one that is asked for it does not have."""
    process = subprocess.Popen([sys.executable, "-c", PROCESS, str(SIZE)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        inbox = Inbox()
        peer = Peer(("127.0.0.1", port), identity=Identity("i"), sizes=[SIZE], timeout=2.0, inbox=inbox, nixl=True)
        peer.load([CacheBlock(0, bytes([n]), 20 + n) for n in range(5)])
        rows = _ended(inbox, 5)
        for number in range(3):
            row = rows[20 + number]
            assert row is not None
            assert torch.equal(row, torch.full((SIZE,), 10 + number, dtype=torch.uint8))
        assert rows[23] is None
        assert rows[24] is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        peer.load([CacheBlock(0, b"\0", 30)])
        assert _ended(inbox, 1) == {30: None}
        assert not peer.is_well
        peer.close()
    finally:
        process.kill()
        process.wait()
