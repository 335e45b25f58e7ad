"""Small drafters: prompt lookup, trees of lookups, heads on hidden states, and counted pairs with probabilities.

`MaskedBlock` has a layer of its own and drafts in one pass, `TokenState` keeps a recurrent state of each row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slotline.registry.capability import Flag, Max, Set
from slotline.registry.contracts import (
    AttentionLayer,
    ComputedTokens,
    Draft,
    DraftBatch,
    DrafterCapabilities,
    DrafterContext,
    DrafterInspection,
)
from slotline.registry.descriptor import Descriptor, Kind

Array = np.ndarray[Any, np.dtype[np.float64]]


class PromptLookup:
    """Drafter that proposes the tokens after the latest earlier occurrence of the history's last tokens.

    The idea is A. Saxena's "Prompt lookup decoding" (2023). It has no state except the history.
    """

    longest_ngram = 3

    def __init__(self, context: DrafterContext) -> None:
        self.num_tokens = context.num_tokens
        self.vocab_size = context.vocab_size
        self.device = context.device

    def admit(self, row: int, prompt_token_ids: list[int]) -> None: ...

    def release(self, row: int) -> None: ...

    def propose(self, batch: DraftBatch) -> Draft:
        return Draft(token_ids=self.pack([self.continuation(history) for history in self.histories(batch)]))

    def histories(self, batch: DraftBatch) -> list[torch.Tensor]:
        """Return the accepted tokens of each request, [n] int32."""
        lengths = batch.num_tokens.tolist()
        return [batch.token_table[row, :length] for row, length in zip(batch.rows.tolist(), lengths, strict=True)]

    def continuation(self, history: torch.Tensor) -> list[int]:
        """Return the tokens after the latest match of the longest suffix that has a match, or none."""
        for n in range(min(self.longest_ngram, len(history) - 1), 0, -1):
            windows = history[:-1].unfold(0, n, 1)  # [len - n, n], the suffix itself left out
            matches = (windows == history[-n:]).all(dim=1).nonzero()
            if len(matches):
                return self.following(history, int(matches[-1]) + n)
        return []

    def following(self, history: torch.Tensor, start: int) -> list[int]:
        """Return up to `num_tokens` tokens of the history from `start` on."""
        return history[start : start + self.num_tokens].tolist()

    def pack(self, drafts: list[list[int]]) -> torch.Tensor:
        """Return [num_requests, num_tokens] int64, with -1 after each proposal."""
        rows = [draft + [-1] * (self.num_tokens - len(draft)) for draft in drafts]
        return torch.tensor(rows, dtype=torch.int64, device=self.device).reshape(len(rows), self.num_tokens)


class TwoBranches(PromptLookup):
    """Drafter of a tree of two chains, from the latest and the earliest occurrence of the newest token.

    A short chain is filled with token 0, so that all requests share one shape.
    """

    def propose(self, batch: DraftBatch) -> Draft:
        draft = super().propose(batch)
        draft.parents = torch.tensor(self.parents(), device=self.device)
        return draft

    def parents(self) -> list[int]:
        """Return the parents. The first chain has the larger half of the nodes."""
        first = (self.num_tokens + 1) // 2
        return [*range(-1, first - 1), -1, *range(first, self.num_tokens - 1)][: self.num_tokens]

    def continuation(self, history: torch.Tensor) -> list[int]:
        matches = (history[:-1] == history[-1]).nonzero().flatten().tolist()
        first = (self.num_tokens + 1) // 2
        chains = ((matches[-1:], first), (matches[:1], self.num_tokens - first))
        return [token for match, length in chains for token in self.chain(history, match, length)]

    def chain(self, history: torch.Tensor, match: list[int], length: int) -> list[int]:
        """Return `length` tokens after a match."""
        found = [int(token) for at in match for token in history[at + 1 : at + 1 + length]]
        return found + [0] * (length - len(found))


class Tries(TwoBranches):
    """Drafter of a tree for each request: what followed each earlier occurrence of the newest token, as a trie.

    Later occurrences come first. Where one tree is verified for all requests it has two branches.
    """

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.differs = context.form == "request_trees"

    def propose(self, batch: DraftBatch) -> Draft:
        if not self.differs:
            return super().propose(batch)
        tries = [self.trie(history.tolist()) for history in self.histories(batch)]
        token_ids = self.pack([[token for token, _ in trie] for trie in tries])
        parents = self.pack([[parent for _, parent in trie] for trie in tries])  # filled up with -1 too
        return Draft(token_ids=token_ids, parents=parents)

    def trie(self, history: list[int]) -> list[tuple[int, int]]:
        """Return the nodes, a token and a parent each, up to `num_tokens`."""
        nodes: list[tuple[int, int]] = []
        for start in range(len(history) - 1, 0, -1):
            if history[start - 1] != history[-1]:
                continue
            parent = -1
            for token in history[start : start + self.num_tokens]:
                if (token, parent) not in nodes:
                    nodes.append((token, parent))
                parent = nodes.index((token, parent))
        return nodes[: self.num_tokens]


class HiddenHeads:
    """Drafter with one linear head for each draft position on the last hidden state. It does not read the history.

    The form is that of Cai et al., "Medusa" (2024), without a tree. The weights are random.
    """

    def __init__(self, context: DrafterContext) -> None:
        shape = (context.num_tokens, context.hidden_size, context.vocab_size)
        self.heads = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(context.device)

    def admit(self, row: int, prompt_token_ids: list[int]) -> None: ...

    def release(self, row: int) -> None: ...

    def propose(self, batch: DraftBatch) -> Draft:
        assert batch.hidden_states is not None
        logits = torch.einsum("nh,khv->nkv", batch.hidden_states.float(), self.heads)
        return Draft(token_ids=logits.argmax(dim=-1))


class PairCounts:
    """Drafter that draws from the tempered counts of tokens after the newest one in this request.

    All tokens begin at one half. Counts are kept by row and updated from the history, so it has state that a new
    request must not see.
    """

    def __init__(self, context: DrafterContext) -> None:
        self.num_tokens = context.num_tokens
        self.vocab_size = context.vocab_size
        self.device = context.device
        self.counts: dict[int, dict[int, Array]] = {}  # row -> token -> [vocab_size], counts of following tokens
        self.counted: dict[int, int] = {}  # row -> tokens that are in the counts

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        self.counts[row], self.counted[row] = {}, 0

    def release(self, row: int) -> None:
        self.counts.pop(row, None)
        self.counted.pop(row, None)

    def propose(self, batch: DraftBatch) -> Draft:
        assert batch.temperature is not None
        assert batch.uniforms is not None
        shape = (len(batch.rows), self.num_tokens)
        tokens, probabilities = np.zeros(shape, np.int64), np.zeros((*shape, self.vocab_size))
        lengths, temperature = batch.num_tokens.tolist(), batch.temperature.tolist()
        for index, row in enumerate(batch.rows.tolist()):
            history = batch.token_table[row, : lengths[index]].tolist()
            self.count(row, history)
            token = history[-1]
            for position, uniform in enumerate(batch.uniforms[index].tolist()):
                one = self.distribution(row, token, temperature[index])
                token = self.draw(one, uniform)
                tokens[index, position], probabilities[index, position] = token, self.stated(one, row, token)
        ids, stated = torch.from_numpy(tokens), torch.from_numpy(probabilities).float()
        return Draft(token_ids=ids.to(self.device), probabilities=stated.to(self.device))

    def count(self, row: int, history: list[int]) -> None:
        """Add the pairs that are new since the last call."""
        start = self.counted[row]
        for first, second in zip(history[max(start - 1, 0) :], history[max(start, 1) :], strict=False):
            self.counts[row].setdefault(first, np.zeros(self.vocab_size))[second] += 1
        self.counted[row] = len(history)

    def distribution(self, row: int, token: int, temperature: float) -> Array:
        """Return the distribution [vocab_size] after `token`, a single point at temperature 0."""
        weights = 0.5 + self.counts[row].get(token, np.zeros(self.vocab_size))
        if temperature == 0:
            return np.asarray(np.arange(self.vocab_size) == weights.argmax(), np.float64)
        tempered = (weights / weights.max()) ** (1 / temperature)
        return np.asarray(tempered / tempered.sum())

    def draw(self, one: Array, uniform: float) -> int:
        """Return the token at a quantile."""
        cumulated = one.cumsum()
        index = int(cumulated.searchsorted(uniform * cumulated[-1], side="right"))
        return min(index, int(one.nonzero()[0][-1]))

    def stated(self, one: Array, row: int, token: int) -> Array:
        """Return the distribution that goes into the answer."""
        return one


class MaskedBlock:
    """Drafter with one attention layer of random weights: the newest token and masks see known tokens and each other.

    The keys and values of known tokens are projections of the model's hidden states (KV injection; Chen et al. 2026,
    arXiv 2602.06036). Those of a block are of its tokens and places.
    """

    layer_ids: tuple[int, ...] = (1, 3)
    heads, size = 2, 8

    def __init__(self, context: DrafterContext) -> None:
        self.num_tokens, self.vocab_size, self.device = context.num_tokens, context.vocab_size, context.device
        self.layer = context.layers[0]
        width, inner = context.hidden_size, self.heads * self.size
        self.injected = self.noise(0, 2 * inner, len(self.layer_ids) * width)
        self.of_token = self.noise(1, context.vocab_size + 1, 3 * inner)  # the last one is the mask
        self.of_place = self.noise(2, context.max_model_len + context.num_tokens + 1, 3 * inner)
        self.out = self.noise(3, context.vocab_size, inner)

    @classmethod
    def attention_layers(cls, inspection: DrafterInspection) -> tuple[AttentionLayer, ...]:
        return (
            AttentionLayer(
                name="block",
                index=0,
                num_heads=cls.heads,
                num_kv_heads=cls.heads,
                head_size=cls.size,
                head_size_v=cls.size,
                scale=0.3,
            ),
        )

    def admit(self, row: int, prompt_token_ids: list[int]) -> None: ...

    def release(self, row: int) -> None: ...

    def observe(self, computed: ComputedTokens) -> None:
        assert computed.layer_hidden_states is not None
        assert computed.store is not None
        states = (computed.layer_hidden_states.float() @ self.injected.T).unflatten(-1, (2, self.heads, self.size))
        places = self.of_place[self.places(computed)].unflatten(-1, (3, self.heads, self.size))
        key, value = states[:, 0] + places[:, 1], states[:, 1]
        computed.store(self.layer, key, value)

    def propose(self, batch: DraftBatch) -> Draft:
        count, block = len(batch.rows), 1 + self.num_tokens
        masks = torch.full((count, self.num_tokens), self.vocab_size, device=self.device)
        tokens = torch.cat([self.newest(batch)[:, None], masks], 1)
        places = batch.positions[:, None] + torch.arange(block, device=self.device)
        states = (self.of_token[tokens] + self.of_place[places]).flatten(0, 1)
        query, key, value = states.unflatten(-1, (3, self.heads, self.size)).unbind(1)
        out = self.attend(batch)(self.layer, query, key, value, None)
        drafted = (out + query).flatten(1).unflatten(0, (count, block))[:, 1:]
        return Draft(token_ids=(drafted @ self.out.T).argmax(-1))

    def places(self, computed: ComputedTokens) -> torch.Tensor:
        """Return the positions of observed tokens."""
        return computed.positions

    def newest(self, batch: DraftBatch) -> torch.Tensor:
        """Return the first token of each block."""
        return batch.last_token_ids

    def attend(self, batch: DraftBatch) -> Any:
        """Return the attention of the blocks."""
        assert batch.attend_block is not None
        return batch.attend_block(1 + self.num_tokens)

    def noise(self, seed: int, *shape: int) -> torch.Tensor:
        """Return random weights."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.device)


