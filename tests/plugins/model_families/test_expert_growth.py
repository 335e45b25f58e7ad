"""Mixtures whose number of ranks changes: the sums of the whole before and after, with ranks as threads."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from expert_ranks import Counting, over_threads, share
from mixtures import EXPERTS, close, mixture, routing

from slotline.plugins.model_families.tensor_parallel import expert_parallel, expert_routing
from slotline.plugins.model_families.tensor_parallel.expert_growth import GrowingMixtures
from slotline.plugins.model_families.tensor_parallel.threads import Meeting
from slotline.registry.errors import ModelError


def copies(ranks: int) -> int:
    """Return the fewest copies of experts that so many ranks can share."""
    return -EXPERTS % ranks


class Ranks:
    """The experts of a mixture on ranks that are threads, among groups of several sizes.

    Args:
        sizes: of the groups, in order. The first has whole mixtures divided.
    """

    def __init__(self, whole: Any, form: Any, sizes: tuple[int, ...]) -> None:
        self.whole, self.form, self.sizes = whole, form, sizes
        self.meetings = [Meeting(size) for size in sizes]
        self.unions = [Meeting(max(pair)) for pair in pairwise(sizes)]
        self.addresses: dict[int, list[int]] = {}

    def run(self, outer: Counting) -> list[torch.Tensor | None]:
        """Return the sums that a rank gives in each group, None where it is in none."""
        results: list[torch.Tensor | None] = []
        part, held = copy.deepcopy(self.whole), None
        for index, size in enumerate(self.sizes):
            rank = outer.rank
            if rank >= size and (index == 0 or rank >= self.sizes[index - 1]):
                results.append(None)
                continue
            if held is None:  # a new rank has read its experts
                share(part, self._joined(rank, size, self.meetings[index]), self.form, copies(size), count=True)
                held = [self._first(size)]
            if index:
                before = self.sizes[index - 1]
                union = self._joined(rank, max(before, size), self.unions[index - 1])
                mixtures = GrowingMixtures(torch.nn.ModuleList([part]), union)
                new = self._placement(index)
                own = [
                    self._held(index - 1, one) if one < before else self._first(size)[one] for one in range(union.size)
                ]
                mixtures.resize([own], [new], size)
            results.append(None)
            if rank < size:
                mine = self._joined(rank, size, self.meetings[index])
                GrowingMixtures(torch.nn.ModuleList([part]), mine).join(mine)
                results[-1] = part(*routing(5 + rank, rank + index))
                self.addresses.setdefault(rank, []).append(part.down_proj.data_ptr())
            else:
                held = None
                part = copy.deepcopy(self.whole)
        return results

    def _joined(self, rank: int, size: int, meeting: Meeting) -> Counting:
        meeting.turn = self.turn
        return Counting(meeting, rank, "data")

    def _first(self, size: int) -> np.ndarray[Any, Any]:
        return expert_parallel.first_placement(EXPERTS, EXPERTS + copies(size)).reshape(size, -1)

    def _placement(self, index: int) -> np.ndarray[Any, Any]:
        """Return the placement of a group: any that has all experts."""
        if index == 0:
            return self._first(self.sizes[0]).reshape(-1)
        random = np.random.default_rng(index)
        slots = EXPERTS + copies(self.sizes[index])
        return random.permutation(np.concatenate([np.arange(EXPERTS), random.choice(EXPERTS, slots - EXPERTS, False)]))

    def _held(self, index: int, rank: int) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self._placement(index).reshape(self.sizes[index], -1)[rank]
        return found

    def check(self) -> None:
        """Compare the sums of all groups with those of the whole."""
        most = max(self.sizes)

        def run(outer: Counting) -> list[torch.Tensor | None]:
            self.turn = outer.meeting.turn
            return self.run(outer)

        found = over_threads(most, run)
        for index, size in enumerate(self.sizes):
            wanted = [self.whole(*routing(5 + rank, rank + index)) for rank in range(size)]
            close([each[index] for each in found[:size]], wanted)
            assert all(each[index] is None for each in found[size:])


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 4, 3, 2), (1, 2), (2, 1)])
def test_the_sums_are_those_of_the_whole_before_and_after(name: str, sizes: tuple[int, ...]) -> None:
    Ranks(mixture(name, "grouped_mm"), expert_routing.ExchangedTokens, sizes).check()


def test_addresses_stay_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(mixture("mixtral", "grouped_mm"), expert_routing.ExchangedTokens, (2, 3, 2, 4, 2))
    monkeypatch.setattr("slotline.plugins.model_families.tensor_parallel.expert_moves.PIECE", 256)  # many pieces
    ranks.check()
    assert len(set(ranks.addresses[0])) == len(set(ranks.addresses[1])) == 1
    grown = Ranks(mixture("mixtral", "grouped_mm"), expert_routing.ExchangedTokens, (4, 2, 3))
    grown.check()
    first, second, third = grown.addresses[0]
    assert first != second == third


def test_ranks_with_the_same_tokens_are_refused() -> None:
    part = copy.deepcopy(mixture("mixtral", "grouped_mm"))
    lonely = Counting(Meeting(2), 0)
    share(part, lonely, expert_routing.SameTokens)
    with pytest.raises(ModelError, match="divide more than experts"):
        GrowingMixtures(torch.nn.ModuleList([part]), lonely).resize([[]], [np.arange(EXPERTS)], 4)
