"""Broken drafters, one bug each, and right ones that differ."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts import ComputedTokens, Draft, DraftBatch, DrafterCapabilities, DrafterContext
from slotline.registry.descriptor import Descriptor, Kind
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.drafter_heads import MUTANTS as HEADS
from slotline.testing.reference import drafter as reference
from slotline.testing.reference import drafter_heads
from slotline.testing.reference.drafter import (
    Array,
    HiddenHeads,
    MaskedBlock,
    PairCounts,
    PromptLookup,
    TokenState,
    Tries,
    TwoBranches,
)

# --- prompt lookup, which has no state and no probabilities


class FourthRequestOfARow(PromptLookup):
    """The fourth request of a row gets what the third one was read as."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.admitted: dict[int, int] = {}
        self.last: dict[int, torch.Tensor] = {}

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        super().admit(row, prompt_token_ids)
        self.admitted[row] = self.admitted.get(row, 0) + 1

    def histories(self, batch: DraftBatch) -> list[torch.Tensor]:
        found = super().histories(batch)
        for place, row in enumerate(batch.rows.tolist()):
            if self.admitted.get(row, 0) == 4:
                found[place] = self.last.get(row, found[place])
            self.last[row] = found[place].clone()
        return found


class ReadsOneBeyond(PromptLookup):
    def histories(self, batch: DraftBatch) -> list[torch.Tensor]:
        lengths = batch.num_tokens.tolist()
        return [batch.token_table[row, : n + 1] for row, n in zip(batch.rows.tolist(), lengths, strict=True)]


class FirstLengthForAll(PromptLookup):
    def histories(self, batch: DraftBatch) -> list[torch.Tensor]:
        return [batch.token_table[row, : int(batch.num_tokens[0])] for row in batch.rows.tolist()]


class PlaceInsteadOfRow(PromptLookup):
    def histories(self, batch: DraftBatch) -> list[torch.Tensor]:
        return [batch.token_table[place, :length] for place, length in enumerate(batch.num_tokens.tolist())]


class GathersPastTheRow(PromptLookup):
    def histories(self, batch: DraftBatch) -> list[torch.Tensor]:
        found = super().histories(batch)
        window = batch.num_tokens.long()[:, None] + torch.arange(self.num_tokens)
        batch.token_table[batch.rows].gather(1, window)  # room for the drafts, which the last places do not have
        return found


class WritesDraftsIntoTable(PromptLookup):
    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        for row, n, ids in zip(batch.rows.tolist(), batch.num_tokens.tolist(), draft.token_ids.cpu(), strict=True):
            batch.token_table[row, n : n + len(ids)] = ids[: batch.token_table.shape[1] - n]
        return draft


class SortedByRow(PromptLookup):
    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        draft.token_ids = draft.token_ids[batch.rows.argsort().to(draft.token_ids.device)]
        return draft


class RandomMatch(PromptLookup):
    def following(self, history: torch.Tensor, start: int) -> list[int]:
        return super().following(history, int(torch.randint(1, start + 1, ())))


class VocabularySizeForNothing(PromptLookup):
    def continuation(self, history: torch.Tensor) -> list[int]:
        return super().continuation(history) or [self.vocab_size]


class HoleInTheDraft(PromptLookup):
    def continuation(self, history: torch.Tensor) -> list[int]:
        return [-1 if place == 1 else token for place, token in enumerate(super().continuation(history))]


class NeedsThreeTokens(PromptLookup):
    def continuation(self, history: torch.Tensor) -> list[int]:
        if history[-3] < 0:  # an IndexError for a prompt of one token
            return []
        return super().continuation(history)


class OneTooMany(PromptLookup):
    def pack(self, drafts: list[list[int]]) -> torch.Tensor:
        return torch.nn.functional.pad(super().pack(drafts), (1, 0), value=0)


class NarrowIds(PromptLookup):
    def pack(self, drafts: list[list[int]]) -> torch.Tensor:
        return super().pack(drafts).int()