class TokenState:
    """Drafter with a recurrent state over the tokens of each row: ``s = tanh(A s + E[token])``, random weights.

    It keeps the state after each position, since observed tokens may fall. Their places are then overwritten.
    """

    width = 16

    def __init__(self, context: DrafterContext) -> None:
        self.num_tokens, self.device = context.num_tokens, context.device
        generator = torch.Generator().manual_seed(0)
        self.turn = torch.randn(self.width, self.width, generator=generator) / self.width**0.5
        self.of_token = torch.randn(context.vocab_size, self.width, generator=generator)
        self.heads = torch.randn(context.num_tokens, self.width, context.vocab_size, generator=generator)
        self.states: dict[int, list[torch.Tensor]] = {}  # row -> after each position, [width]

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        self.states[row] = []

    def release(self, row: int) -> None:
        del self.states[row]

    def preempt(self, row: int) -> None:
        self.states[row] = []

    def observe(self, computed: ComputedTokens) -> None:
        assert computed.served is not None
        starts, tokens = computed.query_start_loc.tolist(), computed.token_ids.tolist()
        positions = computed.positions.tolist()
        for row, first, end, served in zip(
            computed.rows.tolist(), starts[:-1], starts[1:], computed.served.tolist(), strict=True
        ):
            if served and first < end:
                self.advance(row, positions[first], tokens[first:end])

    def advance(self, row: int, place: int, tokens: list[int]) -> None:
        """Compute the states of tokens from a position on, and forget what was behind it."""
        states = self.states[row]
        del states[place:]
        for token in tokens:
            states.append(self.after(states[-1] if states else torch.zeros(self.width), token))

    def propose(self, batch: DraftBatch) -> Draft:
        ids = torch.zeros(len(batch.rows), self.num_tokens, dtype=torch.int64)
        newest, positions = batch.last_token_ids.tolist(), batch.positions.tolist()
        for index, row in enumerate(batch.rows.tolist()):
            state = self.after(self.known(row, positions[index]), newest[index])
            ids[index] = torch.einsum("w,kwv->kv", state, self.heads).argmax(-1)
        return Draft(token_ids=ids.to(self.device))

    def known(self, row: int, position: int) -> torch.Tensor:
        """Return the state before the newest token, which is at `position`."""
        return self.states[row][position - 1]

    def after(self, state: torch.Tensor, token: int) -> torch.Tensor:
        """Return the state after one more token."""
        return torch.tanh(self.turn @ state + self.of_token[token])


