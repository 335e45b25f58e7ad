"""A cache whose requests may give up tokens in the middle: slots and logical positions differ from then on.

These classes take the place of the plain ones where an extension declares `frees_tokens`. A row that has freed f tokens
keeps the others in its first slots, in every layer and head its own ones. The token at position p of a later step goes
to slot p - f. Positions themselves, of rotary embeddings for instance, never change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import define, evolve, field, frozen

from slotline.builder.watched_blocks import BlockLog, WatchedGroup, group_maker, listens
from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.core.kv_cache.kv_cache_manager import KVCacheManager
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.planner.plan import Planned
from slotline.registry.contracts import CacheBlock
from slotline.registry.contracts.prefix_groups import StepPrefixes
from slotline.registry.errors import IntegrityError

Int = npt.NDArray[np.int64]


@frozen(eq=False)
class Move:
    """Kernel blocks of a row in one cache group before and after tokens are freed.

    A block may be in both: read all tokens before any is written.

    Attributes:
        sources: [n] int32, the blocks that hold the row's tokens, in order.
        targets: [m] int32, the blocks that the kept tokens belong in, in order. No other request reads them.
    """

    sources: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]


@define(eq=False)
class FreedTokens:
    """Tokens that the rows of an engine have freed, and the way to free more.

    Attributes:
        count: [max_requests] int64, tokens that each row has freed since it began to run. Read only.
        window: last tokens of a prompt that no cached prefix has, as an extension computes them in one step.
        cache: set once the engine's cache is built.
    """

    count: Int
    window: int = field(default=1, init=False)
    cache: FreeingCache | None = field(default=None, init=False)

    def keep(self, row: int, num_computed: int, kept: int) -> list[Move] | None:
        """Keep only `kept` tokens of a row, of those in its slots. Call it between two steps.

        All full blocks of the row are made findable before, if it has freed nothing yet, and they stay as they are for
        others. From then on no block of the row is made findable. Blocks behind the kept tokens go back to the pool.
        The caller moves the contents, in stream order before the next step.

        Args:
            row: a running row.
            num_computed: its tokens whose keys and values have been computed by the steps that were launched.
            kept: tokens to keep, at least 1 and at most those in its slots.

        Returns:
            What to move, by cache group. None, with nothing changed, if others share its blocks and the pool has too
            few for the kept tokens.

        Raises:
            IntegrityError: if so many tokens cannot be kept.
        """
        held = num_computed - int(self.count[row])
        if not 0 < kept <= held:
            raise IntegrityError(f"row {row} holds {held} tokens, and {kept} were to be kept")
        if kept == held:
            return []
        assert self.cache is not None  # set before the first step
        return self.cache.keep(row, num_computed, kept)


class FreeingGroup(CacheGroup):
    """Block tables in which rows may have freed tokens. `capacity` stays a number of tokens by position."""

    def __init__(self, freed: FreedTokens, *given: Any) -> None:
        super().__init__(*given)
        self.freed = freed

    def missing(self, rows: Int, num_tokens: Int) -> Int:
        """See `CacheGroup.missing`."""
        return super().missing(rows, num_tokens - self.freed.count[rows])

    def extend(self, row: int, blocks: Sequence[int]) -> None:
        """See `CacheGroup.extend`."""
        super().extend(row, blocks)
        self._shift(np.array([row]))

    def extend_all(self, rows: Int, counts: Int, blocks: list[int]) -> None:
        """See `CacheGroup.extend_all`."""
        super().extend_all(rows, counts, blocks)
        self._shift(rows)

    def replace(self, row: int, blocks: list[int]) -> None:
        """Put other blocks in the place of a row's. Its freed tokens have been counted."""
        self.table[row, : len(self.blocks[row]) * self.ratio] = 0
        self.table[row, : len(blocks) * self.ratio] = self.kernel_blocks(blocks)
        self.versions[row] += 1
        self.num_replaced += 1
        self.blocks[row] = blocks
        self.num_held[row] = len(blocks)
        self._shift(np.array([row]))

    def clear(self, row: int) -> list[int]:
        """See `CacheGroup.clear`."""
        self.freed.count[row] = 0
        return super().clear(row)

    def restore(self) -> None:
        """See `CacheGroup.restore`."""
        self.freed.count[:] = 0
        super().restore()

    def _shift(self, rows: Int) -> None:
        """Count the capacity of rows that have freed tokens by position."""
        rows = rows[self.freed.count[rows] > 0]
        self.capacity[rows] = self.num_held[rows] * self.block_size + self.freed.count[rows]


