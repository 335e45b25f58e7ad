"""Experts that move among ranks, with ranks as threads: the sums stay, and the busiest rank gets less."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from expert_ranks import Counting, over_threads, share
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

from slotline.plugins.expert_placements import descriptors
from slotline.plugins.expert_placements.greedy import Greedy, most
from slotline.plugins.model_families.tensor_parallel import expert_moves, expert_routing
from slotline.plugins.model_families.tensor_parallel.expert_moves import Moves, SharedMixtures
from slotline.ranks.expert_balance import ExpertBalance, busiest, fault_of, settled
from slotline.registry.contracts import ExpertPlacementContext
from slotline.registry.errors import PluginError

EXPERTS, TOP, HIDDEN, LAYERS = 8, 2, 16, 3


class Layers(torch.nn.Module):
    """Mixtures behind each other."""

    def __init__(self) -> None:
        super().__init__()
        config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=24, num_local_experts=EXPERTS)
        config._experts_implementation = "grouped_mm"
        self.layers = torch.nn.ModuleList(MixtralExperts(config) for _ in range(LAYERS))
        torch.manual_seed(0)
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        self.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x + layer(x, (chosen + number) % EXPERTS, weights)
        return x


class Model:
    """One rank's part. See `slotline.registry.contracts.model_family.MixtureModel`."""

    def __init__(self, whole: Layers, ranks: Counting, form: Any, redundant: int) -> None:
        self.module = copy.deepcopy(whole)
        for layer in self.module.layers:
            share(layer, ranks, form, redundant, count=True)
        mixtures = SharedMixtures(self.module, ranks)
        self.expert_loads, self.expert_placements = mixtures.loads, mixtures.placements
        self.place_experts = mixtures.place


def balance_of(model: Any, ranks: int, redundant: int, every: int = 0, plugin: Any = None) -> ExpertBalance:
    plugin = plugin or Greedy(ExpertPlacementContext(contract=1, ranks=ranks, redundant=redundant))
    return ExpertBalance(model, descriptors.greedy, plugin, ranks, every)