descriptor = Descriptor(
    kind=Kind.DRAFTER,
    name="reference_prompt_lookup",
    summary="prompt lookup, written for clarity",
    capabilities=DrafterCapabilities(devices=Set(None), max_tokens=Max(), needs_history=True),
    factory=PromptLookup,
)

tree = Descriptor(
    kind=Kind.DRAFTER,
    name="reference_two_branches",
    summary="prompt lookup as a tree of two chains",
    capabilities=DrafterCapabilities(devices=Set(None), max_tokens=Max(), tree=Flag(True), needs_history=True),
    factory=TwoBranches,
)

request_trees = Descriptor(
    kind=Kind.DRAFTER,
    name="reference_tries",
    summary="prompt lookup as a tree for each request",
    capabilities=DrafterCapabilities(
        devices=Set(None), max_tokens=Max(), tree=Flag(True), request_trees=Flag(True), needs_history=True
    ),
    factory=Tries,
)

hidden_heads = Descriptor(
    kind=Kind.DRAFTER,
    name="reference_hidden_heads",
    summary="random linear heads on the last hidden state",
    capabilities=DrafterCapabilities(devices=Set(None), max_tokens=Max(4), needs_hidden_states=True, on_device=True),
    factory=HiddenHeads,
)

probabilistic = Descriptor(
    kind=Kind.DRAFTER,
    name="reference_pair_counts",
    summary="draws from counted pairs of tokens, with its probabilities",
    capabilities=DrafterCapabilities(
        devices=Set(None), max_tokens=Max(8), probabilities=Flag(True), needs_history=True
    ),
    factory=PairCounts,
)

masked_block = Descriptor(
    kind=Kind.DRAFTER,
    name="reference_masked_block",
    summary="a block of masks over hidden states of two layers, in one pass",
    capabilities=DrafterCapabilities(
        devices=Set(None),
        max_tokens=Max(8),
        needs_layers=True,
        needs_computed=True,
        needs_kv_group=True,
        block_attention="full",
        on_device=True,
    ),
    factory=MaskedBlock,
)

token_state = Descriptor(
    kind=Kind.DRAFTER,
    name="reference_token_state",
    summary="a recurrent state over each row's tokens",
    capabilities=DrafterCapabilities(devices=Set(None), max_tokens=Max(8), needs_computed=True, state="rows"),
    factory=TokenState,
)
