"""Steps of a model as a drafter observes them, and attention of its own layers, dense and without blocks.

`Steps` plays an engine for drafters that read computed tokens. It shows them each request's accepted tokens once, in
chunks of any length, with rejected drafts behind them as verifying steps have them, and the last step of a request
after its release. Places of a cache that nobody stored hold NaN.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field

from slotline.registry.contracts import (
    AttentionLayer,
    ComputedTokens,
    DrafterCapabilities,
    DrafterInspection,
    ModelFacts,
)
from slotline.registry.errors import ContractError, ModelError

History = tuple[int, tuple[int, ...]]
"""A row and the known tokens of its request."""
NUM_LAYERS = 4
"""Layers of the model that there is not."""


def model_facts(vocab_size: int, hidden_size: int, max_model_len: int) -> ModelFacts:
    """Return facts of a made-up model, for factories that look at sizes."""
    layers = tuple(
        AttentionLayer(
            name=f"layers.{i}", index=i, num_heads=2, num_kv_heads=2, head_size=8, head_size_v=8, scale=8**-0.5
        )
        for i in range(NUM_LAYERS)
    )
    return ModelFacts(
        architecture="MadeUpForCausalLM",
        path=Path("made-up"),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        max_model_len=max_model_len,
        dtype="float32",
        layers=layers,
        num_parameters=0,
    )


def embedding(vocab_size: int, hidden_size: int) -> torch.Tensor:
    """Return the made-up model's embedding and output projection, [vocab_size, hidden_size] float32."""
    return torch.randn(vocab_size, hidden_size, generator=torch.Generator().manual_seed(1))


def own_layers(factory: Any, inspection: DrafterInspection) -> tuple[AttentionLayer, ...]:
    """Return the drafter's own attention layers, behind those of the made-up model."""
    return tuple(evolve(layer, index=NUM_LAYERS + layer.index) for layer in factory.attention_layers(inspection))


def inspect_nothing(path: Path) -> ModelFacts:
    """Refuse to inspect a whole draft model."""
    raise ModelError(f"{str(path)!r} holds no model", fix="the suite has none")


@lru_cache(maxsize=200_000)
def state(tokens: tuple[int, ...], layer: int, hidden_size: int) -> torch.Tensor:
    """Return the hidden state [hidden_size] of the last of these tokens, a function of all of them."""
    seed = zlib.crc32(np.array((layer, *tokens), np.int64).tobytes())
    return torch.randn(hidden_size, generator=torch.Generator().manual_seed(seed))