def skewed(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens whose experts are mostly the first three."""
    made = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, EXPERTS, generator=made) + torch.linspace(1, 0, EXPERTS) ** 2
    chosen = scores.topk(TOP).indices
    return torch.randn(count, HIDDEN, generator=made), chosen, torch.rand(count, TOP, generator=made)


@pytest.mark.parametrize(("size", "redundant"), [(2, 0), (2, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("form", [expert_routing.SameTokens, expert_routing.ExchangedTokens])
def test_a_skewed_router_is_evened_out_and_the_sums_stay(form: Any, size: int, redundant: int) -> None:
    whole = Layers()
    same = form is expert_routing.SameTokens
    inputs = [skewed(40, 0 if same else rank) for rank in range(size)]

    def run(ranks: Counting) -> Any:
        model = Model(whole, ranks, form, redundant)
        balance = balance_of(model, size, redundant)
        addresses = [tensor.data_ptr() for tensor in (*model.module.parameters(), *model.module.buffers())]
        first = model.module(*inputs[ranks.rank])
        report = balance.rebalance()
        second = model.module(*inputs[ranks.rank])
        after = balance.rebalance()
        assert addresses == [tensor.data_ptr() for tensor in (*model.module.parameters(), *model.module.buffers())]
        return first, second, report, after, model.expert_placements()

    for rank, (first, second, report, after, placements) in enumerate(over_threads(size, run)):
        wanted = whole(*inputs[rank])
        torch.testing.assert_close(first, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(second, wanted, rtol=1e-4, atol=1e-4)
        assert report.tokens == after.tokens == 40 * TOP * LAYERS * (1 if same else size)
        assert report.after < report.before - 0.1
        assert after.before == pytest.approx(report.after)
        for placement in placements:
            assert fault_of(placement[None], 1, EXPERTS, EXPERTS + redundant) is None


@pytest.mark.parametrize("piece", [1, 2000, 1 << 26])
def test_weights_are_those_of_the_placement(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_moves, "PIECE", piece)
    whole = Layers()

    def run(ranks: Counting) -> list[bool]:
        model = Model(whole, ranks, expert_routing.SameTokens, 2)
        held = []
        for seed in range(6):
            random = np.random.default_rng(seed)
            new = [random.permutation(np.arange(EXPERTS + 2) % EXPERTS) for _ in range(LAYERS)]
            model.place_experts(new)
            for layer, kept, placement in zip(model.module.layers, whole.layers, new, strict=True):
                own = torch.from_numpy(placement.reshape(2, -1)[ranks.rank])
                held.append(torch.equal(layer.gate_up_proj, kept.gate_up_proj[own]))
                held.append(torch.equal(layer.down_proj, kept.down_proj[own]))
        return held

    assert [all(held) for held in over_threads(2, run)] == [True, True]


@pytest.mark.behaviour(115)
def test_experts_move_after_so_many_steps_and_stay_where_little_is_won() -> None:
    whole = Layers()

    def run(ranks: Counting) -> list[Any]:
        model = Model(whole, ranks, expert_routing.SameTokens, 0)
        balance = balance_of(model, 2, 0, every=3)
        reports = []
        for step in range(7):
            model.module(*skewed(20, step % 3))
            balance.after_step()
            reports.append(balance.last)
        return reports

    reports, others = over_threads(2, run)
    assert reports[:2] == [None, None]
    assert reports[2] is reports[4] is not None
    assert reports[2].moved > 0
    assert reports[5] is reports[6] is not reports[4]
    assert (reports[5].moved, reports[5].after) == (0, reports[5].before)  # the same tokens again
    assert [one and one.tokens for one in others] == [one and one.tokens for one in reports]


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (np.zeros((LAYERS, EXPERTS), dtype=np.int64), "left out experts [1, 2, 3, 4] of layer 0"),
        (np.full((LAYERS, EXPERTS), EXPERTS), "experts outside 0 .. 7"),
        (np.zeros((LAYERS, EXPERTS)), "returned float64"),
        (np.zeros(EXPERTS, dtype=np.int64), "returned int64 (8,)"),
    ],
)
def test_a_wrong_placement_is_an_error_that_names_the_plugin(placement: Any, message: str) -> None:
    class Wrong:
        def place(self, loads: Any) -> Any:
            return placement

    def run(ranks: Counting) -> None:
        balance_of(Model(Layers(), ranks, expert_routing.SameTokens, 0), 1, 0, plugin=Wrong()).rebalance()

    with pytest.raises(PluginError, match="expert_placement:greedy") as caught:
        over_threads(1, run)
    assert message in str(caught.value)
    assert caught.value.fix == "name another in parallel.expert_placement"


@st.composite
def sizes(draw: Any) -> tuple[np.ndarray[Any, Any], int, int]:
    """Return loads of one layer, a number of ranks and of redundant slots."""
    ranks = draw(st.integers(1, 6))
    slots = ranks * draw(st.integers(1, 8))
    redundant = draw(st.integers(0, slots - -(-slots // ranks)))
    counts = st.one_of(st.integers(0, 50), st.integers(0, 10**9), st.floats(0, 1, allow_subnormal=False))
    loads = draw(st.lists(counts, min_size=slots - redundant, max_size=slots - redundant))
    return np.array(loads, dtype=np.float64), ranks, redundant


@settings(max_examples=200, deadline=None)
@given(sizes())
def test_greedy_places_every_expert_and_never_more_than_evenly(case: tuple[Any, int, int]) -> None:
    loads, ranks, redundant = case
    slots = len(loads) + redundant
    placed = Greedy(ExpertPlacementContext(contract=1, ranks=ranks, redundant=redundant)).place(loads[None])
    assert fault_of(placed, 1, len(loads), slots) is None
    assert busiest(loads, placed[0], ranks) <= most(loads, np.arange(slots) % len(loads), ranks)


@settings(max_examples=150, deadline=None)
@given(sizes(), st.randoms(use_true_random=False))
def test_moves_lead_from_one_placement_to_another(case: tuple[Any, int, int], random: Any) -> None:
    loads, ranks, redundant = case
    slots, experts = len(loads) + redundant, len(loads)
    both = [np.array(random.sample((np.arange(slots) % experts).tolist(), slots)) for _ in range(2)]
    old, new = both[0], settled(both[1], both[0], ranks)
    assert busiest(loads, new, ranks) == pytest.approx(busiest(loads, both[1], ranks))
    assert (old != new).sum() <= (old != both[1]).sum()
    moves = [Moves.between(list(old.reshape(ranks, -1)), new, rank, ranks) for rank in range(ranks)]
    held = old.reshape(ranks, -1).copy()
    parts = [np.split(held[rank][list(one.given)], np.cumsum(one.sent)[:-1]) for rank, one in enumerate(moves)]
    for rank, one in enumerate(moves):
        assert [move.sent[rank] for move in moves] == list(one.received)
        held[rank][list(one.filled)] = np.concatenate([part[rank] for part in parts])
    assert np.array_equal(held.reshape(-1), new)


def test_a_stage_without_mixtures_has_nothing_to_move() -> None:
    class Dense:
        def expert_loads(self) -> list[torch.Tensor]:
            return []

        def expert_placements(self) -> list[Any]:
            return []

    report = balance_of(Dense(), 2, 0).rebalance()
    assert (report.tokens, report.before, report.after, report.moved) == (0, 1.0, 1.0, 0)