class NoEmptyBatch(PromptLookup):
    def pack(self, drafts: list[list[int]]) -> torch.Tensor:
        return torch.stack(list(super().pack(drafts)))


class CachesByRowAndLength(PromptLookup):
    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.cache: dict[tuple[int, int], list[int]] = {}

    def propose(self, batch: DraftBatch) -> Draft:
        keys = zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True)
        drafts = [
            self.cache.setdefault(key, self.continuation(history))
            for key, history in zip(keys, self.histories(batch), strict=True)
        ]
        return Draft(token_ids=self.pack(drafts))


class UndeclaredParents(PromptLookup):
    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        draft.parents = torch.arange(-1, self.num_tokens - 1)
        return draft


class ParentOfItself(TwoBranches):
    def parents(self) -> list[int]:
        return [parent + 1 for parent in super().parents()]


# --- a tree for each request


class ParentAfterInTheLastTree(Tries):
    def trie(self, history: list[int]) -> list[tuple[int, int]]:
        nodes = super().trie(history)
        forks = len(nodes) > 2 and nodes[2][1] != 1  # most trees are chains
        return [(token, at if forks and at == 2 else parent) for at, (token, parent) in enumerate(nodes)]


class FirstTreeForAll(Tries):
    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        if draft.parents is not None and draft.parents.dim() == 2 and len(draft.parents):
            draft.parents = draft.parents[:1].expand_as(draft.token_ids).contiguous()
        return draft


class TreesInTheOrderOfRows(Tries):
    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        if draft.parents is not None and draft.parents.dim() == 2:
            draft.parents = draft.parents[batch.rows.argsort().to(draft.parents.device)]
        return draft


class TreesWhereOneIsVerified(Tries):
    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.differs = True


class OneParentTooFew(Tries):
    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        if draft.parents is not None and draft.parents.dim() == 2:
            draft.parents = draft.parents[:, : self.num_tokens - 1]
        return draft


class ParentsCountFromOne(Tries):
    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        if self.differs and draft.parents is not None:
            draft.parents = draft.parents + 1
        return draft


class NarrowParents(Tries):
    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        return attrs.evolve(draft, parents=None if draft.parents is None else draft.parents.int())


class GarbageParentsAfterTheEnd(Tries):
    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        if draft.parents is not None and draft.parents.dim() == 2:
            draft.parents[draft.token_ids < 0] = self.num_tokens
        return draft


class NoParentsOfRequests(Tries):
    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        return Draft(token_ids=draft.token_ids) if self.differs else draft


class TreeOfTheRowBefore(Tries):
    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.kept: dict[int, torch.Tensor] = {}

    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        if self.differs and draft.parents is not None:
            for index, row in enumerate(batch.rows.tolist()):
                draft.parents[index] = self.kept.setdefault(row, draft.parents[index].clone())
        return draft


class TreeByTheSizeOfTheBatch(Tries):
    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        if self.differs and len(batch.rows) > 4:  # "all are alike by then"
            draft.parents = torch.arange(-1, self.num_tokens - 1, device=draft.token_ids.device)
        return draft


# --- heads on hidden states


class CountsOnTheHost(HiddenHeads):
    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        odd = (batch.num_tokens % 2).bool().to(draft.token_ids.device)
        return attrs.evolve(draft, token_ids=torch.where(odd[:, None], draft.token_ids, draft.token_ids.flip(1)))


class FirstHiddenStateForAll(HiddenHeads):
    def propose(self, batch: DraftBatch) -> Draft:
        assert batch.hidden_states is not None
        return super().propose(attrs.evolve(batch, hidden_states=batch.hidden_states[:1].expand(len(batch.rows), -1)))


# --- counted pairs, with state and probabilities


class KeepsTheOldRow(PairCounts):
    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        self.counts.setdefault(row, {})
        self.counted[row] = 0

    def release(self, row: int) -> None: ...


