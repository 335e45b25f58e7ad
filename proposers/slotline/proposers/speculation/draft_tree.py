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
        refuse_no_tree(parents)
        sees = np.eye(count, dtype=bool)
        for node, parent in enumerate(parents.tolist()):
            if parent >= 0:
                sees[node] |= sees[parent]
        depths = sees.sum(1)
        order = np.argsort(~sees, axis=1, kind="stable")[:, : int(depths.max(initial=0))]
        paths = np.where(np.arange(order.shape[1]) < depths[:, None], order, -1)
        return cls(parents, depths, sees, paths)

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


class TreesByRow:
    """Trees of the drafts of all rows. A row's drafts are a chain unless `write` has given them another form.

    Attributes:
        parents, depths: [max_requests, k] int64, as in `DraftTree`.
        sees: [max_requests, k, k] bool.
        paths: [max_requests, k, k] int64, filled up with -1.
    """

    def __init__(self, max_requests: int, num_nodes: int) -> None:
        self._chain = np.arange(-1, num_nodes - 1)
        self.parents = np.tile(self._chain, (max_requests, 1))
        self.depths = np.zeros((max_requests, num_nodes), np.int64)
        self.sees = np.zeros((max_requests, num_nodes, num_nodes), bool)
        self.paths = np.zeros((max_requests, num_nodes, num_nodes), np.int64)
        self.write(np.arange(max_requests), self.parents)

    def write(self, rows: Int, parents: Int) -> None:
        """Give the drafts of `rows` [n] the form `parents` [n, at most k]. Nodes after these follow no other node.

        Raises:
            ValueError: if a parent is neither -1 nor an earlier node.
        """
        most = self.parents.shape[1]
        refuse_no_tree(parents)
        parents = np.pad(parents, ((0, 0), (0, most - parents.shape[1])), constant_values=-1)
        sees = np.tile(np.eye(most, dtype=bool), (len(rows), 1, 1))
        for node in range(most):
            (child,) = np.nonzero(parents[:, node] >= 0)
            sees[child, node] |= sees[child, parents[child, node]]
        depths = sees.sum(2)
        order = np.argsort(~sees, axis=2, kind="stable")
        self.parents[rows], self.depths[rows], self.sees[rows] = parents, depths, sees
        self.paths[rows] = np.where(np.arange(most) < depths[:, :, None], order, -1)

    def straighten(self, rows: Int) -> None:
        """Make the drafts of `rows` chains."""
        self.write(rows, np.tile(self._chain, (len(rows), 1)))

    def num_chained(self, rows: Int) -> Int:
        """Count the first nodes of each of `rows` [n] that form a chain."""
        found: Int = np.cumprod(self.parents[rows] == self._chain, axis=1).sum(1)
        return found


@frozen(eq=False)
class VerifiedTrees:
    """Trees of a step that verifies them, by logits row: n rows, those of a request one after the other.

    Attributes:
        nodes: [n] int64, 0 for the last known token, then 1 + the node.
        parents: [n] int64, the node's parent, -1 for none. Any number for the last known token.
        depths: [n] int64, the drafts that each row assumes: 0 for the last known token.
    """

    nodes: Int
    parents: Int
    depths: Int

    @classmethod
    def of(cls, nodes: Int, parents: Int, depths: Int) -> VerifiedTrees:
        """Gather from `parents` and `depths` [n, k] of the request of each row."""
        index = np.arange(len(nodes)), np.maximum(nodes - 1, 0)
        return cls(nodes, parents[index], np.where(nodes > 0, depths[index], 0))

    def num_kept(self, places: Int) -> Int:
        """Count the drafts of accepted paths that keep their computed keys and values, up to each of `places` [m].

        `places` are the rows of a path of each request, one request after the other. A node in the slot of its position
        keeps them. After a node in another slot none does, since a node's number is at least its depth.
        """
        nodes, depths = self.nodes[places], self.depths[places]
        request = np.cumsum(nodes == 0) * (int(nodes.max(initial=0)) + 1)
        kept = np.where(nodes == depths, nodes, 0)
        found: Int = np.maximum.accumulate(request + kept) - request
        return found

    def accepted(self, tokens: Int, drafts: Int) -> Bool:
        """Return the logits rows that give their request a token: the last known token, and each accepted node.

        Args:
            tokens: [n] the token of each logits row.
            drafts: [n] the token of each row's node, any number for the last known token.
        """
        stands: Bool = self.nodes == 0
        first = np.maximum.accumulate(np.where(stands, np.arange(len(stands)), 0))
        parent = np.where(stands, first, first + 1 + self.parents)  # places of logits rows
        right = drafts == tokens[parent]
        for depth in range(1, int(self.depths.max(initial=0)) + 1):
            here = np.flatnonzero(self.depths == depth)
            here = here[right[here] & stands[parent[here]]]
            _, one = np.unique(parent[here], return_index=True)
            stands[here[one]] = True
        return stands


def first_paths(token_ids: Int, parents: Int) -> Int:
    """Return the tokens [n, k] of the chain of first children of each request's tree, filled up with -1.

    Args:
        token_ids, parents: [n, k] int64.
    """
    found, last = np.full_like(token_ids, -1), np.full(len(token_ids), -1)
    length = np.zeros(len(token_ids), np.int64)
    for node in range(token_ids.shape[1]):
        (goes_on,) = np.nonzero(parents[:, node] == last)
        found[goes_on, length[goes_on]] = token_ids[goes_on, node]
        last[goes_on], length[goes_on] = node, length[goes_on] + 1
    return found


def refuse_no_tree(parents: Int) -> None:
    """Raise ValueError unless each of `parents` [..., k] is -1 or a node before its own."""
    if ((parents < -1) | (parents >= np.arange(parents.shape[-1]))).any():
        raise ValueError(f"parents {parents.tolist()} are no tree: each is -1 or a node before its own")
