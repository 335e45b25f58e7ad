"""Block tables on the device: the rows of a step, and those that changed since the one before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import transfer_buffer_for

from slotline.core.batch.request_table import RequestTable
from slotline.core.kv_cache.block_pool import BlockPool
from slotline.core.kv_cache.block_table import DeviceTables, HostTables
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.core.kv_cache.kv_cache_manager import KVCacheManager

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Holding(RequestTable):
    """Rows that are all held by something."""

    def __init__(self, max_requests: int, max_model_len: int) -> None:
        super().__init__(max_requests, max_model_len)
        self.requests = [object()] * max_requests  # type: ignore[list-item]


class Blocks:
    """A cache spec of blocks of four tokens."""

    def blocks_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // 4)

    def max_blocks_held(self) -> int:
        return 1 << 20

    def blocks_freeable(self, num_computed_tokens: int) -> int:
        return 0


def group(index: int, max_model_len: int) -> CacheGroup:
    return CacheGroup(index, Blocks(), 4, 4, 5, max_model_len)  # type: ignore[arg-type]


@pytest.mark.behaviour(22)
def test_a_device_has_the_tables_of_the_host_after_each_change() -> None:
    groups, sizes = [group(0, 40), group(1, 4_400)], [4, 4]
    staging = transfer_buffer_for(DEVICE)
    device, host = DeviceTables(groups, sizes, staging, DEVICE), HostTables(groups, sizes)
    staging.reserve(device.num_bytes)
    rng = np.random.default_rng(0)
    for step in range(40):
        for one in groups:
            for row in rng.permutation(5)[: rng.integers(0, 4)].tolist():
                if len(one.blocks[row]) + 3 > one.table.shape[1] or rng.random() < 0.2:
                    one.clear(row)
                else:
                    one.extend(row, rng.integers(1, 1000, rng.integers(1, 4)).tolist())
        rows = np.append(rng.permutation(5)[: rng.integers(0, 6)], 5)  # the null row behind them
        longest = 40 if step % 2 else int(rng.integers(1, 41))
        staging.begin()
        for tables in (device, host):
            tables.stage(rows)
        staging.flush()
        for found, expected in zip(device.take(longest), host.take(longest), strict=True):
            assert found.cpu().equal(expected)


def test_the_kernels_move_whole_rows() -> None:
    pytest.importorskip("triton", reason="the kernels are Triton's")
    from slotline.backends.cuda.triton_tables import BLOCK, put_rows, take_rows

    table = torch.arange(7 * (BLOCK + 5), dtype=torch.int32, device=DEVICE).view(7, -1)
    rows = torch.tensor([6, 0, 3], device=DEVICE)
    out = torch.full((4, BLOCK + 5), -1, dtype=torch.int32, device=DEVICE)
    take_rows(table, rows, out)
    assert out[:3].equal(table[rows])
    assert bool((out[3] == -1).all())
    expected = table.clone().index_copy_(0, rows, -out[:3])
    put_rows(table, rows, -out[:3])
    assert table.equal(expected)
    take_rows(table, rows[:0], out)
    put_rows(table, rows[:0], out[:0])
    assert table.equal(expected)


@pytest.mark.parametrize("kernel_block_size", [4, 2])
def test_rows_that_grow_together_get_the_blocks_that_each_would_get(kernel_block_size: int) -> None:
    def manager() -> KVCacheManager:
        spec: Any = Blocks()
        groups = [CacheGroup(i, spec, 4, kernel_block_size, 6, length) for i, length in ((0, 64), (1, 40))]
        return KVCacheManager(BlockPool(60), groups, prefix_caching=False)

    together, alone = manager(), manager()
    rng, lengths, refused = np.random.default_rng(1), np.zeros(6, np.int64), 0
    for _ in range(60):
        rows = np.sort(rng.permutation(6)[: rng.integers(1, 7)])
        asked = np.minimum(lengths[rows] + rng.integers(0, 5, len(rows)), 40)  # of one block mostly, of none or two
        free, seen = together.pool.num_free, [group.versions.copy() for group in together.groups]
        before = [group.table.copy() for group in together.groups]
        if not together.try_grow_all(rows, asked):
            refused += 1
            assert together.pool.num_free == free
            assert all(
                group.table.tolist() == table.tolist() for group, table in zip(together.groups, before, strict=True)
            )
            for one in (together, alone):
                one.release(int(rows[0]))
            lengths[rows[0]] = 0
            continue
        lengths[rows] = asked
        for row, count in zip(rows.tolist(), asked.tolist(), strict=True):
            assert alone.try_grow(row, count)
        for mine, other, table, versions in zip(together.groups, alone.groups, before, seen, strict=True):
            assert list(map(len, mine.blocks)) == list(map(len, other.blocks))
            assert mine.capacity.tolist() == other.capacity.tolist()
            changed = (mine.table != table).any(axis=1)
            assert (mine.versions > versions)[changed].all()
        assert together.pool.num_free == alone.pool.num_free
        together.check(Holding(6, 64))
    assert refused > 3
