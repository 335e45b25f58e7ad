"""Cascade attention: finds the prefix that all requests of a step share, from the first blocks of their tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.core.model_runner.common_prefixes import CommonPrefixes
from slotline.registry.contracts import CascadeBackend

Int = npt.NDArray[np.int64]


def common_prefix_len(table: npt.NDArray[np.int32], rows: Int, num_computed: Int, block_size: int) -> int:
    """Return the number of tokens in the blocks that all `rows` share at their start and that were computed before.

    The result is a multiple of the block size. If the first blocks differ, only these are compared.

    Args:
        table: [max_requests, max_blocks], block ids by row.
        rows: [n], rows of the step's requests.
        num_computed: [n], tokens that the requests had in the cache before the step.
        block_size: tokens of a block of the table.
    """
    if len(rows) < 2 or not _begin_alike(table, rows):
        return 0
    blocks = int(num_computed.min()) // block_size
    same = (table[rows, :blocks] == table[rows[0], :blocks]).all(axis=0)
    return (blocks if same.all() else int(same.argmin())) * block_size


def _begin_alike(table: npt.NDArray[np.int32], rows: Int) -> bool:
    """Return True if all rows have the same first block."""
    return bool((table[rows, 0] == table[rows[0], 0]).all())


@frozen(eq=False)
class CascadeGroup:
    """A cache group whose layers see all keys, and the backends that serve it."""

    cache: CacheGroup
    kernel_block_size: int
    backends: tuple[CascadeBackend, ...]


class Cascade(CommonPrefixes):
    """Finder of a step's common prefixes. Asks the backends if serving a prefix separately pays.

    Args:
        groups: by cache group. None for groups without cascade attention.
        rows: the request table.
    """

    finds = True

    def __init__(self, groups: Sequence[CascadeGroup | None], rows: RequestTable) -> None:
        super().__init__(len(groups))
        self._groups = tuple(groups)
        self._rows = rows
        self._apart: Int | None = None  # rows of the last step whose first blocks differ

    def of_step(self, schedule: SchedulerOutput) -> tuple[int, ...]:
        """Return the length of the prefix to serve separately in a step, by cache group, or 0."""
        if schedule.rows is self._apart:  # repeated steps pass the same array
            return self.none
        computed = schedule.num_computed - np.maximum(self._rows.num_pending[schedule.rows] - 1, 0)  # at least
        return self.prefixes(schedule.rows, computed, schedule.num_scheduled)

    def prefixes(self, rows: Int, num_computed: Int, num_scheduled: Int) -> tuple[int, ...]:
        """Return the length of the prefix to serve separately in each cache group, or 0."""
        if not any(group is not None and _begin_alike(group.cache.table, rows) for group in self._groups):
            self._apart = rows
            return self.none
        return tuple(
            0 if group is None else self._prefix(group, rows, num_computed, num_scheduled) for group in self._groups
        )

    def longest(self, query_lens: Int, seq_len: int) -> tuple[int, ...]:
        """Return the longest prefixes of a batch of requests of equal length, 0 if the backends would decline."""
        before = seq_len - int(query_lens.max())
        return tuple(
            0
            if group is None
            else _agreed(
                group, before // group.kernel_block_size * group.kernel_block_size, query_lens, seq_len + 0 * query_lens
            )
            for group in self._groups
        )

    def _prefix(self, group: CascadeGroup, rows: Int, num_computed: Int, num_scheduled: Int) -> int:
        length = common_prefix_len(group.cache.table, rows, num_computed, group.kernel_block_size)
        return _agreed(group, length, num_scheduled, num_computed + num_scheduled)


def _agreed(group: CascadeGroup, length: int, query_lens: Int, seq_lens: Int) -> int:
    wanted = length > 0 and all(backend.use_cascade(length, query_lens, seq_lens) for backend in group.backends)
    return length if wanted else 0
