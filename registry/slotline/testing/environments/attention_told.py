"""Events of blocks for backends that hear of them, in checks that are about something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slotline.registry.contracts.attention import AttentionBatch
from slotline.registry.contracts.block_events import BlockEvents
from slotline.testing.environments.attention_case import NULL_BLOCK


def events_of(
    returned: Sequence[int], given: Sequence[int], restored: Sequence[int], loaded: Sequence[int]
) -> BlockEvents:
    """Return the events of group 0, in ascending order. The hash of a block's prefix is its number."""
    parts = {"returned": returned, "given": given, "restored": restored, "loaded": loaded}
    arrays = {name: np.array(sorted(set(blocks) - {NULL_BLOCK}), np.int64) for name, blocks in parts.items()}
    hashes = tuple(int(block).to_bytes(8, "little") for name in ("restored", "loaded") for block in arrays[name])
    return BlockEvents(group=0, **arrays, hashes=hashes)


class Told:
    """Backend that is told before each plan that all blocks of the batch's requests were returned and loaded again.

    The suite puts keys into its caches itself, which a backend that listens must hear of. Blocks that only new tokens
    lie in are told as given.
    """

    def __init__(self, backend: Any, block_size: int) -> None:
        self._backend, self._size = backend, block_size
        self._held: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def plan(self, batch: AttentionBatch) -> Any:
        """Tell of the batch's blocks, then plan."""
        table, starts = batch.block_table.cpu().numpy(), batch.query_start_loc_cpu
        loaded, given = set[int](), set[int]()
        for request in range(batch.num_requests):
            length = int(batch.seq_lens_cpu[request])
            known = max(0, length - int(starts[request + 1] - starts[request]))
            held = table[request, : -(-length // self._size)].tolist()
            old = -(-known // self._size)
            loaded.update(held[:old])
            given.update(held[old:])
        given -= loaded
        taken = loaded | given
        self._backend.block_events([events_of(sorted(self._held & taken), sorted(given), (), sorted(loaded))])
        self._held |= taken
        return self._backend.plan(batch)