class ForgetsOnlyOnRelease(PairCounts):
    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        self.counts.setdefault(row, {})
        self.counted.setdefault(row, 0)


class ReleaseForgetsAll(PairCounts):
    def release(self, row: int) -> None:
        super().release(row)
        self.counts = {other: {} for other in self.counts}


class CountsTheLastStepOnly(PairCounts):
    def count(self, row: int, history: list[int]) -> None:
        if self.counted[row]:
            self.counted[row] = max(self.counted[row], len(history) - self.num_tokens - 1)
        super().count(row, history)


class FirstTemperatureForAll(PairCounts):
    def propose(self, batch: DraftBatch) -> Draft:
        assert batch.temperature is not None
        return super().propose(attrs.evolve(batch, temperature=batch.temperature[:1].expand(len(batch.rows))))


class OwnChance(PairCounts):
    def draw(self, one: Array, uniform: float) -> int:
        return super().draw(one, float(torch.rand(())))


class OneDrawForAllPositions(PairCounts):
    def propose(self, batch: DraftBatch) -> Draft:
        assert batch.uniforms is not None
        return super().propose(attrs.evolve(batch, uniforms=batch.uniforms[:, :1].repeat(self.num_tokens, axis=1)))


class DrawsPastTheEnd(PairCounts):
    def draw(self, one: Array, uniform: float) -> int:
        return int(one.cumsum(dtype=np.float32).searchsorted(np.float32(uniform), side="right"))  # which rounds up to 1


class SharpenedDraws(PairCounts):
    def draw(self, one: Array, uniform: float) -> int:
        return super().draw(one**2, uniform)


class GreedyDraws(PairCounts):
    def draw(self, one: Array, uniform: float) -> int:
        return int(one.argmax())


class StatesSharpened(PairCounts):
    def stated(self, one: Array, row: int, token: int) -> Array:
        sharpened = one**1.5
        return np.asarray(sharpened / sharpened.sum())


class StatesTheNextPosition(PairCounts):
    def stated(self, one: Array, row: int, token: int) -> Array:
        return np.asarray(0.5 * one + 0.5 * self.distribution(row, token, 1.0))


class Unnormalised(PairCounts):
    def stated(self, one: Array, row: int, token: int) -> Array:
        return np.asarray(one / one.max())


class NoProbabilities(PairCounts):
    def propose(self, batch: DraftBatch) -> Draft:
        return Draft(token_ids=super().propose(batch).token_ids)


# --- blocks over layers of its own


class BlockOfTwoMore(MaskedBlock):
    def attend(self, batch: DraftBatch) -> Any:
        assert batch.attend_block is not None
        block = 1 + self.num_tokens
        whole: Any = batch.attend_block(2 + block)

        def some(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any) -> torch.Tensor:
            more = (
                torch.nn.functional.pad(x.unflatten(0, (-1, block)), (0, 0, 0, 0, 0, 2)) for x in (query, key, value)
            )
            out: torch.Tensor = whole(layer, *(x.flatten(0, 1) for x in more), sinks)
            kept: torch.Tensor = out.unflatten(0, (-1, 2 + block))[:, :block].flatten(0, 1)
            return kept

        return some


class PlacesFromTheStep(MaskedBlock):
    def places(self, computed: ComputedTokens) -> torch.Tensor:
        starts = computed.query_start_loc.to(computed.positions.device)
        counts = starts.diff()
        return torch.arange(len(computed.positions), device=starts.device) - starts[:-1].repeat_interleave(counts)


class FirstNewestForAll(MaskedBlock):
    def newest(self, batch: DraftBatch) -> torch.Tensor:
        return batch.last_token_ids[:1].expand(len(batch.rows))


class PlacesOnTheHost(MaskedBlock):
    def propose(self, batch: DraftBatch) -> Draft:
        return super().propose(attrs.evolve(batch, positions=batch.num_tokens.long().to(self.device) - 1))


