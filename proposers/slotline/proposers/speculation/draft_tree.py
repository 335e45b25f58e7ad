"""Drafts in the form of a tree: several guesses for a position, each followed by guesses of its own.

Example: parents [-1, 0, 0, -1] are two guesses for the first place (nodes 0 and 3) and two that follow node 0 (nodes 1
and 2). A request's nodes take the slots after its known tokens in this order, so node 2 lies in the third slot
although it has the second position. A node in its own position's slot keeps its keys and values. The rest of an
accepted path is computed again with the next step's tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from attrs import frozen

Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@frozen(eq=False)
class DraftTree:
    """Form of a proposal, the same for all requests. Any first nodes of it are a tree too.

    Attributes:
        parents: [k] int64, index of each node's parent, always an earlier node, or -1 for none.
        depths: [k] int64, the node's place in a text: 1 for the first draft, and so on.
        sees: [k, k] bool, whether node i has node j on its path, itself included.
        paths: [k, most depth] int64, the nodes on the way to each, itself last, then -1.
    """

    parents: Int
    depths: Int
    sees: Bool
    paths: Int

    @classmethod
    def of(cls, parents: Int) -> DraftTree:
        """Build the tree from the parents.

        Raises:
            ValueError: if a parent is neither -1 nor an earlier node.
        """
        count = len(parents)
        if parents.ndim != 1 or ((parents < -1) | (parents >= np.arange(count))).any():
            raise ValueError(f"parents {parents.tolist()} are no tree: each is -1 or a node before its own")
        sees = np.eye(count, dtype=bool)
        for node, parent in enumerate(parents.tolist()):
            if parent >= 0:
                sees[node] |= sees[parent]
        depths = sees.sum(1)
        order = np.argsort(~sees, axis=1, kind="stable")[:, : int(depths.max(initial=0))]
        paths = np.where(np.arange(order.shape[1]) < depths[:, None], order, -1)
        return cls(parents, depths, sees, paths)

    def positions(self, nodes: Int) -> Int:
        """Return the drafts that each of `nodes` [n] assumes: [n] int64.

        `nodes` are 0 for the last known token, then 1 + the node.
        """
        found: Int = np.where(nodes > 0, self.depths[nodes - 1], 0)
        return found

    def num_kept(self, nodes: Int) -> Int:
        """Count the drafts of an accepted path that keep their computed keys and values, up to each entry of [n].

        `nodes` are as in `positions`, of requests one after the other, along one path each. A node in the slot of its
        position keeps them. After a node in another slot none does, since a node's number is at least its depth.
        """
        request = np.cumsum(nodes == 0) * (len(self.parents) + 1)
        kept = np.where(nodes == self.positions(nodes), nodes, 0)
        found: Int = np.maximum.accumulate(request + kept) - request
        return found

    @property
    def num_chained(self) -> int:
        """The number of first nodes that form a chain."""
        return int(np.cumprod(self.parents == np.arange(len(self.parents)) - 1).sum())

    @property
    def first_path(self) -> Int:
        """The nodes of the chain of first children, [m] int64. A drafter puts the likeliest child first."""
        nodes, last = [], -1
        while len(found := np.flatnonzero(self.parents == last)):
            last = int(found[0])
            nodes.append(last)
        return np.array(nodes, np.int64)

    def accepted(self, tokens: Int, nodes: Int, drafts: Int) -> Bool:
        """Return the logits rows that give their request a token: the last known token, and each accepted node.

        Args:
            tokens: [n] the token of each logits row.
            nodes: [n] as in `positions`, beginning with 0 for each request.
            drafts: [n] the token of that node, any number for 0.
        """
        nodes = nodes - 1
        stands = nodes < 0
        first = np.maximum.accumulate(np.where(stands, np.arange(len(nodes)), 0))
        parent = np.where(nodes < 0, first, first + 1 + self.parents[np.maximum(nodes, 0)])  # places of logits rows
        right = drafts == tokens[parent]
        for depth in range(1, int(self.depths.max(initial=0)) + 1):
            here = np.flatnonzero((nodes >= 0) & (self.depths[np.maximum(nodes, 0)] == depth))
            here = here[right[here] & stands[parent[here]]]
            _, one = np.unique(parent[here], return_index=True)
            stands[here[one]] = True
        return stands
