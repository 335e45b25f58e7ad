"""Broken specs of states, one bug each, and right ones that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts import BlockHash, KVSpecCapabilities, StateLayer, StateSpecContext, StateTensorSpec
from slotline.registry.contracts.kv_spec import UNDIVIDED
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.reference import state_spec as reference
from slotline.testing.reference.state_spec import Int, Mask, PlainStates, dtype_of

IsKept = Callable[[BlockHash], bool]
Tensors = Mapping[str, torch.Tensor]

# --- figures and memory


class NeedsBlocks(PlainStates):
    def __init__(self, context: StateSpecContext) -> None:
        super().__init__(context)
        self.block_size: int = context.block_size  # type: ignore[attr-defined]


class WithoutStops(PlainStates):
    stops = None  # type: ignore[assignment]


class IntervalOffByOne(PlainStates):
    @property
    def interval(self) -> int:
        return 4 * self.unit + 1


class PageOfHalves(PlainStates):
    def page_bytes(self, layer: StateLayer) -> int:
        used = sum(2 * tensor.num_elements for tensor in layer.tensors)
        return -(-used // self.alignment) * self.alignment


class PageUnpadded(PlainStates):
    def page_bytes(self, layer: StateLayer) -> int:
        return super().page_bytes(layer) + 8


class LastUnitForAll(PlainStates):
    last_unit: int

    def __init__(self, context: StateSpecContext) -> None:
        LastUnitForAll.last_unit = context.prefix_unit
        super().__init__(context)

    @property
    def interval(self) -> int:
        return 4 * LastUnitForAll.last_unit


class AnotherDtype(PlainStates):
    def view(self, part: torch.Tensor, tensor: StateTensorSpec) -> torch.Tensor:
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        return super().view(part, tensor).view(integers[dtype_of(tensor).itemsize])


class FlatTensors(PlainStates):
    def view(self, part: torch.Tensor, tensor: StateTensorSpec) -> torch.Tensor:
        return super().view(part, tensor).flatten(1)


class NumberedTensors(PlainStates):
    def bind(self, raw: torch.Tensor, layer: StateLayer, num_slots: int) -> Tensors:
        found = super().bind(raw, layer, num_slots).values()
        return {f"tensor_{number}": view for number, view in enumerate(found)}


class TensorsOverEachOther(PlainStates):
    def bind(self, raw: torch.Tensor, layer: StateLayer, num_slots: int) -> Tensors:
        return {tensor.name: self.view(raw, tensor) for tensor in layer.tensors}


class Misaligned(PlainStates):
    def bind(self, raw: torch.Tensor, layer: StateLayer, num_slots: int) -> Tensors:
        found, first = {}, 0
        for tensor in layer.tensors:
            size = tensor.num_elements * dtype_of(tensor).itemsize
            first = -(-first // dtype_of(tensor).itemsize) * dtype_of(tensor).itemsize
            found[tensor.name] = self.view(raw[:, first:], tensor)
            first += size
        return found


class PlanesOfTensors(PlainStates):
    """Holds all slots of the first tensor, then all of the second: a slot is not in one row."""

    def bind(self, raw: torch.Tensor, layer: StateLayer, num_slots: int) -> Tensors:
        found, first = {}, 0
        for tensor in layer.tensors:
            size = self.size(tensor)
            plane = raw.view(-1)[first : first + num_slots * size].view(num_slots, size)
            found[tensor.name] = self.view(plane, tensor)
            first += num_slots * size
        return found


class SlotsTooClose(PlainStates):
    """Begins each slot one alignment earlier than the one before says."""

    def bind(self, raw: torch.Tensor, layer: StateLayer, num_slots: int) -> Tensors:
        page = raw.shape[1] - self.alignment
        return super().bind(raw.as_strided(raw.shape, (page, 1), raw.storage_offset()), layer, num_slots)

    def page_bytes(self, layer: StateLayer) -> int:
        return super().page_bytes(layer) + self.alignment


class OneSlotOff(PlainStates):
    """Shows the slot in front in place of each slot but the first."""

    def bind(self, raw: torch.Tensor, layer: StateLayer, num_slots: int) -> Tensors:
        if num_slots == 1:
            return super().bind(raw, layer, 1)
        before = raw.as_strided(raw.shape, raw.stride(), max(0, raw.storage_offset() - raw.shape[1]))
        return super().bind(before, layer, num_slots)


class OneSlotForAll(PlainStates):
    def view(self, part: torch.Tensor, tensor: StateTensorSpec) -> torch.Tensor:
        view = super().view(part, tensor)
        return view[:1].expand(view.shape)


class BindsACopy(PlainStates):
    def view(self, part: torch.Tensor, tensor: StateTensorSpec) -> torch.Tensor:
        return super().view(part, tensor).clone()


# --- places of checkpoints


class StopsWhereItIs(PlainStates):
    def stops(self, computed: Int, ends: Int, last: Int, branch: Int) -> Int:
        place = ends // self.interval * self.interval
        return np.where((last != UNDIVIDED) & (place >= computed), place, ends)


class StopsBeyond(PlainStates):
    def stops(self, computed: Int, ends: Int, last: Int, branch: Int) -> Int:
        place = -(-ends // self.interval) * self.interval
        return np.where(last != UNDIVIDED, place, ends)


class CutsTheUndivided(PlainStates):
    def stops(self, computed: Int, ends: Int, last: Int, branch: Int) -> Int:
        return super().stops(computed, ends, np.where(last == UNDIVIDED, 0, last), branch)


class StopsForNothing(PlainStates):
    def stops(self, computed: Int, ends: Int, last: Int, branch: Int) -> Int:
        found = super().stops(computed, ends, last, branch)
        return np.where((branch > computed) & (branch <= ends), branch, found)


class KeepsNothing(PlainStates):
    def keeps(self, computed: Int, last: Int, branch: Int) -> Mask:
        return np.zeros(len(computed), np.bool_)


class KeepsEverything(PlainStates):
    def keeps(self, computed: Int, last: Int, branch: Int) -> Mask:
        return np.ones(len(computed), np.bool_)


class KeepsOneUnitLater(PlainStates):
    def keeps(self, computed: Int, last: Int, branch: Int) -> Mask:
        return super().keeps(computed - self.unit, last, branch)


class KeepsPromptsOnly(PlainStates):
    def keeps(self, computed: Int, last: Int, branch: Int) -> Mask:
        wanted: Mask = computed == last
        return wanted


class KeepsNumbers(PlainStates):
    def keeps(self, computed: Int, last: Int, branch: Int) -> Mask:
        return super().keeps(computed, last, branch).astype(np.int64)


class WritesEnds(PlainStates):
    def stops(self, computed: Int, ends: Int, last: Int, branch: Int) -> Int:
        ends[:] = super().stops(computed, ends, last, branch)
        return ends


class WritesComputed(PlainStates):
    def keeps(self, computed: Int, last: Int, branch: Int) -> Mask:
        found = super().keeps(computed, last, branch)
        computed %= self.interval
        return found


class CutsTheFirstOnly(PlainStates):
    def stops(self, computed: Int, ends: Int, last: Int, branch: Int) -> Int:
        found = ends.copy()
        found[:1] = super().stops(computed, ends, last, branch)[:1]
        return found


# --- hits and rollback


class HitNotKept(PlainStates):
    def prefix_hit(self, hashes: Sequence[BlockHash], is_kept: IsKept) -> int:
        return len(hashes) if any(map(is_kept, hashes)) else 0


class ShortestHit(PlainStates):
    def prefix_hit(self, hashes: Sequence[BlockHash], is_kept: IsKept) -> int:
        return min((length for length, block_hash in enumerate(hashes, 1) if is_kept(block_hash)), default=0)


class UnbrokenHit(PlainStates):
    """Counts kept prefixes from the first on, as if they were blocks."""

    def prefix_hit(self, hashes: Sequence[BlockHash], is_kept: IsKept) -> int:
        return next((n for n, block_hash in enumerate(hashes) if not is_kept(block_hash)), len(hashes))


class HitBeyond(PlainStates):
    def prefix_hit(self, hashes: Sequence[BlockHash], is_kept: IsKept) -> int:
        found = super().prefix_hit(hashes, is_kept)
        return found + 1 if found == len(hashes) > 0 else found


class RemembersKept(PlainStates):
    def __init__(self, context: StateSpecContext) -> None:
        super().__init__(context)
        self.known: set[BlockHash] = set()

    def prefix_hit(self, hashes: Sequence[BlockHash], is_kept: IsKept) -> int:
        self.known.update(filter(is_kept, hashes))
        return super().prefix_hit(hashes, self.known.__contains__)


class NeverGoesBack(PlainStates):
    def rolls_back(self, counts: Int, accepted: Int) -> Mask:
        return np.zeros(len(counts), np.bool_)


class AlwaysGoesBack(PlainStates):
    def rolls_back(self, counts: Int, accepted: Int) -> Mask:
        return np.ones(len(counts), np.bool_)


class GoesBackWhereAllCount(PlainStates):
    def rolls_back(self, counts: Int, accepted: Int) -> Mask:
        return ~super().rolls_back(counts, accepted)


class GoesBackForSeveral(PlainStates):
    """Takes one rejected token for none."""

    def rolls_back(self, counts: Int, accepted: Int) -> Mask:
        back: Mask = accepted < counts - 1
        return back


_BROKEN: tuple[tuple[str, str, Level, Any], ...] = (
    ("state-needs-blocks", "asks the context of states for a block size", Level.CONTRACT, NeedsBlocks),
    ("state-without-stops", "has no method stops", Level.CONTRACT, WithoutStops),
    ("state-interval", "its interval is no multiple of the unit", Level.NUMERICS, IntervalOffByOne),
    ("state-half-page", "takes each element for two bytes", Level.NUMERICS, PageOfHalves),
    ("state-page-unpadded", "its pages do not keep the alignment", Level.NUMERICS, PageUnpadded),
    ("state-last-unit", "keeps the unit in the class: the last spec's goes for all", Level.HOSTILE, LastUnitForAll),
    ("state-dtype", "views the bytes as integers", Level.NUMERICS, AnotherDtype),
    ("state-flat", "gives tensors without their shape", Level.NUMERICS, FlatTensors),
    ("state-numbered", "gives tensors under other names", Level.NUMERICS, NumberedTensors),
    ("state-overlap", "lays the tensors of a slot over each other", Level.HOSTILE, TensorsOverEachOther),
    ("state-misaligned", "lays tensors next to each other without padding", Level.HOSTILE, Misaligned),
    ("state-planes", "lays all slots of a tensor next to each other", Level.HOSTILE, PlanesOfTensors),
    ("state-slots-too-close", "begins slots before the page of the one in front ends", Level.HOSTILE, SlotsTooClose),
    ("state-slot-off", "shows the slot in front of the one that is asked for", Level.HOSTILE, OneSlotOff),
    ("state-one-slot", "shows the first slot for all", Level.HOSTILE, OneSlotForAll),
    ("state-copy", "binds a copy of the memory", Level.HOSTILE, BindsACopy),
    ("state-stops-at-computed", "ends a step where it begins", Level.NUMERICS, StopsWhereItIs),
    ("state-stops-beyond", "ends a step at the next place, however far", Level.NUMERICS, StopsBeyond),
    ("state-cuts-undivided", "cuts tokens that may not be divided", Level.NUMERICS, CutsTheUndivided),
    ("state-stops-for-nothing", "ends a step where no state is kept", Level.NUMERICS, StopsForNothing),
    ("state-keeps-nothing", "keeps no state", Level.NUMERICS, KeepsNothing),
    ("state-keeps-everything", "keeps states within a unit", Level.NUMERICS, KeepsEverything),
    ("state-keeps-late", "keeps states one unit later than it stops", Level.NUMERICS, KeepsOneUnitLater),
    ("state-keeps-prompts", "forgets the interval while text is generated", Level.NUMERICS, KeepsPromptsOnly),
    ("state-keeps-numbers", "answers with numbers instead of bools", Level.NUMERICS, KeepsNumbers),
    ("state-writes-ends", "writes its answer into the argument", Level.HOSTILE, WritesEnds),
    ("state-writes-computed", "divides the argument in place", Level.HOSTILE, WritesComputed),
    ("state-cuts-first", "cuts the tokens of a batch's first request only", Level.HOSTILE, CutsTheFirstOnly),
    ("state-hit-not-kept", "goes on from the last prefix if any is kept", Level.NUMERICS, HitNotKept),
    ("state-hit-shortest", "goes on from the shortest kept prefix", Level.NUMERICS, ShortestHit),
    ("state-hit-unbroken", "wants all shorter prefixes to be kept as well", Level.NUMERICS, UnbrokenHit),
    ("state-hit-beyond", "goes on from one unit more than it was asked about", Level.NUMERICS, HitBeyond),
    ("state-hit-remembered", "goes on from states that were kept once", Level.HOSTILE, RemembersKept),
    ("state-never-back", "leaves states behind rejected drafts", Level.NUMERICS, NeverGoesBack),
    ("state-always-back", "takes states back though all tokens count", Level.NUMERICS, AlwaysGoesBack),
    ("state-back-inverted", "takes states back where all tokens count", Level.NUMERICS, GoesBackWhereAllCount),
    ("state-back-for-two", "leaves a state behind a single rejected draft", Level.NUMERICS, GoesBackForSeveral),
)


def _mutant(name: str, summary: str, level: Level, factory: Any) -> Mutant:
    changed = attrs.evolve(
        reference.descriptor, name=f"mutant_{name.replace('-', '_')}", summary=summary, factory=factory
    )
    return Mutant(name, summary, level, changed)


MUTANTS: tuple[Mutant, ...] = tuple(_mutant(*broken) for broken in _BROKEN)

# --- right ones


class ReversedPadded(PlainStates):
    """Holds the tensors of a slot in reverse, the last dimension of each first, and keeps a state at each unit."""

    alignment = 256

    @property
    def interval(self) -> int:
        return self.unit

    def bind(self, raw: torch.Tensor, layer: StateLayer, num_slots: int) -> Tensors:
        return super().bind(raw, attrs.evolve(layer, tensors=layer.tensors[::-1]), num_slots)

    def view(self, part: torch.Tensor, tensor: StateTensorSpec) -> torch.Tensor:
        turned = super().view(part, attrs.evolve(tensor, shape=tensor.shape[::-1]))
        return turned.permute(0, *range(turned.dim() - 1, 0, -1))

    def stops(self, computed: Int, ends: Int, last: Int, branch: Int) -> Int:
        place = (computed // self.unit + 1) * self.unit  # unit by unit
        return np.where(last == UNDIVIDED, ends, np.minimum(place, ends))


class WhereStepsEnd(PlainStates):
    """Cuts no step, and keeps a state where a step ends at a whole unit."""

    def stops(self, computed: Int, ends: Int, last: Int, branch: Int) -> Int:
        return ends

    def keeps(self, computed: Int, last: Int, branch: Int) -> Mask:
        wanted: Mask = computed % self.unit == 0
        return wanted


CORRECT: tuple[Correct, ...] = (
    Correct("states at the ends of prompts and every fourth unit", reference.descriptor),
    Correct(
        "states in reverse order and channel-last, one at each unit",
        attrs.evolve(reference.descriptor, name="states_reversed", factory=ReversedPadded),
    ),
    Correct(
        "cuts no step, holds two kinds",
        attrs.evolve(
            reference.descriptor,
            name="states_uncut",
            factory=WhereStepsEnd,
            capabilities=KVSpecCapabilities(
                kv_kinds=Set(("mamba2", "pooled")), exact_kinds=Set(("pooled",)), state=Flag(True)
            ),
        ),
    ),
    Correct(
        "states without checkpoints",
        attrs.evolve(
            reference.descriptor,
            name="states_unshared",
            capabilities=attrs.evolve(reference.descriptor.capabilities, prefix_caching=Flag(False)),
        ),
    ),
)