class StoresEachPlaceOnce(MaskedBlock):
    """Leaves the keys of drafts that fell in their places."""

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.stored: dict[tuple[int, int], torch.Tensor] = {}

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        self.stored = {key: state for key, state in self.stored.items() if key[0] != row}

    def observe(self, computed: ComputedTokens) -> None:
        assert computed.layer_hidden_states is not None
        starts = computed.query_start_loc.tolist()
        states = computed.layer_hidden_states.clone()
        for row, first, end in zip(computed.rows.tolist(), starts[:-1], starts[1:], strict=True):
            for i in range(first, end):
                states[i] = self.stored.setdefault((row, int(computed.positions[i])), states[i].clone())
        super().observe(attrs.evolve(computed, layer_hidden_states=states))


class StoresTheLastChunk(MaskedBlock):
    """Keeps nothing of a long step but its last tokens."""

    def observe(self, computed: ComputedTokens) -> None:
        assert computed.layer_hidden_states is not None
        states = computed.layer_hidden_states.clone()
        for first, end in zip(
            computed.query_start_loc[:-1].tolist(), computed.query_start_loc[1:].tolist(), strict=True
        ):
            states[first : max(end - 8, first)] = 0
        super().observe(attrs.evolve(computed, layer_hidden_states=states))


class BlockOverTheFirstRow(MaskedBlock):
    """Gives all requests the output of the first one's block where they have the same newest token's place."""

    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        same = batch.positions == batch.positions[:1]
        return Draft(token_ids=torch.where(same[:, None], draft.token_ids[:1], draft.token_ids))


# --- a state of each row


class NothingTakenBack(TokenState):
    """Counts drafts that fell."""

    def advance(self, row: int, place: int, tokens: list[int]) -> None:
        super().advance(row, len(self.states[row]), tokens)

    def known(self, row: int, position: int) -> torch.Tensor:
        return self.states[row][-1]


class LastObserved(TokenState):
    """Takes the state after the last token of a step, though drafts of it fell."""

    def known(self, row: int, position: int) -> torch.Tensor:
        return self.states[row][-1]


class KeepsWhatWasPreempted(TokenState):
    """Goes on from the state that a preempted request had."""

    def preempt(self, row: int) -> None:
        self.before = self.states[row][-1] if self.states[row] else torch.zeros(self.width)
        self.states[row] = []

    def advance(self, row: int, place: int, tokens: list[int]) -> None:
        super().advance(row, place, tokens)
        kept = getattr(self, "before", None)
        if kept is not None and place == 0:
            del self.before
            self.states[row] = [state + kept for state in self.states[row]]


class PreemptForgetsAll(TokenState):
    def preempt(self, row: int) -> None:
        self.states = {other: [torch.zeros(self.width) for _ in states] for other, states in self.states.items()}
        self.states[row] = []


class PreemptForgetsTheRow(TokenState):
    def preempt(self, row: int) -> None:
        del self.states[row]


class FailsAfterTheEnd(TokenState):
    """Does not look at `served`, and has no state of a row that was released."""

    def observe(self, computed: ComputedTokens) -> None:
        super().observe(attrs.evolve(computed, served=torch.ones_like(computed.rows, dtype=torch.bool)))


class OldStateForTheNextRequest(TokenState):
    """Keeps a row's states after its release, and goes on from them."""

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        self.states.setdefault(row, [])

    def release(self, row: int) -> None: ...

    def advance(self, row: int, place: int, tokens: list[int]) -> None:
        old = self.states[row][-1] if self.states[row] and place == 0 else torch.zeros(self.width)
        super().advance(row, place, tokens)
        self.states[row][place:] = [state + old for state in self.states[row][place:]]


class StateOfThePlace(TokenState):
    """Keeps states by place in the step."""

    def observe(self, computed: ComputedTokens) -> None:
        super().observe(attrs.evolve(computed, rows=torch.sort(computed.rows).values))


