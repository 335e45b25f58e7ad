"""A drafter of trees that differ between requests, as another distribution would write it: the contract's names alone.

The nodes of a request are the commonest followers of its newest token, then those of each of them, and so on.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise

import torch

from slotline.registry import Descriptor, Flag, Kind, Max, Set
from slotline.registry.contracts import Draft, DraftBatch, DrafterCapabilities, DrafterContext

WIDTH = 2


class Forks:
    """Keeps nothing between steps."""

    def __init__(self, context: DrafterContext) -> None:
        self.num_tokens, self.device, self.form = context.num_tokens, context.device, context.form

    def admit(self, row: int, prompt_token_ids: list[int]) -> None: ...

    def release(self, row: int) -> None: ...

    def propose(self, batch: DraftBatch) -> Draft:
        lengths = batch.num_tokens.tolist()
        trees = [
            self.tree(batch.token_table[row, :length].tolist())
            for row, length in zip(batch.rows.tolist(), lengths, strict=True)
        ]
        token_ids, parents = (
            torch.tensor([nodes[part] + [-1] * (self.num_tokens - len(nodes[part])) for nodes in trees])
            .reshape(len(trees), self.num_tokens)
            .long()
            .to(self.device)
            for part in (0, 1)
        )
        return Draft(token_ids=token_ids, parents=parents if self.form == "request_trees" else self.one_chain())

    def one_chain(self) -> torch.Tensor:
        return torch.arange(-1, self.num_tokens - 1, device=self.device)

    def tree(self, history: list[int]) -> tuple[list[int], list[int]]:
        """Return the tokens and the parents. Of one tree for all requests each node is the child of that before."""
        after: dict[int, Counter[int]] = {}
        for first, second in pairwise(history):
            after.setdefault(first, Counter())[second] += 1
        width = WIDTH if self.form == "request_trees" else 1
        tokens, parents, open_nodes = list[int](), list[int](), deque([-1])
        while open_nodes and len(tokens) < self.num_tokens:
            node = open_nodes.popleft()
            common = after.get(tokens[node] if node >= 0 else history[-1], Counter()).most_common(width)
            for token, _ in common[: self.num_tokens - len(tokens)]:
                open_nodes.append(len(tokens))
                tokens.append(token)
                parents.append(node)
        return tokens, parents


descriptor = Descriptor(
    kind=Kind.DRAFTER,
    name="forks",
    summary="the commonest followers of the newest token, and theirs",
    capabilities=DrafterCapabilities(
        devices=Set(None), max_tokens=Max(), tree=Flag(True), request_trees=Flag(True), needs_history=True
    ),
    factory=Forks,
)
