"""Checkpoints: copies of states at the ends of prefixes, from which a request can resume as from cached blocks.

A state is overwritten in place: it can be copied only when a request has computed exactly a prefix. The scheduler
therefore ends a request's tokens in a step where the state cache specs want a checkpoint (`StateSpec.stops`). Before
the next step, the states at these places (`StateSpec.keeps`) are copied into slots that no row owns.

A slot belongs either to its row or to the checkpoints. A state is always copied between the two. The tokens covered by
the state in each slot are counted separately from the rows, so that the integrity checker can compare both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from attrs import define

from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.plugins.states.batches import StateBatches
from slotline.plugins.states.rules import StateRules
from slotline.registry.contracts import BlockHash
from slotline.registry.contracts.kv_spec import UNDIVIDED
from slotline.registry.errors import ContractError, IntegrityError

Int = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

MOST_SEEN = 1 << 16
"""Number of prefixes remembered to find where requests diverge. With units of 16 tokens they cover a million tokens."""


class States(Protocol):
    """Operations on the states themselves. See `StateDispatcher`."""

    @property
    def num_slots(self) -> int:
        """Return the number of slots."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Copy a slot in every layer."""
        ...

    def commit(self, rows: Int, accepted: Int) -> None:
        """Set the states to those after the accepted tokens. Rows of -1 are skipped."""
        ...


@define
class CheckpointCounts:
    """Counts over a run: states that were kept, restored, and evicted for newer ones."""

    kept: int = 0
    restored: int = 0
    evicted: int = 0


class StateStore(Protocol):
    """Other place where states are kept by the hashes of their prefixes, from which they are loaded into a slot."""

    def find_states(self, request: Request, hashes: Sequence[BlockHash]) -> Collection[BlockHash]:
        """Return those of `hashes` whose state can be loaded for a request."""
        ...

    def load_state(self, slot: int, block_hash: BlockHash) -> None:
        """Begin to load a state into a slot, see `Checkpoints.loaded`."""
        ...

    def state_kept(self, slot: int, block_hash: BlockHash) -> None:
        """Note a state that has been kept in a slot."""
        ...


