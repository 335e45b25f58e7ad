"""One pool for cache groups with unequal pages: the blocks that are chosen, the figures, and what cannot share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from slotline.builder.cache_memory import allocate_pages, bind_caches, block_bytes
from slotline.builder.engine_builder import EngineBuilder
from slotline.planner.cache_specs import SpecBuilder, checked_page_bytes, plan_pool
from slotline.planner.plan import Planned, make_plan
from slotline.registry.capability import Align, Flag
from slotline.registry.config import load_config
from slotline.registry.descriptor import Kind
from slotline.registry.errors import ContractError, ModelError, NegotiationError
from slotline.registry.negotiation import GroupPage, PoolPlan, negotiate
from slotline.registry.negotiation.pages import ALIGNMENT, TOLERANCE, pages_apart, share_pages

Tiny = Callable[..., Path]
HYBRID = {
    "num_hidden_layers": 6,
    "sliding_window_pattern": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}
"""Gemma 3's own proportion: five layers with a window to one without."""


def page(name: str, layers: int, block_size: int, reach: int, token_bytes: int = 64, length: int = 8192) -> GroupPage:
    return GroupPage(
        name=name,
        block_size=block_size,
        kernel_block_size=16,
        page_bytes=layers * block_size * token_bytes,
        blocks=min(-(-length // block_size), -(-(reach - 1) // block_size) + 1),
        optimal_bytes=layers * reach * token_bytes,
    )


def offers(**groups: tuple[int, int]) -> list[tuple[GroupPage, ...]]:
    return [tuple(page(n, layers, 16 * m, reach) for m in range(1, 33)) for n, (layers, reach) in groups.items()]


def planned(path: Path, **settings: Any) -> Planned:
    settings = {"device": "cpu", "dtype": "float32", "scheduler.max_model_len": 64, "cache.block_size": 4, **settings}
    return make_plan(load_config(values={"model": str(path), **settings}))


def test_groups_with_equal_pages_keep_the_block_size_and_waste_nothing() -> None:
    pool = share_pages(offers(full=(24, 8192), sliding=(24, 1024)), 8192)
    assert [group.block_size for group in pool.groups] == [16, 16]
    assert [pool.padding(group) for group in pool.groups] == [0, 0]


def test_the_group_with_the_smaller_pages_gets_more_tokens_in_a_block() -> None:
    pool = share_pages(offers(full=(10, 8192), sliding=(52, 1024)), 8192)  # Gemma 3 27B, but for two layers
    assert [group.block_size for group in pool.groups] == [80, 16]
    assert pool.padding(pool.group("full")) == pytest.approx(1 - 50 / 52, abs=1e-3)
    assert pool.bytes_per_request / pool.optimal_bytes_per_request < 1.05
    reason = "padding in group full because its 80 tokens take 51200 bytes and 16 of group sliding take 53248"
    assert f"3.9 % {reason}" in pool.lines()


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(16, 8192)), min_size=2, max_size=4))
def test_a_shared_block_fits_every_group_divides_evenly_and_is_nearly_the_best(groups: list[tuple[int, int]]) -> None:
    given_offers = offers(**{f"g{i}": group for i, group in enumerate(groups)})
    pool = share_pages(given_offers, 8192)
    for group, choices in zip(pool.groups, given_offers, strict=True):
        assert group in choices
        assert group.page_bytes <= pool.block_bytes
        assert pool.block_bytes % (group.ratio * ALIGNMENT) == 0
    base = max(choices[0].page_bytes for choices in given_offers)
    padded = sum(choices[0].blocks for choices in given_offers) * base  # no block grown
    assert pool.bytes_per_request <= padded * (1 + TOLERANCE)


def test_memory_apart_takes_every_groups_page_for_each_block() -> None:
    pool = pages_apart([page("full", 1, 16, 8192), page("sliding", 3, 16, 64)], 8192)
    assert (pool.shared, pool.block_bytes) == (False, 4 * 16 * 64)
    assert any("75.0 % unused in blocks of group full" in line for line in pool.lines())


@pytest.mark.behaviour(153, 154, 159)
def test_layers_of_all_groups_share_memory_and_those_of_one_group_do_not(tiny: Tiny) -> None:
    found = planned(tiny("gemma3", **HYBRID))
    builder, num_blocks = EngineBuilder(found), 5
    specs = builder.groups.specs()
    assert {g.name: g.block_size for g in found.plan.cache_groups} == {"sliding": 4, "full": 16}
    pages = allocate_pages(found.plan, specs, num_blocks, found.stages.device_of)
    caches = bind_caches(found.plan, specs, pages, num_blocks)
    assert len({cache.key.untyped_storage().data_ptr() for cache in caches.values()}) == 1
    size = block_bytes(found.plan, specs, found.stages.device_of)["cpu"]
    assert caches[0].key.untyped_storage().nbytes() == num_blocks * size
    for group in found.plan.cache_groups:
        ratio = group.block_size // group.kernel_block_size
        for cache in caches.values():
            cache.key.zero_(), cache.value.zero_()
        for layer in group.layers:
            caches[layer.index].key[2 * ratio : 3 * ratio].fill_(layer.index + 1.0)
            caches[layer.index].value[2 * ratio : 3 * ratio].fill_(-layer.index - 1.0)
        for layer in group.layers:
            assert (caches[layer.index].key[2 * ratio : 3 * ratio] == layer.index + 1).all()
            assert (caches[layer.index].value[2 * ratio : 3 * ratio] == -layer.index - 1).all()
        for other in found.plan.cache_groups:  # the other groups' other blocks are untouched
            own = other.block_size // other.kernel_block_size
            for layer in other.layers:
                for kept in (slice(0, 2 * own), slice(3 * own, None)):
                    assert not caches[layer.index].key[kept].any()
                    assert not caches[layer.index].value[kept].any()


