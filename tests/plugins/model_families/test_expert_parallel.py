"""Mixtures whose experts are on several ranks, with ranks as threads."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from expert_ranks import Counting, over_threads, share
from mixtures import EXPERTS, HIDDEN, close, mixture, routing

from slotline.plugins.model_families.tensor_parallel import expert_parallel, expert_routing
from slotline.plugins.model_families.tensor_parallel.threads import Meeting
from slotline.registry.contracts.model_family import Shard
from slotline.registry.errors import NegotiationError

FORMS = ("eager", "batched_mm", "grouped_mm")


def divided(whole: Any, ranks: Counting, form: Any, redundant: int = 0, *, count: bool = False) -> Any:
    """Return a rank's part of a mixture."""
    part = copy.deepcopy(whole)
    share(part, ranks, form, redundant, count=count)
    return part


def lonely(rank: int) -> Counting:
    """Return a rank whose others do nothing."""
    return Counting(Meeting(2), rank)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "glm4_moe"])
def test_same_tokens_give_the_sums_of_the_whole(name: str, form: str) -> None:
    whole = mixture(name, form)
    given = routing(17, 1)
    for size, redundant in ((2, 0), (4, 0), (2, 2), (3, 1), (2, 8)):
        found = over_threads(
            size, lambda ranks, extra=redundant: divided(whole, ranks, expert_routing.SameTokens, extra)(*given)
        )
        close(found, [whole(*given)] * size)


@pytest.mark.parametrize("form", FORMS)
def test_gathered_tokens_give_each_rank_its_own_sums(form: str) -> None:
    whole = mixture("qwen3_moe", form)
    given = [routing(6, rank) for rank in range(3)]
    found = over_threads(3, lambda ranks: divided(whole, ranks, expert_routing.GatheredTokens, 1)(*given[ranks.rank]))
    close(found, [whole(*one) for one in given])


@pytest.mark.parametrize("counts", [(5, 9), (1, 0), (0, 0), (4, 0, 11), (1, 2, 3, 4)])
@pytest.mark.parametrize("form", FORMS)
def test_exchanged_tokens_give_each_rank_its_own_sums(form: str, counts: tuple[int, ...]) -> None:
    whole = mixture("mixtral", form)
    given = [routing(count, seed) for seed, count in enumerate(counts)]
    redundant = -EXPERTS % len(counts)
    found = over_threads(
        len(counts),
        lambda ranks: divided(whole, ranks, expert_routing.ExchangedTokens, redundant)(*given[ranks.rank]),
    )
    close(found, [whole(*one) if len(one[0]) else one[0] for one in given])


@pytest.mark.parametrize(
    ("kind", "counts"), [(expert_routing.GatheredTokens, (6, 6)), (expert_routing.ExchangedTokens, (9, 0))]
)
@pytest.mark.parametrize("redundant", [0, 4])
def test_groups_with_tokens_of_their_own_get_the_sums_of_the_whole(
    kind: Any, counts: tuple[int, ...], redundant: int
) -> None:
    whole, meetings = mixture("mixtral", "grouped_mm"), dict[tuple[str, int], Meeting]()
    given = [routing(count, seed) for seed, count in enumerate(counts)]

    def run(ranks: Counting) -> torch.Tensor:
        def joined(name: str, number: int, rank: int) -> Counting:
            return Counting(meetings.setdefault((name, number), Meeting(2, ranks.meeting.turn)), rank)

        replica, place = divmod(ranks.rank, 2)
        part = copy.deepcopy(whole)
        shard = Shard(rank=place, size=2, experts=True, redundant_experts=redundant, replicas=2, replica=replica)
        expert_parallel.own(part, "experts", shard)
        part.forward = kind(part, joined("column", place, replica), expert_routing.Column(place, 2))
        return joined("group", replica, place).all_reduce(part(*given[replica]).contiguous())

    wanted = [whole(*one) if len(one[0]) else one[0] for one in given]
    close(over_threads(4, run), [wanted[0], wanted[0], wanted[1], wanted[1]])


def test_a_token_goes_once_to_each_rank_of_its_experts() -> None:
    whole = mixture("mixtral", "eager")
    hidden, _, weights = routing(4, 0)
    chosen = torch.tensor([[0, 1, 2], [0, 1, 7], [4, 5, 6], [3, 4, 5]])

    def run(ranks: Counting) -> int:
        part = divided(whole, ranks, expert_routing.ExchangedTokens)
        part(hidden, chosen, weights)
        return ranks.rows

    # 3 tensors there and 1 back: rank 0 sends 3 tokens and gives 2 back, rank 1 sends 3 and gives 3 back; 1 number each
    assert over_threads(2, run) == [1 + 3 * 3 + 3, 1 + 3 * 3 + 3]