class Checkpoints:
    """Slots of the kept states, and the choice of where the next checkpoints are taken.

    Args:
        rows: the request table. The rows' slots come first.
        states: the state memory. Slots after those of the rows are for checkpoints.
        unit: tokens. Checkpoints are at multiples of it.
        rules: of the cache specs that hold the states.
        names: of these specs, for messages.
        batches: hold the accepted tokens of rows for the next step's batch.

    Attributes:
        lengths: [num_slots] int64, tokens that the state in each slot covers, counted step by step.
        prefixes: [num_slots] int64, tokens of the prefix by which each checkpoint is found.
        counts: see `CheckpointCounts`.
        num_accepted: as in `StateBatches`.
        store: another place where states are kept. None for no other.
    """

    def __init__(
        self,
        rows: RequestTable,
        states: States,
        unit: int,
        rules: StateRules,
        names: Sequence[str] = (),
        batches: StateBatches | None = None,
    ) -> None:
        num_slots = states.num_slots
        self.rows = rows
        self.unit = unit
        self.rules = rules
        self._names = tuple(names)
        self.lengths = np.zeros(num_slots, np.int64)
        self.counts = CheckpointCounts()
        self.prefixes = np.zeros(num_slots, np.int64)
        self.num_accepted = (batches or StateBatches(rows)).num_accepted
        self._states = states
        self._free = list(range(num_slots - 1, rows.max_requests - 1, -1))
        self._slot_of: OrderedDict[BlockHash, int] = OrderedDict()  # least recently used first
        self.store: StateStore | None = None
        self._loading: dict[int, set[int]] = {}  # by slot that is being written, the rows that wait for its state
        self._held: dict[int, int] = {}  # by slot, the readers of its state outside of the device's order
        self._seen: OrderedDict[BlockHash, None] = OrderedDict()
        # By row, in tokens: positions where a step is to end (UNDIVIDED if it may not be cut), and the last copied
        # position.
        self._last = np.full(rows.max_requests, UNDIVIDED, np.int64)
        self._branch = np.full(rows.max_requests, UNDIVIDED, np.int64)
        self._kept = np.zeros(rows.max_requests, np.int64)

    @property
    def num_slots(self) -> int:
        """Return the number of slots for checkpoints."""
        return len(self.lengths) - self.rows.max_requests

    def find(self, hashes: Sequence[BlockHash], request: Request | None = None) -> int:
        """Return the longest prefix, in units, whose state is kept, or can be loaded from another place.

        Args:
            hashes: of whole units, from the first on.
            request: whose prefixes they are. None to look nowhere else.

        Raises:
            ContractError: if a cache spec answers with a prefix that is not kept.
        """
        there: Collection[BlockHash] = ()
        if self.store is not None and request is not None and self._has_room:
            there = self.store.find_states(request, [one for one in hashes if one not in self._slot_of])
        hit = self.rules.prefix_hit(hashes, lambda one: one in self._slot_of or one in there)
        if hit and not (0 < hit <= len(hashes) and (hashes[hit - 1] in self._slot_of or hashes[hit - 1] in there)):
            raise self._unfit(f"goes on from a prefix of {hit} units, whose state is not kept")
        return hit

    def aim(self, row: int, hashes: Sequence[BlockHash], hit: int, count: int, *, divisible: bool) -> int:
        """Choose where a request leaves checkpoints, and cut its first `count` tokens accordingly.

        Args:
            row: the request's row.
            hashes: of the whole units of its tokens, without the last token.
            hit: number of leading tokens that are not computed again.
            count: tokens that the first step would compute.
            divisible: True if its tokens may be split over steps at any place.
        """
        self._kept[row] = hit
        self._last[row], self._branch[row] = self._places(hashes, divisible=divisible)
        return int(self.cut(np.array([row]), np.array([hit]), np.array([count]))[0])

    def first_cut(self, hashes: Sequence[BlockHash], hit: int, count: int, *, divisible: bool) -> int:
        """Return what `aim` returns for a request that may have no row yet, and choose nothing."""
        last, branch = (np.array([place]) for place in self._places(hashes, divisible=divisible))
        return int(self._cut(np.array([hit]), np.array([count]), last, branch)[0])

    def _places(self, hashes: Sequence[BlockHash], *, divisible: bool) -> tuple[int, int]:
        """Return where a request ends its last whole unit, and where it leaves the tokens of earlier requests."""
        if not divisible:
            return UNDIVIDED, UNDIVIDED
        shared = next((n for n, block_hash in enumerate(hashes) if block_hash not in self._seen), len(hashes))
        return len(hashes) * self.unit, shared * self.unit

    def begin(self, row: int, hashes: Sequence[BlockHash], hit: int) -> None:
        """Assign a row to a request that resumes from the state after its first `hit` tokens."""
        self.num_accepted[row] = 1
        if hit:
            name = hashes[hit // self.unit - 1]
            slot = self._slot_of.get(name)
            slot = self._load(name, hit) if slot is None else slot
            self._slot_of.move_to_end(name)
            self.lengths[row] = self.lengths[slot]
            if slot in self._loading:
                self._loading[slot].add(row)
            else:
                self._restore_row(slot, row)
        for block_hash in hashes:
            self._seen[block_hash] = None
            self._seen.move_to_end(block_hash)
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)

    def cut(self, rows: Int, computed: Int, counts: Int) -> Int:
        """Return the `counts` [n] tokens of `rows`, cut where a checkpoint is to be taken.

        Args:
            rows: [n] row numbers.
            computed: [n] tokens that are already computed.
            counts: [n] tokens that a step would compute.

        Raises:
            ContractError: if a cache spec ends a request's step at a position that computes no tokens, or too many.
        """
        if not self.num_slots or not (counts > 1).any():
            return counts
        return self._cut(computed, counts, self._last[rows], self._branch[rows])

    def _cut(self, computed: Int, counts: Int, last: Int, branch: Int) -> Int:
        if not self.num_slots or not (several := counts > 1).any():
            return counts
        first, ends = computed[several], (computed + counts)[several]
        stops = self.rules.stops(first, ends, last[several], branch[several])
        if (wrong := (stops <= first) | (stops > ends)).any():
            at = int(np.argmax(wrong))
            raise self._unfit(f"ends a step at {stops[at]} tokens, of which {first[at]} are computed, up to {ends[at]}")
        cut = counts.copy()
        cut[several] = stops - first
        return cut

    def due(self, rows: Int) -> Int:
        """Return the rows whose states are at a position that is to be kept."""
        if not self.num_slots:
            return rows[:0]
        computed = self.rows.num_computed_tokens[rows]
        wanted = self.rules.keeps(computed, self._last[rows], self._branch[rows])
        wanted &= self.rows.num_pending[rows] < 2  # with drafts in flight, a state's position is not known yet
        due: Int = rows[wanted & (computed > 0) & (computed != self._kept[rows])]
        return due

    def keep(self, row: int, block_hash: BlockHash) -> None:
        """Keep a copy of the row's state, unless its prefix has one.

        Raises:
            ContractError: if a cache spec keeps a state at a position that is not a multiple of the unit.
        """
        self._kept[row] = self.rows.num_computed_tokens[row]
        if self._kept[row] % self.unit:
            raise self._unfit(f"keeps a state at {self._kept[row]} tokens, which is no multiple of {self.unit}")
        if block_hash in self._slot_of:
            self._slot_of.move_to_end(block_hash)
            return
        if (slot := self._take()) is None:  # all of them are being written or read
            return
        try:
            self._states.copy(row, slot)
        except BaseException:
            self._free.append(slot)
            raise
        self.lengths[slot], self.prefixes[slot] = self.lengths[row], self._kept[row]
        self._slot_of[block_hash] = slot
        self.counts.kept += 1
        if self.store is not None:
            self.store.state_kept(slot, block_hash)

    def slot_of(self, block_hash: BlockHash) -> int | None:
        """Return the slot that holds the state behind a prefix, None if none does."""
        return self._slot_of.get(block_hash)

    def is_coming(self, block_hash: BlockHash) -> bool:
        """Return whether a state is being loaded, or is not here and will have to be."""
        slot = self._slot_of.get(block_hash)
        return slot is None or slot in self._loading

    def awaited(self, row: int) -> int | None:
        """Return the slot that a row waits for, if there is one."""
        return next((slot for slot, rows in self._loading.items() if row in rows), None)

    def leave(self, row: int) -> None:
        """Forget that a row waits for a state."""
        for rows in self._loading.values():
            rows.discard(row)

    def drop(self, slot: int, block_hash: BlockHash) -> list[int]:
        """Forget a state whose load failed, or takes too long. Return the rows that waited for it."""
        if self._slot_of.get(block_hash) == slot:
            del self._slot_of[block_hash]
        rows = sorted(self._loading.get(slot, ()))
        if rows:
            self._loading[slot] = set()
        return rows

    def loaded(self, slot: int, block_hash: BlockHash) -> None:
        """Give the rows that wait for a slot its state, which nobody writes any more."""
        for row in sorted(self._loading.pop(slot)):
            self._restore_row(slot, row)
        self._free_unnamed(slot, block_hash)

    def hold(self, slot: int) -> None:
        """Keep a slot's state as it is until `let_go`."""
        self._held[slot] = self._held.get(slot, 0) + 1

    def let_go(self, slot: int, block_hash: BlockHash) -> None:
        """End a `hold`."""
        self._held[slot] -= 1
        if not self._held[slot]:
            del self._held[slot]
            self._free_unnamed(slot, block_hash)

    def give_up(self) -> None:
        """Forget all states that were being loaded, and all holds. Nobody writes or reads slots any more."""
        for block_hash in [name for name, slot in self._slot_of.items() if slot in self._loading]:
            del self._slot_of[block_hash]
        self._loading.clear()
        self._held.clear()
        self.restore()

    @property
    def _has_room(self) -> bool:
        """Return whether a slot is free, or can be."""
        return bool(self._free) or any(not self._is_busy(slot) for slot in self._slot_of.values())

    def _is_busy(self, slot: int) -> bool:
        return slot in self._loading or slot in self._held

    def _take(self) -> int | None:
        """Return a slot for a checkpoint, that of the least recently used one if need be. None if all are in use."""
        if self._free:
            return self._free.pop()
        oldest = next((name for name, slot in self._slot_of.items() if not self._is_busy(slot)), None)
        if oldest is None:
            return None
        self.counts.evicted += 1
        return self._slot_of.pop(oldest)

    def _load(self, block_hash: BlockHash, length: int) -> int:
        """Begin to load the state after `length` tokens. Return its slot."""
        slot = self._take()
        if slot is None or self.store is None:
            raise IntegrityError(f"the state behind {length} tokens was found, and no slot is there for it")
        self._slot_of[block_hash] = slot
        self._loading[slot] = set()
        self.lengths[slot] = self.prefixes[slot] = length
        self.store.load_state(slot, block_hash)
        return slot

    def _restore_row(self, slot: int, row: int) -> None:
        self._states.copy(slot, row)
        self.counts.restored += 1

    def _free_unnamed(self, slot: int, block_hash: BlockHash) -> None:
        if self._slot_of.get(block_hash) != slot and not self._is_busy(slot):
            self._free.append(slot)

    def advance(self, rows: Int, computed: Int, counts: Int) -> None:
        """Record the start of a step that computes `counts` tokens of each of `rows` after its `computed` ones."""
        self.lengths[rows] = np.where(computed > 0, self.lengths[rows], 0) + counts
        self.num_accepted[rows] = 1

    def commit(self, rows: Int, counts: Int, accepted: Int, verified: Mask, *, done: bool = False) -> None:
        """Roll back to the first `accepted` of the `counts` tokens that a step computed for each of its `rows`.

        Args:
            rows: [n], the step's rows in its order.
            counts: [n], tokens that the step computed.
            accepted: [n], leading tokens that remain.
            verified: [n] bool, True for rows with drafts.
            done: True if the states were already rolled back after sampling, as with async scheduling.
        """
        self.num_accepted[rows] = np.where(verified, accepted, 1)
        if (back := self.rules.rolls_back(counts, accepted)).any():
            if not done:
                self._states.commit(np.where(back, rows, -1), accepted)
            self.lengths[rows] -= counts - accepted

    def _unfit(self, text: str) -> ContractError:
        return ContractError(
            f"kv_spec {', '.join(self._names)}: a cache spec of states {text}",
            fix="run `slotline conform` on the plugin, or name another one in cache.kv_spec",
        )

    def reset(self) -> None:
        """Forget every checkpoint. Slots that are being written or read are free afterwards."""
        self._free += [slot for slot in self._slot_of.values() if not self._is_busy(slot)]
        self._slot_of.clear()
        self._seen.clear()

    def restore(self) -> None:
        """Free all slots that hold no findable checkpoint, whatever was being kept."""
        used = {*self._slot_of.values(), *self._loading, *self._held}
        self._free = [slot for slot in range(len(self.lengths) - 1, self.rows.max_requests - 1, -1) if slot not in used]

    def check(self) -> None:
        """Raise IntegrityError unless slots, rows and checkpoints agree."""
        first, kept = self.rows.max_requests, list(self._slot_of.values())
        if shared := sorted(slot for slot in kept if slot < first):
            raise IntegrityError(f"checkpoints hold slots {shared}, which are those of live rows")
        unnamed = list(({*self._loading, *self._held}).difference(kept))
        if sorted(kept + unnamed + self._free) != list(range(first, len(self.lengths))):
            raise IntegrityError("the checkpoints' slots are not each either free or of one checkpoint")
        if wrong := [slot for slot in kept if self.lengths[slot] != self.prefixes[slot]]:
            raise IntegrityError(
                f"the states kept in slots {wrong} cover {self.lengths[wrong].tolist()} tokens, and the prefixes that "
                f"they are found by have {self.prefixes[wrong].tolist()}"
            )
        for row, request in enumerate(self.rows.requests):
            computed = self.rows.num_computed_tokens[row]
            if request is not None and computed > 0 and self.lengths[row] != computed:
                raise IntegrityError(f"row {row} computed {computed} tokens and its state covers {self.lengths[row]}")