@pytest.mark.behaviour(156)
@pytest.mark.parametrize("num_blocks", [2, 3])
def test_keys_and_values_of_a_block_lie_in_the_blocks_own_bytes_also_where_there_are_two(
    num_blocks: int, tiny: Tiny
) -> None:
    """With two blocks, and two tensors in each, a layout that is guessed from sizes could be read either way."""
    found = planned(tiny("gemma3", **HYBRID))
    specs, device_of = EngineBuilder(found).groups.specs(), found.stages.device_of
    pages = allocate_pages(found.plan, specs, num_blocks, device_of)
    caches = bind_caches(found.plan, specs, pages, num_blocks)
    size = block_bytes(found.plan, specs, device_of)["cpu"]
    for group in found.plan.cache_groups:
        ratio = group.block_size // group.kernel_block_size
        for layer in group.layers:
            cache = caches[layer.index]
            assert len(cache.key) == len(cache.value) == num_blocks * ratio
            begin = cache.key.untyped_storage().data_ptr()
            for block in range(num_blocks):
                for tensor in (cache.key, cache.value):
                    for page in tensor[block * ratio : (block + 1) * ratio]:
                        first = page.data_ptr() - begin
                        last = first + sum((n - 1) * s for n, s in zip(page.shape, page.stride(), strict=True)) * 4 + 4
                        assert block * size <= first < last <= (block + 1) * size


def test_explain_says_what_is_lost_and_asked_and_resolved_stand_side_by_side(tiny: Tiny) -> None:
    plan = planned(tiny("gemma3", **HYBRID)).plan
    text = " ".join(plan.explain(4000).split())
    assert "a request of 64 tokens holds 3 sliding + 4 full blocks at most" in text
    assert "requests per GiB where" in text
    assert "N304 block sizes differ" in text
    (setting,) = (s for s in plan.settings if s.key == "cache.block_size")
    assert (setting.asked, setting.resolved) == ("4", "sliding 4, full 16")
    assert plan.to_json()["pool"]["groups"][1]["padding"] == 0.2
    assert plan.downgrades == ()


def contiguous(found: Planned, name: str) -> SpecBuilder:
    """The plan's builder, where one spec cannot have its pages lie apart."""
    descriptor = found.offers[Kind.KV_SPEC, name]
    narrowed = evolve(descriptor, capabilities=evolve(descriptor.capabilities, page_stride=Flag(False)))
    return SpecBuilder(found.loaded, found.registry, {**found.offers, (Kind.KV_SPEC, name): narrowed}, "float32", 64)


def test_a_spec_whose_pages_cannot_lie_apart_costs_memory_and_the_plan_says_how_much(tiny: Tiny) -> None:
    from negotiation_cases import CPU, layer, request

    found = planned(tiny("gemma3", **HYBRID))
    plan = evolve(
        found.plan,
        downgrades=(),
        notes=(),
        pool=None,
        cache_groups=tuple(evolve(g, block_size=4) for g in found.plan.cache_groups),
    )
    asked = evolve(request(layer(0)), device=CPU)
    apart = plan_pool(plan, asked, contiguous(found, "sliding"))
    assert apart.pool is not None
    assert not apart.pool.shared
    (note,) = apart.downgrades
    assert note.code == "N332"
    assert f"{apart.pool.block_bytes} bytes" in note.text
    assert note.because == ("sliding: its pages cannot lie apart in shared blocks (page_stride)",)
    with pytest.raises(NegotiationError, match="N332"):
        plan_pool(plan, evolve(asked, strict=True), contiguous(found, "sliding"))
    assert plan_pool(plan, evolve(asked, strict=True, allow=("N332",)), contiguous(found, "sliding")).pool == apart.pool


@pytest.mark.parametrize("size", [0, -4, 30, 4.0, None])
def test_a_page_that_cannot_be_cut_into_kernel_blocks_is_refused_with_layer_and_numbers(size: Any) -> None:
    from negotiation_cases import layer

    class Odd:
        def page_bytes(self, _: Any) -> Any:
            return size

    with pytest.raises(ContractError, match=rf"'odd' .* layer '{layer(0).name}' has {size!r} bytes.*4 equal kernel"):
        checked_page_bytes(Odd(), layer(0), 4, "odd")  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_without_a_token_is_refused_with_the_layers(window: int, tiny: Tiny) -> None:
    with pytest.raises(ModelError, match=rf"layers.0.self_attn, .* have a window of {window} tokens"):
        planned(tiny("mistral", sliding_window=window))


def test_a_block_size_that_no_group_accepts_is_refused_with_its_number() -> None:
    from negotiation_cases import FULL, SLIDING, backend, explicit, layer, request, sliding

    wants_32 = [
        evolve(s, capabilities=evolve(s.capabilities, block_sizes=Align(multiple_of=32))) for s in (FULL, SLIDING)
    ]
    with pytest.raises(NegotiationError, match=r"cache.block_size = 24") as caught:
        negotiate(request(layer(0), sliding(1), block_size=explicit(24)), [backend("a")], wants_32)
    assert "N141 manager block size: needs 24, offers multiples of 32" in caught.value.explain()
    assert "cache.block_size = 32" in caught.value.failure.remedies


def test_one_group_alone_has_no_padding(tiny: Tiny) -> None:
    pool = planned(tiny("llama")).plan.pool
    assert isinstance(pool, PoolPlan)
    assert pool.bytes_per_request == pool.optimal_bytes_per_request