@define(eq=False)
class Steps:
    """The engine's part for a drafter that observes.

    Attributes:
        declared: its capabilities.
        layers: its own attention layers.
        sizes: vocab_size, hidden_size, max_model_len, num_tokens.
        device: torch device string.
        rng: draws the lengths of chunks and rejected drafts. None for whole histories without any.
    """

    declared: DrafterCapabilities
    layers: tuple[AttentionLayer, ...]
    sizes: tuple[int, int, int, int]
    device: str
    rng: Random | None
    drafter: Any = None
    computed: dict[int, int] = field(factory=dict)  # by row
    caches: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(factory=dict)  # by row, of each layer

    def begin(self, row: int) -> None:
        """Begin with nothing computed, on admission and after a preemption."""
        longest = self.sizes[2] + self.sizes[3] + 1
        self.computed[row] = 0
        self.caches[row] = [
            (
                torch.full((longest, layer.num_kv_heads, layer.head_size), torch.nan, device=self.device),
                torch.full((longest, layer.num_kv_heads, layer.head_size_v), torch.nan, device=self.device),
            )
            for layer in self.layers
        ]

    def preempt(self, row: int) -> None:
        """Give up all that was computed for a row."""
        self.begin(row)
        if self.declared.state == "rows":
            self.drafter.preempt(row)

    def finish(self, row: int, tokens: tuple[int, ...]) -> None:
        """Show the last step of a request that has been released, one launched before its end was known."""
        if self.rng is not None and self.computed[row] < len(tokens):
            self._observe([(row, tokens, len(tokens))], served=False)

    def observe(self, histories: Sequence[History]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Show what is not computed yet of each row's tokens, but for the newest, in one step or in several.

        A row of which all is computed is preempted, since each proposal comes after a step.

        Returns:
            For each row the index of the token before its newest in the last step, and what `observe` returned for it.
        """
        for row, tokens in histories:
            if self.computed[row] >= len(tokens) - 1:
                self.preempt(row)
        while self.rng is not None and histories:
            chunks = [
                (row, tokens, self.computed[row] + self.rng.randint(1, 9))
                for row, tokens in histories
                if self.computed[row] + 1 < len(tokens) - 1 and self.rng.random() < 0.5
            ]
            chunks = [(row, tokens, min(end, len(tokens) - 2)) for row, tokens, end in chunks]
            if not chunks or self.rng.random() < 0.3:
                break
            self._observe(chunks)
        return self._observe([(row, tokens, len(tokens) - 1) for row, tokens in histories])

    def _observe(
        self, steps: Sequence[tuple[int, tuple[int, ...], int]], *, served: bool = True
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Show one step: of each row the tokens up to an end, and rejected drafts behind the newest known ones."""
        vocab_size, hidden_size, _, num_tokens = self.sizes
        ids, positions, following = list[int](), list[int](), list[int]()
        states, starts, last = list[torch.Tensor](), [0], list[int]()
        for row, tokens, end in steps:
            first, fallen = self.computed[row], list[int]()
            if self.rng is not None and end == len(tokens) - 1:
                fallen = [self.rng.randrange(vocab_size) for _ in range(self.rng.randint(0, num_tokens))]
            shown = (*tokens[:end], *fallen)
            last.append(len(ids) + end - first - 1)
            for place in range(first, len(shown)):
                ids.append(shown[place])
                positions.append(place)
                following.append(tokens[place + 1] if place < min(end, len(tokens) - 1) else 0)
                states.append(self._states(shown[: place + 1]))
            starts.append(len(ids))
            self.computed[row] = end
        rows = [row for row, _, _ in steps]
        place_of = torch.tensor(positions, dtype=torch.int64)
        whose = [row for row, start, stop in zip(rows, starts, starts[1:], strict=False) for _ in range(stop - start)]
        attention = Dense(self, whose, place_of)
        wide = torch.stack(states) if states else torch.zeros(0, hidden_size * (1 + len(self._layer_ids)))
        wide = wide.to(self.device)
        found = self.drafter.observe(
            ComputedTokens(
                rows=torch.tensor(rows, dtype=torch.int64),
                served=torch.full((len(rows),), served),
                query_start_loc=torch.tensor(starts, dtype=torch.int64),
                token_ids=torch.tensor(ids, dtype=torch.int64, device=self.device),
                positions=place_of.to(self.device),
                next_token_ids=torch.tensor(following, dtype=torch.int64, device=self.device),
                hidden_states=wide[:, :hidden_size] if self.declared.needs_hidden_states else None,
                layer_hidden_states=wide[:, hidden_size:] if self.declared.needs_layers else None,
                attend=attention if self.layers else None,
                store=attention.store if self.layers else None,
            )
        )
        index = torch.tensor(last, dtype=torch.int64, device=self.device)
        return index, tuple(one.index_select(0, index) for one in found or ())

    @property
    def _layer_ids(self) -> tuple[int, ...]:
        return tuple(self.drafter.layer_ids) if self.declared.needs_layers else ()

    def _states(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Return the last hidden state and the inputs of the read layers of the last of these tokens, side by side."""
        return torch.cat([state(tokens, layer, self.sizes[1]) for layer in (-1, *self._layer_ids)])

    def last_states(self, histories: Sequence[History]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return last hidden states and inputs of layers of the token before the newest, for each row."""
        wide = [self._states(tokens[:-1]) for _, tokens in histories]
        size = self.sizes[1]
        both = torch.stack(wide) if wide else torch.zeros(0, size * (1 + len(self._layer_ids)))
        both = both.to(self.device)
        return both[:, :size], both[:, size:]

    def attend(self, rows: Sequence[int], newest: Sequence[int]) -> Callable[[int], Dense]:
        """Return what `DraftBatch.attend` is."""

        def attend(offset: int) -> Dense:
            return Dense(self, list(rows), torch.tensor(newest, dtype=torch.int64) + offset)

        return attend

    def attend_block(self, rows: Sequence[int], newest: Sequence[int]) -> Callable[..., Dense]:
        """Return what `DraftBatch.attend_block` is."""

        def attend_block(num_queries: int, causal: bool = False) -> Dense:
            form = self.declared.block_attention
            if form == "none" or (form == "causal" and not causal):
                raise ContractError(
                    f"attend_block was called with causal={causal}, and block_attention is {form!r}",
                    fix="declare what is asked for",
                )
            if not 1 <= num_queries <= 1 + self.sizes[3]:
                raise ContractError(
                    f"attend_block was called for {num_queries} queries of a request, and there are {self.sizes[3]} "
                    "draft tokens",
                    fix=f"call it for 1 to {1 + self.sizes[3]}",
                )
            places = torch.tensor(newest, dtype=torch.int64)[:, None] + torch.arange(num_queries)
            whose = [row for row in rows for _ in range(num_queries)]
            return Dense(self, whose, places.flatten(), ahead=None if causal else num_queries)

        return attend_block

    def attend_tree(self, rows: Sequence[int], newest: Sequence[int]) -> Callable[[torch.Tensor, int], DenseTree]:
        """Return what `DraftBatch.attend_tree` is. Node i of a row's tree has the slot i behind its known tokens."""

        def attend_tree(parents: torch.Tensor, first: int) -> DenseTree:
            trees = parents.expand(len(rows), parents.shape[-1]).tolist()
            if (nodes := parents.shape[-1]) > self.sizes[3]:
                raise ContractError(
                    f"attend_tree was called for {nodes} nodes, and there are {self.sizes[3]} draft tokens",
                    fix="keep keys of as many nodes as draft tokens",
                )
            places = torch.tensor(newest, dtype=torch.int64)[:, None] + torch.arange(first, nodes)
            whose = [row for row in rows for _ in range(first, nodes)]
            paths = [_path(tree, node) for tree in trees for node in range(first, nodes)]
            known = [place for place in newest for _ in range(first, nodes)]
            return DenseTree(self, whose, places.flatten(), paths=paths, known=known)

        return attend_tree


def _path(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes on the path to a node, itself last."""
    return [] if node < 0 else [*_path(parents, parents[node]), node]


@define(eq=False)
class Dense:
    """Attention of tokens at `positions` [n] of rows, over all keys of the row up to there. It stores them first.

    Attributes:
        whose: the row of each token.
        ahead: tokens of a block that see each other. None for causal attention.
    """

    _steps: Steps
    whose: list[int]
    positions: torch.Tensor
    ahead: int | None = None

    def __call__(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """Return [n, num_heads, head_size_v]."""
        self.store(layer, key, value)
        out = query.new_zeros(len(query), layer.num_heads, layer.head_size_v)
        groups = layer.num_heads // layer.num_kv_heads
        for i, (row, place) in enumerate(zip(self.whose, self.positions.tolist(), strict=True)):
            seen = self.seen(layer, i, place)
            keys, values = (x[seen].repeat_interleave(groups, 1) for x in self._cache(layer, row))
            weights = (torch.einsum("hd,khd->hk", query[i].float(), keys) * layer.scale).softmax(-1)
            out[i] = torch.einsum("hk,khd->hd", weights, values).to(out.dtype)
        return out

    def seen(self, layer: AttentionLayer, token: int, place: int) -> slice | list[int]:
        """Return the slots of the keys that a token at a place sees."""
        end = place + 1 if self.ahead is None else int(self.positions[token // self.ahead * self.ahead]) + self.ahead
        return slice(0 if layer.window is None else max(place + 1 - layer.window, 0), end)

    def store(self, layer: AttentionLayer, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values of the tokens."""
        for i, (row, place) in enumerate(zip(self.whose, self.positions.tolist(), strict=True)):
            keys, values = self._cache(layer, row)
            keys[place], values[place] = key[i].float(), value[i].float()

    def _cache(self, layer: AttentionLayer, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._steps.caches[row][[one.index for one in self._steps.layers].index(layer.index)]


@define(eq=False)
class DenseTree(Dense):
    """Attention of nodes of a tree, over a row's known tokens and the nodes on their paths.

    Attributes:
        paths: the nodes on the path of each token, itself last.
        known: the number of known tokens of each one's row.
    """

    paths: list[list[int]] = field(factory=list)
    known: list[int] = field(factory=list)

    def seen(self, layer: AttentionLayer, token: int, place: int) -> slice | list[int]:
        """Return the slots of the keys that a node sees. A window counts places in a text."""
        known, path = self.known[token], self.paths[token]
        slots = [*range(known), *(known + node for node in path)]
        return slots if layer.window is None else slots[-layer.window :]
