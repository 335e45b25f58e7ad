"""Small speculative engine: a table as language model, the rows of `World`, and the oracle's verification.

For every proposal of a correct drafter the loop's text is the target's: equal under greedy decoding, equal in
distribution under temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from attrs import define, field

from slotline.testing.environments.drafter import Request, RowDraft, World
from slotline.testing.oracles.drafter import Array, draw, verify_by_match, verify_by_rejection


@define(eq=False)
class TableModel:
    """Language model whose next token depends on the last two: random logits, [vocab, vocab, vocab] float64."""

    vocab_size: int
    seed: int
    spread: float = 2.0
    logits: np.ndarray[Any, np.dtype[np.float64]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        size = (self.vocab_size,) * 3
        self.logits = np.random.default_rng(self.seed).normal(0.0, self.spread, size)

    def greedy(self, tokens: Sequence[int]) -> int:
        """Return the token after `tokens` at temperature 0."""
        return int(self._row(tokens).argmax())

    def probabilities(self, tokens: Sequence[int], temperature: float) -> Array:
        """Return [vocab] float64, the distribution of the token after `tokens`."""
        row = self._row(tokens) / temperature
        weights = np.exp(row - row.max())
        return np.asarray(weights / weights.sum())

    def _row(self, tokens: Sequence[int]) -> Array:
        return np.asarray(self.logits[tokens[-2] if len(tokens) > 1 else 0, tokens[-1]])


@define(eq=False)
class SpeculativeLoop:
    """Generation with the drafter of a world: prefill, then propose and verify until each request is done."""

    world: World
    model: TableModel
    rng: Random
    drafted: int = 0
    accepted: int = 0

    def generate(
        self, prompts: Sequence[tuple[int, ...]], num_tokens: int, temperature: float
    ) -> list[tuple[int, ...]]:
        """Return `num_tokens` tokens after each prompt. Rows are reused as soon as they are free."""
        waiting = list(enumerate(prompts))[::-1]
        running: dict[int, int] = {}  # row -> index of the prompt
        texts: list[tuple[int, ...]] = [()] * len(prompts)
        while waiting or running:
            for row in range(self.world.max_requests):
                if row not in running and waiting:
                    running[row], prompt = waiting.pop()
                    self._admit(row, prompt, temperature)
            for row, draft in self.world.propose(sorted(running)).items():
                request = self.world.requests[row]
                taken = self._verify(request, draft)
                self.drafted, self.accepted = self.drafted + len(draft.token_ids), self.accepted + len(taken) - 1
                self.world.requests[row] = request = request.then(taken)
                if len(request.output) >= num_tokens:
                    texts[running.pop(row)] = request.output[:num_tokens]
                    self.world.release(row)
        return texts

    def _admit(self, row: int, prompt: tuple[int, ...], temperature: float) -> None:
        """Take a row and compute the prompt, which gives the first output token."""
        request = Request(prompt, (), self.rng.randrange(2**31), temperature)
        self.world.admit(row, request)
        self.world.requests[row] = request.then((self._choose(request, ()),))

    def _choose(self, request: Request, taken: tuple[int, ...]) -> int:
        tokens = request.tokens + taken
        if request.temperature == 0:
            return self.model.greedy(tokens)
        return draw(self.model.probabilities(tokens, request.temperature), self.rng.random())

    def _verify(self, request: Request, draft: RowDraft) -> tuple[int, ...]:
        if request.temperature == 0 or draft.probabilities is None:
            return verify_by_match(draft.token_ids, draft.parents, lambda taken: self._choose(request, taken))
        return verify_by_rejection(
            draft.token_ids,
            draft.probabilities.numpy(),
            lambda taken: self.model.probabilities(request.tokens + taken, request.temperature),
            self.rng.random,
        )