class OneStateShort(TokenState):
    """Leaves out the newest token where drafts fell."""

    def propose(self, batch: DraftBatch) -> Draft:
        for row, position in zip(batch.rows.tolist(), batch.positions.tolist(), strict=True):
            if len(self.states[row]) > position:
                self.states[row][position - 1] = self.states[row][max(position - 2, 0)]
        return super().propose(batch)


class NoPreempt(TokenState):
    preempt = None  # type: ignore[assignment]


class FirstStateForAll(TokenState):
    def propose(self, batch: DraftBatch) -> Draft:
        self.first = [*batch.rows.tolist(), -1][0]
        return super().propose(batch)

    def known(self, row: int, position: int) -> torch.Tensor:
        states = self.states[self.first]
        return states[min(position, len(states)) - 1]


class SkipsSingleTokens(TokenState):
    """Sees steps of several tokens alone."""

    def advance(self, row: int, place: int, tokens: list[int]) -> None:
        if len(tokens) > 1:
            super().advance(row, place, tokens)


def _mutant(name: str, summary: str, level: Level, factory: Any, base: Descriptor[Any] | None = None) -> Mutant:
    if base is None:
        base = next(item for item in _BASES if issubclass(factory, item.factory))
    changed = attrs.evolve(base, name=f"mutant_{name.replace('-', '_')}", summary=summary, factory=factory)
    return Mutant(name, summary, level, changed)


_BASES = (
    reference.request_trees,
    reference.tree,
    reference.descriptor,
    reference.hidden_heads,
    reference.probabilistic,
    reference.masked_block,
    reference.token_state,
)
_ONE_TREE = attrs.evolve(
    reference.request_trees,
    capabilities=attrs.evolve(reference.request_trees.capabilities, request_trees=Flag(False)),
)
_NO_TREE = attrs.evolve(
    reference.request_trees, capabilities=attrs.evolve(reference.request_trees.capabilities, tree=Flag(False))
)
_NO_HISTORY = Descriptor(
    kind=Kind.DRAFTER,
    name="no_history",
    capabilities=DrafterCapabilities(devices=Set(None), max_tokens=Max(), probabilities=Flag(False)),
    factory=PromptLookup,
)

_CAUSAL_BLOCKS = attrs.evolve(
    reference.masked_block, capabilities=attrs.evolve(reference.masked_block.capabilities, block_attention="causal")
)
_BLOCKS_OF_NOTHING = attrs.evolve(
    reference.masked_block, capabilities=attrs.evolve(reference.masked_block.capabilities, needs_kv_group=False)
)
_STATE_OF_NOTHING = attrs.evolve(
    reference.token_state, capabilities=attrs.evolve(reference.token_state.capabilities, needs_computed=False)
)

