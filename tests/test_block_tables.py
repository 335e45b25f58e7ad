"""Block tables on the device: the rows of a step, and those that changed since the one before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slotline.core.cache.block_tables import DeviceTables, HostTables
from slotline.core.cache.manager import CacheGroup
from slotline.core.execution.staging import staging_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
    staging = staging_for(DEVICE)
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
    from slotline.core.cache.triton_tables import BLOCK, put_rows, take_rows

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
