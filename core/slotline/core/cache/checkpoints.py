"""Checkpoints: copies of states where prefixes end, so that a request can go on from a state as from cached blocks.

A state is destructive: it can be kept only at the moment when a request has computed exactly a prefix. So the scheduler
ends a request's tokens in a step where a copy is worth most, and before the next step the states that stand at such a
place are copied into slots that no row owns. These places are

* the last whole unit of the tokens that a request comes with: the next one may bring the same tokens and more;
* where its tokens leave those of earlier requests: a prefix that two of them shared, others will share too;
* each multiple of the interval, in long prompts and while text is generated.

The second rule is that of Marconi (Pan et al., arXiv 2411.19379, section 4.1), which calls it the branching point.

A slot belongs to its row or to the checkpoints, never to both: a state enters and leaves them as a copy. What the
state in each slot covers is counted apart from what the rows say, so that the integrity checker can compare the two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from attrs import define

from slotline.core.scheduling.rows import NO_LIMIT, Rows
from slotline.registry.contracts import BlockHash
from slotline.registry.errors import IntegrityError

Int = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

INTERVAL = 256
"""Tokens, in whole units: a request leaves a checkpoint at each multiple."""

MOST_SEEN = 1 << 16
"""Prefixes that are remembered to tell where requests part; of units of 16 tokens, those of a million."""


class States(Protocol):
    """What is done to the states themselves; see `slotline.core.execution.states.StateRouter`."""

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Copy a slot, in every layer."""
        ...

    def commit(self, rows: Int, accepted: Int) -> None:
        """Make the states those after the accepted tokens; `rows` of -1 stay."""
        ...


@define
class CheckpointCounts:
    """What happened, summed over a run: states that were kept, taken up again, and dropped for newer ones."""

    kept: int = 0
    restored: int = 0
    evicted: int = 0


