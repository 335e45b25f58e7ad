"""Broken KV connectors, one bug each, and right ones that differ."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch

from slotline.registry.contracts import BlockHash, CacheBlock, KVConnectorContext
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.reference import kv_connector as reference
from slotline.testing.reference.kv_connector import (
    CAPACITY,
    CheckedBlocks,
    FewBlocks,
    FileBlocks,
    Key,
    LastingBlocks,
    LateLayerBlocks,
    LaterBlocks,
    LayerBlocks,
    LayeredBlocks,
    PeerBlocks,
)


class ByHashAlone(FewBlocks):
    def key(self, group: int, block_hash: BlockHash) -> Key:
        return 0, block_hash


class HoldsAnything(FewBlocks):
    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        return [True for _ in hashes]


class AnswersForAll(FewBlocks):
    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        return [any(super().held(group, hashes))] * len(hashes)


class KeepsNothing(FewBlocks):
    def save(self, saves: Sequence[CacheBlock], wanted: Collection[Key]) -> None:
        """Too much trouble."""


class OneRowForAll(FewBlocks):
    def save(self, saves: Sequence[CacheBlock], wanted: Collection[Key]) -> None:
        super().save(saves, wanted)
        for one in saves:
            key, last = self.key(one.group, one.block_hash), self.key(one.group, saves[-1].block_hash)
            self.rows[key] = self.rows.get(last, self.rows[key])


class HalfBlocks(FewBlocks):
    def load(self, loads: Iterable[CacheBlock]) -> None:
        for one in loads:
            row = self.rows.get(self.key(one.group, one.block_hash))
            if row is not None:
                half = row.clone()
                half[len(row) // 2 :] = 0
                self.context.copy.to_device(one.group, [one.block], [half])


class WritesFirst(FewBlocks):
    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        self.load(loads)
        self.save(saves, {self.key(one.group, one.block_hash) for one in loads})


class SavesLater(FewBlocks):
    later: tuple[CacheBlock, ...] = ()

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        super().start(self.later, loads)
        self.later = tuple(saves)

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        later = {self.key(one.group, one.block_hash) for one in self.later}
        return [self.key(group, one) in self.rows or self.key(group, one) in later for one in hashes]


class LoadsLater(FewBlocks):
    later: tuple[CacheBlock, ...] = ()

    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        self.save(saves, {self.key(one.group, one.block_hash) for one in loads})
        self.later = tuple(loads)

    def failed(self) -> Collection[int]:
        self.load(self.later)
        return super().failed()


class MakesRoomOfLoads(FewBlocks):
    def make_room(self, wanted: Collection[Key]) -> bool:
        return super().make_room(())


class IgnoresItsRoom(FewBlocks):
    def make_room(self, wanted: Collection[Key]) -> bool:
        return True


class SilentFailures(FewBlocks):
    def failed(self) -> Collection[int]:
        return ()


class FailsForEver(FewBlocks):
    def failed(self) -> Collection[int]:
        return set(self.missing)


class AllFailTogether(FewBlocks):
    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        super().start(saves, loads)
        if self.missing:
            self.missing |= {one.block for one in loads}


class DropsWhatIsSavedAgain(FewBlocks):
    def save(self, saves: Sequence[CacheBlock], wanted: Collection[Key]) -> None:
        known = [one for one in saves if self.key(one.group, one.block_hash) in self.rows]
        super().save(saves, wanted)
        for one in known:
            self.rows[self.key(one.group, one.block_hash)].zero_()


class KeepsThroughReset(FewBlocks):
    def reset(self) -> None:
        """Keep the blocks."""


class ResetsTheNamesAlone(FewBlocks):
    old: dict[Key, torch.Tensor]

    def reset(self) -> None:
        self.old = dict(self.rows)
        super().reset()

    def save(self, saves: Sequence[CacheBlock], wanted: Collection[Key]) -> None:
        super().save(saves, wanted)
        for key, row in getattr(self, "old", {}).items():
            if key in self.rows:
                self.rows[key] = row


class ClearsWhatItSaved(FewBlocks):
    def save(self, saves: Sequence[CacheBlock], wanted: Collection[Key]) -> None:
        super().save(saves, wanted)
        for one in saves:
            empty = torch.zeros(self.context.groups[one.group].block_bytes, dtype=torch.uint8)
            self.context.copy.to_device(one.group, [one.block], [empty])


class ForgetsWhenFull(FewBlocks):
    def make_room(self, wanted: Collection[Key]) -> bool:
        newest = next((key for key in reversed(self.rows) if key not in wanted), None)
        if len(self.rows) == CAPACITY - 1 and newest is not None:  # it writes over a row, and leaves its name
            self.rows[newest].zero_()
        return super().make_room(wanted)


class SharedByAllRanks(FewBlocks):
    shared: ClassVar[dict[Key, torch.Tensor]] = {}

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context)
        if not context.part.startswith("tensor 1/"):
            self.shared.clear()

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        self.rows.update((key, row) for key, row in self.shared.items() if self.context.part)
        return super().held(group, hashes)

    def save(self, saves: Sequence[CacheBlock], wanted: Collection[Key]) -> None:
        super().save(saves, wanted)
        self.shared.update(self.rows)


class ArrivesEarly(LaterBlocks):
    def arrived(self) -> Collection[int]:
        self.here |= {one.block for one in self.coming[-1]}
        return super().arrived()


class LeavesTheLast(LaterBlocks):
    def finish(self) -> None:
        self.end(self.coming[0])
        self.coming[0] = []


class ShiftsRows(LaterBlocks):
    def end(self, loads: Sequence[CacheBlock]) -> None:
        shifted = [*loads[1:], *loads[:1]]
        super().end([one._replace(block_hash=other.block_hash) for one, other in zip(loads, shifted, strict=True)])


class LosesTheLast(LaterBlocks):
    def end(self, loads: Sequence[CacheBlock]) -> None:
        super().end(loads[: max(1, len(loads) - 1)])


class CutsStates(LaterBlocks):
    def load(self, loads: Iterable[CacheBlock]) -> None:
        size = self.context.groups[0].block_bytes
        for row in self.rows.values():
            row[size:] = 0
        super().load(loads)


class StatesAsBlocks(LaterBlocks):
    def key(self, group: int, block_hash: BlockHash) -> Key:
        return (0 if self.context.groups[group].states else group), block_hash


class WaitsInTheStep(LaterBlocks):
    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        super().start(saves, loads)
        time.sleep(0.3 if loads else 0.0)


class SavedEarly(LastingBlocks):
    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        for one in self.leaving if loads else ():  # at the latest
            self.save(one, ())
        super().start(saves, loads)
        self.done |= {one.block for one in saves}

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        later = {self.key(one.group, one.block_hash) for saves in self.leaving for one in saves}
        return [self.key(group, one) in self.rows or self.key(group, one) in later for one in hashes]

    def take(self, saves: Sequence[CacheBlock]) -> None:
        self.save(saves, ())


class KeepsTheLastBlock(LastingBlocks):
    def take(self, saves: Sequence[CacheBlock]) -> None:
        super().take(saves)
        self.done -= {one.block for one in saves[1:][-1:]}


class LeavesSaves(LastingBlocks):
    def finish(self) -> None:
        left = self.leaving
        self.leaving = [[], []]
        super().finish()
        self.leaving = left


class SavesInTheStep(LastingBlocks):
    def start(self, saves: Sequence[CacheBlock], loads: Sequence[CacheBlock]) -> None:
        super().start(saves, loads)
        time.sleep(0.3 if saves else 0.0)


class TrustsFiles(FileBlocks):
    def read(self, file: Path, size: int) -> bytes | None:
        return file.read_bytes()[32:][:size] if file.exists() and file.stat().st_size >= size + 32 else None


class DigestOfBytesAlone(FileBlocks):
    def digest(self, file: Path, data: bytes) -> bytes:
        return hashlib.sha256(data).digest()


class OneFolderForAll(FileBlocks):
    def owner(self) -> str:
        return self.context.part or "blocks"


class KnowsItsOwnAlone(FileBlocks):
    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        there = super().held(group, hashes)
        return [one and self.file(group, name).name in self.names for one, name in zip(there, hashes, strict=True)]

    def write(self, file: Path, data: bytes) -> None:
        super().write(file, data)
        self.names.add(file.name)

    @property
    def names(self) -> set[str]:
        own: set[str] = self.__dict__.setdefault("own", set())
        return own


class HoldsWhatItCouldNotWrite(FileBlocks):
    def write(self, file: Path, data: bytes) -> None:
        super().write(file, data)
        self.__dict__.setdefault("own", set()).add(file)

    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        own = self.__dict__.get("own", ())
        there = super().held(group, hashes)
        return [one or self.file(group, name) in own for one, name in zip(there, hashes, strict=True)]

    def load(self, loads: Iterable[CacheBlock]) -> None:
        own = self.__dict__.get("own", ())
        super().load(one for one in loads if (file := self.file(one.group, one.block_hash)).exists() or file not in own)


class TrustsItsMemory(CheckedBlocks):
    def load(self, loads: Iterable[CacheBlock]) -> None:
        FewBlocks.load(self, loads)


class DigestOfRowsAlone(CheckedBlocks):
    def digest(self, key: Key, row: torch.Tensor) -> bytes:
        return hashlib.sha256(row.numpy().tobytes()).digest()


class SavesWhatIsNotWritten(LayerBlocks):
    def filling(self, blocks: Sequence[CacheBlock]) -> None:
        super().filling(blocks)
        for one in self.fills:
            for layer in self.context.groups[one.group].layers:
                LayerBlocks.save_layer(self, layer.index)

    def save_layer(self, layer: int) -> None:
        """Nothing is left to do."""


class SavesBeforeTheLayer(LayerBlocks):
    def wait_layer(self, layer: int) -> None:
        super().wait_layer(layer)
        super().save_layer(layer)

    def save_layer(self, layer: int) -> None:
        """Nothing is left to do."""


class OneLayerForAll(LayerBlocks):
    def part(self, block: CacheBlock, layer: int) -> torch.Tensor:
        first = self.context.groups[block.group].layers[0].index
        return super().part(block, first)[: len(super().part(block, layer))]


class LoadsBehindTheLayers(LayerBlocks):
    def wait_layer(self, layer: int) -> None:
        """There is time."""

    def save_layer(self, layer: int) -> None:
        super().save_layer(layer)
        super().wait_layer(layer)


class KeepsPartsOfBrokenPasses(LayerBlocks):
    def filling(self, blocks: Sequence[CacheBlock]) -> None:
        count = {number: len(group.layers) for number, group in enumerate(self.context.groups)}
        self.kept = {key: dict(parts) for key, parts in self.parts.items() if len(parts) < count[key[0]]}
        super().filling(blocks)
        self.parts |= {key: dict(parts) for key, parts in self.kept.items()}

    def save_layer(self, layer: int) -> None:
        super().save_layer(layer)
        for key, parts in self.kept.items():
            self.parts.get(key, {}).update(parts)


class WaitsForTheLayers(LateLayerBlocks):
    def wait(self) -> None:
        """Nobody waits here."""


class AsksAnybody(PeerBlocks):
    def peer(self, params: Mapping[str, Any]) -> PeerBlocks | None:
        return self.known.get(f"{params.get('remote_host')}:{params.get('remote_port')}")


class AsksWithoutARequest(PeerBlocks):
    def held(self, group: int, hashes: Sequence[BlockHash]) -> Sequence[bool]:
        peers = [self.known[one] for one in self.context.options.peers if one in self.known]
        found = [FewBlocks.held(one, group, hashes) for one in (self, *peers)]
        return [any(here) for here in zip(*found, strict=True)]


class BlocksAlone(PeerBlocks):
    def held_for(self, group: int, hashes: Sequence[BlockHash], params: Mapping[str, Any]) -> Sequence[bool]:
        return [False] * len(hashes) if self.context.groups[group].states else super().held_for(group, hashes, params)


class TellsNoLostItem(PeerBlocks):
    def items(self) -> Mapping[str, torch.Tensor | None]:
        return {name: one for name, one in super().items().items() if one is not None}


class TellsItemsAgain(PeerBlocks):
    def items(self) -> Mapping[str, torch.Tensor | None]:
        return self.told


class ItemsInFullPrecision(PeerBlocks):
    def item_encoded(self, mm_hash: str, output: torch.Tensor) -> None:
        super().item_encoded(mm_hash, output.float())


class OneItemForAll(PeerBlocks):
    def load_items(self, mm_hashes: Sequence[str], params: Mapping[str, Any]) -> None:
        super().load_items(mm_hashes, params)
        found = [one for one in self.told.values() if one is not None]
        self.told = {name: one if one is None else found[0] for name, one in self.told.items()}


class ThirdLoadFrees(FewBlocks):
    def load(self, loads: Iterable[CacheBlock]) -> None:
        loads = list(loads)
        super().load(loads)
        for one in loads:
            key = self.key(one.group, one.block_hash)
            self.uses[key] = self.uses.get(key, 0) + 1
            if self.uses[key] == 3 and key in self.rows:
                self.rows[key] = torch.zeros_like(self.rows[key])

    def __init__(self, context: KVConnectorContext) -> None:
        super().__init__(context)
        self.uses: dict[Key, int] = {}


class ThirdResetIsLate(FewBlocks):
    resets = 0

    def reset(self) -> None:
        self.resets += 1
        if self.resets != 3:
            super().reset()


class CopiesTooEarly(LayeredBlocks):
    def wait_layer(self, layer: int) -> None:
        super().save_layer(layer)

    def save_layer(self, layer: int) -> None:
        """Do nothing, because the part is there already."""


class CopiesTheFirstLayer(LayeredBlocks):
    def copy_part(self, group: int, position: int) -> None:
        super().copy_part(group, 0)


class HoldsWhatIsFilled(LayeredBlocks):
    def save_layer(self, layer: int) -> None:
        super().save_layer(layer)
        self.rows |= {self.key(one.group, one.block_hash): row for one, row in self.parts.items()}


class KeepsFailedParts(LayeredBlocks):
    def filling(self, blocks: Sequence[CacheBlock]) -> None:
        super().filling([one for one in blocks if one not in self.parts])


def _mutant(name: str, summary: str, level: Level, factory: Any) -> Mutant:
    right = reference.later if issubclass(factory, LaterBlocks) else reference.descriptor
    right = reference.lasting if issubclass(factory, LastingBlocks) else right
    right = reference.layered if issubclass(factory, LayeredBlocks) else right
    right = reference.files if issubclass(factory, FileBlocks) else right
    right = reference.checked if issubclass(factory, CheckedBlocks) else right
    right = reference.by_layer if issubclass(factory, LayerBlocks) else right
    right = reference.late_layered if issubclass(factory, LateLayerBlocks) else right
    right = reference.peers if issubclass(factory, PeerBlocks) else right
    changed = attrs.evolve(right, name=f"mutant_{name.replace('-', '_')}", summary=summary, factory=factory)
    return Mutant(name, summary, level, changed)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("by-hash-alone", "one group's blocks are found in another", Level.NUMERICS, ByHashAlone),
    _mutant("holds-anything", "says that it holds what nobody saved", Level.NUMERICS, HoldsAnything),
    _mutant("answers-for-all", "one hash that is held answers for all", Level.NUMERICS, AnswersForAll),
    _mutant("keeps-nothing", "saves nothing", Level.NUMERICS, KeepsNothing),
    _mutant("one-row-for-all", "blocks that are saved together get the last one's bytes", Level.NUMERICS, OneRowForAll),
    _mutant("half-blocks", "loads the first half of a block", Level.NUMERICS, HalfBlocks),
    _mutant("saves-later", "saves when the next step starts", Level.NUMERICS, SavesLater),
    _mutant("loads-later", "loads when the step is done", Level.NUMERICS, LoadsLater),
    _mutant("clears-saved", "clears what it saved", Level.NUMERICS, ClearsWhatItSaved),
    _mutant("shared-by-ranks", "one rank's heads are found by another", Level.NUMERICS, SharedByAllRanks),
    _mutant("arrives-early", "says that a block has arrived before it has", Level.NUMERICS, ArrivesEarly),
    _mutant("leaves-the-last", "finishes with loads under way", Level.HOSTILE, LeavesTheLast),
    _mutant("shifts-rows", "loads that end together get each other's bytes", Level.NUMERICS, ShiftsRows),
    _mutant("loses-the-last", "never ends the last of several loads", Level.NUMERICS, LosesTheLast),
    _mutant("cuts-states", "keeps no more of a state than of a block", Level.NUMERICS, CutsStates),
    _mutant("states-as-blocks", "finds a state where a block was saved", Level.NUMERICS, StatesAsBlocks),
    _mutant("saved-early", "says that a block is saved, and reads it afterwards", Level.NUMERICS, SavedEarly),
    _mutant("keeps-the-last-block", "never says that the last block is saved", Level.NUMERICS, KeepsTheLastBlock),
    _mutant("leaves-saves", "finishes with saves under way", Level.HOSTILE, LeavesSaves),
    _mutant("saves-in-the-step", "waits for its saves where the step starts", Level.HOSTILE, SavesInTheStep),
    _mutant("copies-too-early", "copies a layer's part before the layer has attended", Level.NUMERICS, CopiesTooEarly),
    _mutant("copies-one-layer", "copies the first layer's part for each layer", Level.NUMERICS, CopiesTheFirstLayer),
    _mutant("holds-what-is-filled", "holds what a step filled before it is saved", Level.NUMERICS, HoldsWhatIsFilled),
    _mutant("keeps-failed-parts", "saves what a failed step has made", Level.NUMERICS, KeepsFailedParts),
    _mutant("waits-in-the-step", "waits for its loads where the step starts", Level.HOSTILE, WaitsInTheStep),
    _mutant("knows-its-own-alone", "does not find the files of an earlier process", Level.NUMERICS, KnowsItsOwnAlone),
    _mutant("one-folder-for-all", "finds another model's files", Level.NUMERICS, OneFolderForAll),
    _mutant("trusts-files", "loads what a file holds", Level.HOSTILE, TrustsFiles),
    _mutant("digest-of-bytes", "takes another block's file for a block's own", Level.HOSTILE, DigestOfBytesAlone),
    _mutant("holds-unwritten", "holds what a full disk did not take", Level.HOSTILE, HoldsWhatItCouldNotWrite),
    _mutant("trusts-memory", "loads what its memory holds", Level.HOSTILE, TrustsItsMemory),
    _mutant("digest-of-rows", "takes another block's bytes for a block's own", Level.HOSTILE, DigestOfRowsAlone),
    _mutant("saves-unwritten", "saves blocks when it hears of them", Level.NUMERICS, SavesWhatIsNotWritten),
    _mutant("saves-before-layer", "saves a layer before it is written", Level.NUMERICS, SavesBeforeTheLayer),
    _mutant("one-layer-for-all", "saves the first layer of a group for all", Level.NUMERICS, OneLayerForAll),
    _mutant("loads-behind-layers", "loads a layer when it has attended", Level.NUMERICS, LoadsBehindTheLayers),
    _mutant("waits-for-layers", "loads layer by layer, and declares late layers", Level.NUMERICS, WaitsForTheLayers),
    _mutant("keeps-broken-parts", "keeps layers of a pass that broke", Level.HOSTILE, KeepsPartsOfBrokenPasses),
    _mutant("asks-anybody", "asks connectors that its options do not name", Level.HOSTILE, AsksAnybody),
    _mutant("asks-without-request", "finds a peer's blocks for any request", Level.NUMERICS, AsksWithoutARequest),
    _mutant("blocks-alone", "hands over no states", Level.NUMERICS, BlocksAlone),
    _mutant("no-lost-item", "does not say that an item is lost", Level.NUMERICS, TellsNoLostItem),
    _mutant("items-again", "tells of an item twice", Level.NUMERICS, TellsItemsAgain),
    _mutant("items-in-float", "hands over items in another dtype", Level.NUMERICS, ItemsInFullPrecision),
    _mutant("one-item-for-all", "items that are loaded together get the first one's", Level.NUMERICS, OneItemForAll),
    _mutant("writes-first", "loads before it saves", Level.HOSTILE, WritesFirst),
    _mutant("room-of-loads", "makes room of what is about to be loaded", Level.HOSTILE, MakesRoomOfLoads),
    _mutant("ignores-its-room", "keeps more than its option allows", Level.HOSTILE, IgnoresItsRoom),
    _mutant("silent-failures", "does not say that a load failed", Level.HOSTILE, SilentFailures),
    _mutant("fails-for-ever", "says again and again that a load failed", Level.HOSTILE, FailsForEver),
    _mutant("fail-together", "good loads fail beside a bad one", Level.HOSTILE, AllFailTogether),
    _mutant("drops-saved-again", "loses what is saved twice", Level.HOSTILE, DropsWhatIsSavedAgain),
    _mutant("keeps-through-reset", "holds blocks of the old weights", Level.HOSTILE, KeepsThroughReset),
    _mutant("resets-names", "finds old bytes under new names", Level.HOSTILE, ResetsTheNamesAlone),
    _mutant("third-load", "gives a block's room away when it was loaded three times", Level.HOSTILE, ThirdLoadFrees),
    _mutant("third-reset", "the third reset keeps what is held", Level.HOSTILE, ThirdResetIsLate),
    _mutant("forgets-when-full", "writes over the newest block and keeps its name", Level.STATEFUL, ForgetsWhenFull),
)

CORRECT: tuple[Correct, ...] = (
    Correct("the least recently used of a few blocks makes room", reference.descriptor),
    Correct("the first few blocks stay, copied together", reference.one_copy),
    Correct("loads that end later", reference.later),
    Correct("saves and loads that end later", reference.lasting),
    Correct("parts of blocks, copied as their layers are told", reference.layered),
    Correct("blocks with digests", reference.checked),
    Correct("layers saved when they are written", reference.by_layer),
    Correct("layers saved behind the pass too", reference.late_layered),
    Correct("blocks and items of peers", reference.peers),
    Correct("files that outlive the process", reference.files),
)