class WatchedFreeingGroup(WatchedGroup, FreeingGroup):
    """Block tables in which rows may have freed tokens, and that note which blocks are the group's."""

    def replace(self, row: int, blocks: list[int]) -> None:
        """See `FreeingGroup.replace`."""
        self.log.owners.update(dict.fromkeys(blocks, self.index))
        super().replace(row, blocks)
        self.log.move(blocks)


class FreeingCache(KVCacheManager):
    """Manager of a cache whose rows may free tokens."""

    def __init__(self, freed: FreedTokens, rows: RequestTable, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.freed = freed
        freed.cache = self
        self._table = rows

    def find_prefix(self, request: Request, token_ids: npt.NDArray[np.int32]) -> tuple[int, list[list[int]]]:
        """Find the longest cached prefix within the prompt, see `KVCacheManager.find_prefix`.

        A request that was preempted computes its prompt up to the end, where tokens may be freed again. What follows
        was computed without the freed tokens, and so it is again.
        """
        end = max(1, len(request.prompt_token_ids) + 1 - self.freed.window)
        return super().find_prefix(request, token_ids[:end])

    def commit(self, rows: RequestTable, changed: Int, after: Int) -> None:
        """See `KVCacheManager.commit`. Blocks of rows that have freed tokens hold no prefix."""
        whole = self.freed.count[changed] == 0
        if not whole.all():
            changed, after = changed[whole], after[whole]
        super().commit(rows, changed, after)

    def forget(self, row: int) -> None:
        """Make the blocks of a row with wrong keys or values unfindable, those that it had before too."""
        if self.freed.count[row]:
            for group in self._freeing():
                known = self._own_hashes(group, row)
                found = ((one, self.pool.lookup(group.index, one)) for one in known)
                self.pool.drop([CacheBlock(group.index, one, block) for one, block in found if block is not None])
        super().forget(row)

    def keep(self, row: int, num_computed: int, kept: int) -> list[Move] | None:
        """See `FreedTokens.keep`."""
        first = not self.freed.count[row]
        if first and self.prefix_caching:
            self._rows = self._table
            self._full[row] = num_computed // self.hash_block_size
            self._remember_full(np.array([row]))
        groups = self._freeing()
        needed = [group.spec.blocks_needed(kept) for group in groups]
        own = [self._own_targets(group, row, findable=False, first=first) for group in groups]
        if self._lacking(needed, own) > self.pool.num_free:
            own = [self._own_targets(group, row, findable=True, first=first) for group in groups]
        if self._lacking(needed, own) > self.pool.num_free:
            return None
        held = num_computed - int(self.freed.count[row])
        before = [group.blocks[row] for group in groups]
        self.freed.count[row] += held - kept
        moves: list[Move] = []
        for group, had, count, targets in zip(groups, before, needed, own, strict=True):
            targets = targets[:count]
            self.pool.forget(targets)
            targets += self.pool.allocate(count - len(targets), self.extensions.block_evicted)
            sources = group.kernel_blocks(had[: group.spec.blocks_needed(held)])
            group.replace(row, targets)
            staying = set(targets)
            self.pool.release([block for block in had if block not in staying])
            moves.append(Move(sources, group.kernel_blocks(targets)))
        self._full[row] = self._findable[row]
        return moves

    def _freeing(self) -> list[FreeingGroup]:
        """Return the cache groups, all of which are of this kind."""
        return [group for group in self.groups if isinstance(group, FreeingGroup)]

    @staticmethod
    def _lacking(needed: Sequence[int], own: Sequence[list[int]]) -> int:
        """Return the blocks that the pool must give."""
        return sum(max(0, count - len(blocks)) for count, blocks in zip(needed, own, strict=True))

    def _own_targets(self, group: FreeingGroup, row: int, *, findable: bool, first: bool) -> list[int]:
        """Return the row's blocks that may be written to: nobody else holds them.

        Args:
            findable: whether cached blocks are among them, which are lost for others then. They come last.
            first: whether the row has freed nothing yet. Later on it has no cached blocks.
        """
        alone = [block for block in group.blocks[row] if self.pool.ref_count[block] == 1]
        if not first or not self.prefix_caching:
            return alone
        known = zip(group.blocks[row], self._own_hashes(group, row), strict=False)
        cached = {block for block, one in known if self.pool.lookup(group.index, one) == block}
        return [b for b in alone if b not in cached] + [b for b in alone if b in cached and findable]

    def _own_hashes(self, group: FreeingGroup, row: int) -> list[bytes]:
        """Return the hashes of a row's whole blocks, as far as they have been made."""
        step = group.block_size // self.hash_block_size
        return self._table.request(row).block_hashes[step - 1 :: step]


class ShiftedInputs:
    """Inputs of steps in which rows have freed tokens. It is a `GatherShortcut`, and gathers each of them anew."""

    def __init__(self, freed: FreedTokens, preparer: InputPreparer) -> None:
        self._count, self._preparer = freed.count, preparer

    def next(
        self, schedule: SchedulerOutput, shape: GraphShape | None, prefixes: StepPrefixes | None, variant: int
    ) -> ModelInputs | None:
        """Return the inputs of a step, or None if none of its rows has freed tokens.

        Attention gets slots and lengths by what is kept. Everybody else gets positions and lengths of whole sequences.
        """
        if not self._count[schedule.rows].any():
            return None
        preparer = self._preparer
        whole = preparer.batch(schedule, prefixes, variant)
        kept = whole.seq_lens - self._count[schedule.rows]
        places = whole.positions - self._count[whole.token_rows]
        batch = evolve(
            whole,
            seq_lens=kept,
            slots=[
                preparer.slots(group, size, whole.token_rows, places)
                for group, size in zip(preparer.groups, preparer.kernel_block_sizes, strict=True)
            ],
            max_seq_len=int(kept.max()),
        )
        inputs = preparer.assembler.assemble(batch, shape)
        padding = (0, len(inputs.seq_lens_cpu) - len(kept))
        return evolve(inputs, seq_lens_cpu=np.pad(whole.seq_lens32, padding))

    def keep(self, schedule: SchedulerOutput, inputs: ModelInputs, prefixes: StepPrefixes | None, variant: int) -> None:
        """Do nothing."""


def freed_tokens(groups: Sequence[CacheGroup]) -> FreedTokens | None:
    """Return what the cache groups of an engine share, None if nobody frees tokens."""
    return next((group.freed for group in groups if isinstance(group, FreeingGroup)), None)


def table_maker(planned: Planned, rows: RequestTable) -> Callable[..., CacheGroup]:
    """Return the function that makes the cache groups of a plan."""
    if all(carrier.name != "freed_tokens" for carrier in planned.carriers):
        return group_maker(planned)
    freed = FreedTokens(np.zeros(rows.max_requests, np.int64))
    if listens(planned):
        return partial(WatchedFreeingGroup, BlockLog(), freed)
    return partial(FreeingGroup, freed)


def cache_maker(groups: Sequence[CacheGroup], rows: RequestTable) -> Callable[..., KVCacheManager]:
    """Return the function that makes the manager of a plan's cache."""
    freed = freed_tokens(groups)
    return KVCacheManager if freed is None else partial(FreeingCache, freed, rows)
