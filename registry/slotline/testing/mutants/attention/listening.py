"""Mutants that forget one kind of event of blocks, and a right one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve

from slotline.registry.capability import Set
from slotline.registry.contracts.block_events import BlockEvents
from slotline.registry.contracts.cache_tensors import PLAIN
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.attention.bounded import OFFER as BOUNDED
from slotline.testing.mutants.attention.making import mutant, offer
from slotline.testing.reference.attention.listening import ListeningAttention


class ForgetsGiven(ListeningAttention):
    """Given and returned blocks keep the bounds of their old keys."""

    def on_given(self, block: int) -> None:
        pass

    def on_returned(self, block: int) -> None:
        pass


class ForgetsRestored(ListeningAttention):
    """Restored blocks have no bounds."""

    def on_restored(self, block: int) -> None:
        pass


class ForgetsLoaded(ListeningAttention):
    """Loaded blocks keep what was known of them."""

    def on_loaded(self, block: int) -> None:
        pass


class LoadedIsKept(ListeningAttention):
    """Returned blocks keep their bounds, and loaded ones are taken for restored ones."""

    def on_returned(self, block: int) -> None:
        pass

    def on_restored(self, block: int) -> None:
        pass

    def on_loaded(self, block: int) -> None:
        if not hasattr(self, "seen"):
            self.seen = set[int]()
        if block not in self.seen:
            self.seen.add(block)
            super().on_loaded(block)


class ReturnedLast(ListeningAttention):
    """Returned blocks are dropped after the others were heard of."""

    def block_events(self, events: Sequence[BlockEvents]) -> None:
        nothing = [evolve(each, returned=each.returned[:0]) for each in events]
        super().block_events(nothing)
        for each in events:
            for block in each.returned.tolist():
                self.on_returned(block)


class FirstOfEach(ListeningAttention):
    """Of each kind of event only the first block is heard."""

    def block_events(self, events: Sequence[BlockEvents]) -> None:
        names = ("returned", "given", "restored", "loaded")
        super().block_events([evolve(each, **{name: getattr(each, name)[:1] for name in names}) for each in events])


class GivenIsRead(ListeningAttention):
    """Takes the old keys of a given block for its own."""

    def write(self, layer: Any, key: Any, value: Any, cache: Any, plan: Any) -> None:
        self.current(layer, cache)
        super().write(layer, key, value, cache, plan)

    def on_given(self, block: int) -> None:
        self.read_anew(block)


class ByHash(ListeningAttention):
    """Reads a loaded block only if its hash is new, as if blocks could not be filled again."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.known: set[bytes] = set()

    def block_events(self, events: Sequence[BlockEvents]) -> None:
        for each in events:
            first = len(each.restored)
            fresh = [hash_ not in self.known for hash_ in each.hashes[first:]]
            self.known.update(each.hashes)
            super().block_events([evolve(each, loaded=each.loaded[fresh])])


OFFER: dict[str, Any] = {**BOUNDED, "cache_formats": Set((PLAIN,)), "block_events": True}


def _listening(name: str, level: Level, summary: str, factory: Callable[..., Any]) -> Mutant:
    return mutant(name, level, summary, factory, **OFFER)


L1, L3 = Level.NUMERICS, Level.STATEFUL


MUTANTS = (
    _listening("events-given-forgotten", L3, "given blocks keep the bounds of old keys", ForgetsGiven),
    _listening("events-restored-forgotten", L3, "restored blocks have no bounds", ForgetsRestored),
    _listening("events-loaded-forgotten", L1, "loaded blocks have no bounds of their new keys", ForgetsLoaded),
    _listening("events-loaded-once", L3, "a block that is loaded a second time keeps its first bounds", LoadedIsKept),
    _listening("events-returned-last", L3, "blocks that were taken again are dropped", ReturnedLast),
    _listening("events-first-block", L1, "of each kind of event only the first block is heard", FirstOfEach),
    _listening("events-given-read", L3, "a given block begins with its old keys", GivenIsRead),
    _listening("events-by-hash", L3, "a hash that was loaded before is not read again", ByHash),
)
CORRECT = (
    Correct("keeps bounds of its own and hears of blocks", offer("listening", "hears", ListeningAttention, **OFFER)),
)