@pytest.mark.parametrize("form", [expert_routing.SameTokens, expert_routing.ExchangedTokens])
def test_copies_of_an_expert_share_its_tokens(form: Any) -> None:
    whole = mixture("mixtral", "eager")
    placement = np.array([0, 1, 2, 3, 4, 0, 5, 6, 7, 0])
    given = routing(48, 3)

    def run(ranks: Counting) -> tuple[torch.Tensor, list[int]]:
        part = divided(whole, ranks, form, 2, count=True)
        own = torch.from_numpy(placement[ranks.rank * 5 :][:5])
        for name in ("gate_up_proj", "down_proj"):
            getattr(part, name).copy_(getattr(whole, name)[own])
        expert_parallel.place(part, placement, ranks.rank)
        return part(*given), part.slotline_loads.tolist()

    results = over_threads(2, run)
    close([out for out, _ in results], [whole(*given)] * 2)
    assert [loads for _, loads in results] == [torch.bincount(given[1].flatten(), minlength=EXPERTS).tolist()] * 2
    turns = expert_parallel.places_of(placement, EXPERTS)
    assert {int(place): int((turns[0] == place).sum()) for place in turns[0]} == {0: 8, 5: 8, 9: 8}


def test_a_rank_keeps_its_own_experts_alone() -> None:
    whole = mixture("mixtral", "eager")
    part = divided(whole, lonely(1), expert_routing.SameTokens)
    assert torch.equal(part.gate_up_proj, whole.gate_up_proj[4:])
    assert torch.equal(part.down_proj, whole.down_proj[4:])
    assert part.gate_up_proj.untyped_storage().nbytes() * 2 == whole.gate_up_proj.untyped_storage().nbytes()


@pytest.mark.parametrize(("size", "redundant"), [(3, 0), (2, 1), (2, 10), (3, -2)])
def test_uneven_shares_are_refused(size: int, redundant: int) -> None:
    whole = mixture("mixtral", "eager")
    with pytest.raises(NegotiationError, match="cannot be shared evenly") as caught:
        expert_parallel.own(whole, "experts", Shard(rank=0, size=size, experts=True, redundant_experts=redundant))
    assert caught.value.fix == f"set parallel.redundant_experts = {-EXPERTS % size}"


def test_a_mixture_that_no_recipe_knows_is_refused_by_name() -> None:
    found = [
        ("dense", torch.nn.Linear(2, 2)),
        ("one", mixture("mixtral", "eager")),
        ("two", mixture("mixtral", "eager")),
    ]
    shared, divided_ones = Shard(rank=0, size=2, experts=True), Shard(rank=0, size=2)
    with pytest.raises(NegotiationError, match="no recipe shares the experts of 'two'"):
        expert_parallel.refuse_left(found, ["one"], shared)
    expert_parallel.refuse_left(found, ["one", "two"], shared)
    expert_parallel.refuse_left(found, [], divided_ones)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("count", [1, 13])
def test_our_kernels_give_the_sums_of_transformers(name: str, count: int) -> None:
    """In Triton's interpreter, which is why the dtype is float32."""
    pytest.importorskip("triton")
    from slotline.plugins.model_families.tensor_parallel.expert_product import OwnSums, sums_of

    whole = mixture(name, "grouped_mm")
    assert isinstance(sums_of(whole, fused=True), OwnSums) is whole.down_proj.is_cuda
    hidden, chosen, weights = routing(count, 5)
    for rank in range(2):
        part = divided(whole, lonely(rank), expert_routing.SameTokens)
        own = expert_routing.entries(part.slotline_local, chosen)
        close([OwnSums(part)(hidden, own, weights)], [sums_of(part, fused=False)(hidden, own, weights)])
    foreign = torch.full_like(chosen, EXPERTS)
    close([OwnSums(whole)(hidden, foreign, weights)], [torch.zeros_like(hidden)])
    close([OwnSums(whole)(hidden, chosen, weights)], [whole(hidden, chosen, weights)])
    assert OwnSums(whole)(hidden[:0], chosen[:0], weights[:0]).shape == (0, HIDDEN)


COMPILING = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from slotline.plugins.model_families.tensor_parallel import expert_kernels as kernels

dtypes = dict.fromkeys(("x", "rows", "merged", "out"), "*bf16") | {"weights": "*fp32", "order": "*i64"}
dtypes |= dict.fromkeys(("ends", "places", "own"), "*i32") | dict.fromkeys(("size", "last", "experts"), "i32")
fixed = {"choices": 8, "block": 1024, "activation": "silu"}
for kernel in (kernels.take_rows, kernels.gate_rows, kernels.join_rows):
    constants = {name: fixed[name] for name in kernel.arg_names if name in fixed}
    signature = {name: "constexpr" if name in fixed else dtypes[name] for name in kernel.arg_names}
    made = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    print("cubin" in made.asm and len(made.asm["cubin"]) > 0)
"""


@pytest.mark.slow
def test_our_kernels_compile_for_a_card() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True"] * 3, done.stderr