class Checkpoints:
    """Which states are kept in which slots, and where the next ones are to be taken.

    Args:
        rows: whose slots come first.
        states: in as many slots; those behind the rows' are for checkpoints.
        unit: tokens; a checkpoint stands at a multiple.

    Attributes:
        interval: tokens, a multiple of the unit.
        lengths: [num_slots] int64, tokens that the state in each slot covers, counted step by step.
        prefixes: [num_slots] int64, tokens of the prefix that each checkpoint is found by.
        counts: see `CheckpointCounts`.
    """

    def __init__(self, rows: Rows, states: States, unit: int) -> None:
        num_slots = states.num_slots
        self.rows = rows
        self.unit = unit
        self.interval = interval_of(unit)
        self.lengths = np.zeros(num_slots, np.int64)
        self.counts = CheckpointCounts()
        self.prefixes = np.zeros(num_slots, np.int64)
        self._states = states
        self._free = list(range(num_slots - 1, rows.max_requests - 1, -1))
        self._slot_of: OrderedDict[BlockHash, int] = OrderedDict()  # least recently used first
        self._seen: OrderedDict[BlockHash, None] = OrderedDict()
        # By row, in tokens: where a step is to end, NO_LIMIT where it may not be cut; and what was copied last.
        self._last = np.full(rows.max_requests, NO_LIMIT, np.int64)
        self._branch = np.full(rows.max_requests, NO_LIMIT, np.int64)
        self._kept = np.zeros(rows.max_requests, np.int64)

    @property
    def num_slots(self) -> int:
        """Slots for checkpoints."""
        return len(self.lengths) - self.rows.max_requests

    def find(self, hashes: Sequence[BlockHash]) -> int:
        """The longest prefix, in units, whose state is kept; `hashes` are those of whole units from the first on."""
        return next((count for count in range(len(hashes), 0, -1) if hashes[count - 1] in self._slot_of), 0)

    def aim(self, row: int, hashes: Sequence[BlockHash], hit: int, count: int, *, divisible: bool) -> int:
        """Choose where a request leaves checkpoints, and cut its first `count` tokens accordingly.

        Args:
            hashes: of the whole units of its tokens, short of the last token.
            hit: tokens that it need not compute.
            divisible: whether its tokens may be divided over steps wherever it helps.
        """
        self._kept[row] = hit
        self._last[row] = len(hashes) * self.unit if divisible else NO_LIMIT
        shared = next((n for n, block_hash in enumerate(hashes) if block_hash not in self._seen), len(hashes))
        self._branch[row] = shared * self.unit if divisible else NO_LIMIT
        return int(self.cut(np.array([row]), np.array([hit]), np.array([count]))[0])

    def begin(self, row: int, hashes: Sequence[BlockHash], hit: int) -> None:
        """A request takes its row, and goes on from the state behind its first `hit` tokens."""
        if hit:
            slot = self._slot_of[hashes[hit // self.unit - 1]]
            self._slot_of.move_to_end(hashes[hit // self.unit - 1])
            self._states.copy(slot, row)
            self.lengths[row] = self.lengths[slot]
            self.counts.restored += 1
        for block_hash in hashes:
            self._seen[block_hash] = None
            self._seen.move_to_end(block_hash)
        while len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)

    def cut(self, rows: Int, computed: Int, counts: Int) -> Int:
        """`counts` [n] tokens of `rows`, of which `computed` are computed, cut where a checkpoint is to be taken."""
        if not self.num_slots or not (counts > 1).any():
            return counts
        ends, last, branch = computed + counts, self._last[rows], self._branch[rows]
        stop = np.where(last == NO_LIMIT, 0, ends // self.interval * self.interval)
        stop = np.where(last <= ends, np.maximum(stop, last), stop)
        stop = np.where((branch > computed) & (branch <= ends), branch, stop)
        cut: Int = np.where(stop > computed, stop - computed, counts)
        return cut

    def due(self, rows: Int) -> Int:
        """Those of `rows` whose states stand where one is to be kept."""
        if not self.num_slots:
            return rows[:0]
        computed = self.rows.num_computed_tokens[rows]
        wanted = (computed % self.interval == 0) | (computed == self._last[rows]) | (computed == self._branch[rows])
        wanted &= self.rows.num_pending[rows] < 2  # behind drafts in flight nobody knows yet how far a state has come
        due: Int = rows[wanted & (computed > 0) & (computed != self._kept[rows])]
        return due

    def keep(self, row: int, block_hash: BlockHash) -> None:
        """Keep a copy of the row's state, unless there is one of its prefix."""
        self._kept[row] = self.rows.num_computed_tokens[row]
        if block_hash in self._slot_of:
            self._slot_of.move_to_end(block_hash)
            return
        if self._free:
            slot = self._free.pop()
        else:
            _, slot = self._slot_of.popitem(last=False)
            self.counts.evicted += 1
        self._states.copy(row, slot)
        self.lengths[slot], self.prefixes[slot] = self.lengths[row], self._kept[row]
        self._slot_of[block_hash] = slot
        self.counts.kept += 1

    def advance(self, rows: Int, computed: Int, counts: Int) -> None:
        """A step was started that computes `counts` tokens of each of `rows` behind its `computed` ones."""
        self.lengths[rows] = np.where(computed > 0, self.lengths[rows], 0) + counts
        self.rows.num_accepted[rows] = 1

    def commit(self, rows: Int, counts: Int, accepted: Int, verified: Mask, *, done: bool = False) -> None:
        """Of a step's tokens of its `rows`, in its order, only the first `accepted` of `counts` stand.

        Args:
            verified: [n] bool, which of the rows had drafts.
            done: whether the states have been brought there behind the step's sampling, as where steps overlap.
        """
        self.rows.num_accepted[rows] = np.where(verified, accepted, 1)
        if (back := accepted < counts).any():
            if not done:
                self._states.commit(np.where(back, rows, -1), accepted)
            self.lengths[rows] -= counts - accepted

    def reset(self) -> None:
        """Forget every checkpoint."""
        self._free += self._slot_of.values()
        self._slot_of.clear()
        self._seen.clear()

    def restore(self) -> None:
        """Free all slots that no checkpoint is found in, whatever was being kept."""
        used = set(self._slot_of.values())
        self._free = [slot for slot in range(len(self.lengths) - 1, self.rows.max_requests - 1, -1) if slot not in used]

    def check(self) -> None:
        """Raise IntegrityError unless slots, rows and checkpoints agree."""
        first, kept = self.rows.max_requests, list(self._slot_of.values())
        if shared := sorted(slot for slot in kept if slot < first):
            raise IntegrityError(f"checkpoints hold slots {shared}, which are those of live rows")
        if sorted(kept + self._free) != list(range(first, len(self.lengths))):
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


def interval_of(unit: int) -> int:
    """Tokens between the checkpoints of a long prompt or text: whole units."""
    return -(-INTERVAL // unit) * unit