MUTANTS: tuple[Mutant, ...] = (
    _mutant("one-beyond", "reads one token beyond the accepted history", Level.HOSTILE, ReadsOneBeyond),
    _mutant("first-length", "uses the first request's length for all", Level.HOSTILE, FirstLengthForAll),
    _mutant("place-for-row", "reads the table by place in the batch, not by row", Level.HOSTILE, PlaceInsteadOfRow),
    _mutant("past-the-row", "gathers beyond the end of the table near max_model_len", Level.HOSTILE, GathersPastTheRow),
    _mutant("writes-table", "writes its drafts into the core's token table", Level.HOSTILE, WritesDraftsIntoTable),
    _mutant("sorted-by-row", "answers in the order of rows, not of the batch", Level.HOSTILE, SortedByRow),
    _mutant("random-match", "draws from a generator of its own", Level.NUMERICS, RandomMatch),
    _mutant("vocab-size", "proposes the token vocab_size", Level.NUMERICS, VocabularySizeForNothing),
    _mutant("hole", "puts -1 in the middle and goes on", Level.NUMERICS, HoleInTheDraft),
    _mutant("short-prompt", "fails on a prompt of one token", Level.HOSTILE, NeedsThreeTokens),
    _mutant("one-too-many", "proposes one token more than negotiated", Level.NUMERICS, OneTooMany),
    _mutant("int32", "returns int32 ids", Level.NUMERICS, NarrowIds),
    _mutant("empty-batch", "fails on a step without requests", Level.HOSTILE, NoEmptyBatch),
    _mutant("caches-by-length", "keeps drafts by row and length over requests", Level.HOSTILE, CachesByRowAndLength),
    _mutant("undeclared-parents", "returns parents without declaring a tree", Level.NUMERICS, UndeclaredParents),
    _mutant("own-parent", "a node of its tree is its own parent", Level.NUMERICS, ParentOfItself),
    _mutant("last-parent", "a node of one request's tree is its own parent", Level.NUMERICS, ParentAfterInTheLastTree),
    _mutant("first-tree", "gives all requests the first one's tree", Level.HOSTILE, FirstTreeForAll),
    _mutant("trees-by-row", "gives trees in the order of rows, not of the batch", Level.HOSTILE, TreesInTheOrderOfRows),
    _mutant("trees-for-one", "gives a tree for each where one is verified", Level.NUMERICS, TreesWhereOneIsVerified),
    _mutant("parent-too-few", "gives a parent less than nodes", Level.NUMERICS, OneParentTooFew),
    _mutant("parents-from-one", "counts nodes from 1 in parents of requests", Level.NUMERICS, ParentsCountFromOne),
    _mutant("narrow-parents", "returns int32 parents", Level.NUMERICS, NarrowParents),
    _mutant("parents-after-end", "leaves garbage as parents after the end", Level.NUMERICS, GarbageParentsAfterTheEnd),
    _mutant("no-parents", "returns no parents where trees are verified", Level.NUMERICS, NoParentsOfRequests),
    _mutant("kept-tree", "gives a row the tree that it first had", Level.HOSTILE, TreeOfTheRowBefore),
    _mutant("tree-by-batch", "gives large batches a chain", Level.HOSTILE, TreeByTheSizeOfTheBatch),
    _mutant(
        "undeclared-trees",
        "gives a tree for each request without declaring it",
        Level.NUMERICS,
        TreesWhereOneIsVerified,
        base=_ONE_TREE,
    ),
    _mutant("trees-no-tree", "declares trees of requests and no tree", Level.CONTRACT, Tries, base=_NO_TREE),
    _mutant(
        "undeclared-history", "reads the history without declaring it", Level.HOSTILE, PromptLookup, base=_NO_HISTORY
    ),
    _mutant("first-hidden", "uses the first hidden state for all", Level.HOSTILE, FirstHiddenStateForAll),
    _mutant("host-counts", "declares on_device and reads the host's counts", Level.HOSTILE, CountsOnTheHost),
    _mutant("old-row", "a new request starts with the counts of the row's last one", Level.HOSTILE, KeepsTheOldRow),
    _mutant("admit-forgets-not", "forgets on release alone, not on admit", Level.HOSTILE, ForgetsOnlyOnRelease),
    _mutant("release-all", "forgets all requests when one leaves", Level.HOSTILE, ReleaseForgetsAll),
    _mutant("last-step-only", "misses tokens that came while it was not asked", Level.STATEFUL, CountsTheLastStepOnly),
    _mutant("first-temperature", "uses the first request's temperature for all", Level.HOSTILE, FirstTemperatureForAll),
    _mutant("own-chance", "ignores the uniforms that it is given", Level.NUMERICS, OwnChance),
    _mutant("one-draw", "uses one draw for all positions", Level.NUMERICS, OneDrawForAllPositions),
    _mutant("past-the-end", "rounds a draw up to 1 and proposes vocab_size", Level.NUMERICS, DrawsPastTheEnd),
    _mutant("sharpened-draws", "draws from a sharper distribution than it states", Level.NUMERICS, SharpenedDraws),
    _mutant("greedy-draws", "takes the likeliest token and states the distribution", Level.NUMERICS, GreedyDraws),
    _mutant("sharpened-statement", "states a sharper distribution than it draws from", Level.NUMERICS, StatesSharpened),
    _mutant("next-position", "mixes in the probabilities of the next position", Level.NUMERICS, StatesTheNextPosition),
    _mutant("unnormalised", "states weights that do not sum to 1", Level.NUMERICS, Unnormalised),
    _mutant("no-probabilities", "declares probabilities and returns none", Level.NUMERICS, NoProbabilities),
    _mutant("causal-blocks", "declares causal blocks, asks for full ones", Level.NUMERICS, MaskedBlock, _CAUSAL_BLOCKS),
    _mutant("no-layers", "declares blocks and no layers", Level.CONTRACT, MaskedBlock, _BLOCKS_OF_NOTHING),
    _mutant("large-block", "asks for more queries than drafts and one", Level.NUMERICS, BlockOfTwoMore),
    _mutant("step-places", "counts positions from the start of a step", Level.HOSTILE, PlacesFromTheStep),
    _mutant("first-newest", "begins all blocks with the first newest token", Level.HOSTILE, FirstNewestForAll),
    _mutant("host-places", "places a block by the host's counts", Level.HOSTILE, PlacesOnTheHost),
    _mutant("stored-once", "leaves keys of fallen drafts where they are", Level.HOSTILE, StoresEachPlaceOnce),
    _mutant("last-chunk", "keeps the last 8 tokens of a long step", Level.HOSTILE, StoresTheLastChunk),
    _mutant("block-by-place", "shares a block among rows of equal length", Level.HOSTILE, BlockOverTheFirstRow),
    _mutant("nothing-back", "counts drafts that fell", Level.HOSTILE, NothingTakenBack),
    _mutant("last-observed", "takes the state after a fallen draft", Level.HOSTILE, LastObserved),
    _mutant("kept-preempted", "goes on from a preempted state", Level.NUMERICS, KeepsWhatWasPreempted),
    _mutant("preempt-all", "forgets all rows when one is preempted", Level.HOSTILE, PreemptForgetsAll),
    _mutant("preempt-row", "has no row after a preemption", Level.NUMERICS, PreemptForgetsTheRow),
    _mutant("late-step", "fails on the last step of a row that left", Level.HOSTILE, FailsAfterTheEnd),
    _mutant("old-state", "a new request goes on from the row's old state", Level.HOSTILE, OldStateForTheNextRequest),
    _mutant("state-by-place", "keeps states in the order of rows", Level.NUMERICS, StateOfThePlace),
    _mutant("one-short", "leaves the last token out where drafts fell", Level.HOSTILE, OneStateShort),
    _mutant("first-state", "uses the first row's state for all", Level.HOSTILE, FirstStateForAll),
    _mutant("no-singles", "misses steps of one token", Level.HOSTILE, SkipsSingleTokens),
    _mutant("no-preempt", "declares a state and has no preempt", Level.CONTRACT, NoPreempt),
    *HEADS,
    _mutant("fourth-request", "reads the third request of a row for the fourth", Level.HOSTILE, FourthRequestOfARow),
    _mutant("blind-state", "declares a state and sees no steps", Level.CONTRACT, TokenState, _STATE_OF_NOTHING),
)

CORRECT: tuple[Correct, ...] = (
    Correct("prompt lookup: no state, one-point proposals", reference.descriptor),
    Correct("two lookups in a tree", reference.tree),
    Correct("lookups in a tree for each request", reference.request_trees),
    Correct("heads on hidden states: no history", reference.hidden_heads),
    Correct("counted pairs: state by row, draws with probabilities", reference.probabilistic),
    Correct("a block of masks over a layer of its own", reference.masked_block),
    Correct("a recurrent state of each row", reference.token_state),
    Correct("Medusa's published heads, one after the other", drafter_heads.medusa),
    Correct("DFlash's published head over whole histories", drafter_heads.dflash),
)
