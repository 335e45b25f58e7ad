"""Negotiation rule by rule: blocks, choices, refusals, cache specs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from attrs import evolve
from negotiation_cases import (
    CPU,
    FULL,
    GPU,
    SLIDING,
    backend,
    explicit,
    layer,
    request,
    sliding,
    spec,
)

from slotline.registry.capability import Align, Choice, Flag, Limit, Max, Range, Set
from slotline.registry.descriptor import ContractRange, DeviceInfo
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import (
    CODES,
    Asked,
    Candidate,
    Need,
    Part,
    Plan,
    PlanRequest,
    group_layers,
    negotiate,
)
from slotline.registry.negotiation.reasons import Note


def codes_against(refused: Candidate, asked: PlanRequest) -> set[str]:
    """Reasons for one candidate, beside one that can do everything."""
    able = backend(
        "able",
        dtypes=Set(None),
        soft_cap=Flag(True),
        sinks=Flag(True),
        alibi=Flag(True),
        different_value_head=Flag(True),
        attention_types=Set(None),
        tree_mask=Flag(True),
        cascade=Flag(True),
        kv_scales=Flag(True),
        batch_invariant=Flag(True),
        layouts=Choice(("NHD", "HND")),
        lse=Flag(True),
        devices=Set(None),
    )
    plan = negotiate(asked, [refused, able], [FULL])
    assert {group.backend for group in plan.groups} == {"able"}
    return {reason.code for group in plan.groups for item in group.rejected for reason in item.reasons}


def failure(asked: PlanRequest, attention: list[Candidate], specs: list[Candidate] | None = None) -> NegotiationError:
    with pytest.raises(NegotiationError) as caught:
        negotiate(asked, attention, [FULL] if specs is None else specs)
    return caught.value


# --- attention groups


@pytest.mark.behaviour(148)
def test_layers_with_equal_needs_form_one_group_named_after_their_cache_kind() -> None:
    layers = [layer(0), sliding(1), layer(2), sliding(3, window=64), layer(4, soft_cap=30.0)]
    groups = group_layers(layers)
    assert [group.name for group in groups] == ["full", "sliding", "sliding_1", "full_1"]
    assert [[item.index for item in group.layers] for group in groups] == [[0, 2], [1], [3], [4]]


# --- blocks


@pytest.mark.behaviour(151)
def test_a_multiple_of_offer_keeps_the_managers_size() -> None:
    plan = negotiate(request(block_size=explicit(48)), [backend("a", kernel_block_sizes=Align(multiple_of=16))], [FULL])
    assert (plan.block_size, plan.groups[0].kernel_block_size) == (48, 48)


@pytest.mark.behaviour(151)
def test_exact_sizes_must_divide_the_managers_size_and_the_largest_is_taken() -> None:
    sizes = Align(exact=(8, 16, 24, 128))
    plan = negotiate(request(block_size=explicit(64)), [backend("a", kernel_block_sizes=sizes)], [FULL])
    assert (plan.block_size, plan.groups[0].kernel_block_size) == (64, 16)
    assert [note.code for note in plan.notes] == ["N302"]
    assert plan.downgrades == ()


@pytest.mark.behaviour(151)
def test_the_managers_own_size_is_preferred_to_a_divisor() -> None:
    plan = negotiate(request(), [backend("a", kernel_block_sizes=Align(exact=(8, 16, 32)))], [FULL])
    assert plan.groups[0].kernel_block_size == 16


@pytest.mark.behaviour(151)
def test_groups_that_share_a_block_table_share_one_kernel_block_size() -> None:
    choice = explicit({"full": "a", "sliding": "b"})
    offers = [
        backend("a", kernel_block_sizes=Align(multiple_of=8)),
        backend("b", kernel_block_sizes=Align(exact=(8, 4))),
    ]
    plan = negotiate(request(layer(0), sliding(1), backend=choice, block_size=explicit(16)), offers, [FULL])
    assert {group.kernel_block_size for group in plan.groups} == {8}
    assert len(plan.cache_groups) == 1


@pytest.mark.behaviour(151)
def test_separate_cache_groups_may_have_separate_kernel_block_sizes() -> None:
    choice = explicit({"full": "a", "sliding": "b"})
    offers = [
        backend("a", kernel_block_sizes=Align(multiple_of=16)),
        backend("b", kernel_block_sizes=Align(exact=(8,))),
    ]
    plan = negotiate(request(layer(0), sliding(1), backend=choice), offers, [FULL, SLIDING])
    assert [group.kernel_block_size for group in plan.groups] == [16, 8]
    assert [group.name for group in plan.cache_groups] == ["full", "sliding"]


@pytest.mark.behaviour(151)
def test_without_a_common_kernel_block_size_the_error_lists_every_backend_with_its_sizes() -> None:
    choice = explicit({"full": "a", "sliding": "b"})
    offers = [backend("a", kernel_block_sizes=Align(exact=(12,))), backend("b", kernel_block_sizes=Align(exact=(16,)))]
    error = failure(request(layer(0), sliding(1), backend=choice), offers)
    assert error.failure is not None
    assert error.failure.code == "N503"
    assert "a: 12" in error.message
    assert "b: 16" in error.message
    assert {member.key for member in error.conflict} == {"attention.backend.full", "attention.backend.sliding"}


def test_an_automatic_block_size_is_raised_for_a_backend_that_needs_it_and_the_plan_says_so() -> None:
    plan = negotiate(request(), [backend("fa2", kernel_block_sizes=Align(multiple_of=256))], [FULL])
    assert plan.block_size == 256
    (note,) = plan.downgrades
    assert (note.code, note.asked, note.resolved) == ("N301", "auto", "256")
    assert note.because == ("fa2 (full): multiples of 256",)
    assert note.to_avoid == ("cache.block_size = 256",)


def test_two_cache_groups_get_the_least_common_multiple() -> None:
    choice = explicit({"full": "a", "sliding": "b"})
    offers = [
        backend("a", kernel_block_sizes=Align(multiple_of=48)),
        backend("b", kernel_block_sizes=Align(multiple_of=32)),
    ]
    assert negotiate(request(layer(0), sliding(1), backend=choice), offers, [FULL, SLIDING]).block_size == 96


def test_an_explicit_block_size_is_never_changed() -> None:
    asked = request(block_size=explicit(16), backend=explicit("fa2"))
    error = failure(asked, [backend("fa2", kernel_block_sizes=Align(multiple_of=256)), backend("torch")])
    assert {member.key for member in error.conflict} == {"attention.backend", "cache.block_size"}
    assert error.failure is not None
    assert error.failure.remedies == ('attention.backend = "torch"', "cache.block_size = 256")


def test_a_spec_that_cannot_be_split_needs_the_kernel_to_take_the_managers_size() -> None:
    whole = spec("whole", splittable=Flag(False))
    asked = request(block_size=explicit(16))
    assert negotiate(asked, [backend("a", kernel_block_sizes=Align(exact=(8, 16)))], [whole]).block_size == 16
    error = failure(asked, [backend("a", kernel_block_sizes=Align(exact=(8,)))], [whole])
    assert {reason.code for reason in error.reasons} == {"N145"}


def test_a_specs_block_sizes_count_too() -> None:
    coarse = spec("coarse", block_sizes=Align(multiple_of=32))
    plan = negotiate(request(), [backend("a")], [coarse])
    assert plan.block_size == 32
    assert plan.downgrades[0].because == ("coarse (full): multiples of 32",)
    error = failure(request(block_size=explicit(16)), [backend("a")], [coarse])
    assert "N141" in {reason.code for reason in error.reasons}


# --- layouts


def noted(plan: Plan, code: str) -> list[Note]:
    return [note for note in (*plan.notes, *plan.downgrades) if note.code == code]


SIXTY_FOUR = Align(multiple_of=64)


def test_auto_takes_the_block_size_that_the_chosen_backend_prefers_and_the_plan_says_so() -> None:
    plan = negotiate(request(), [backend("a", preferred_block_sizes=SIXTY_FOUR)], [FULL])
    assert (plan.block_size, plan.groups[0].kernel_block_size) == (64, 64)
    (note,) = noted(plan, "N305")
    assert (note.asked, note.resolved, note.because) == ("auto", "64", ("a (full): multiples of 64",))
    assert not plan.downgrades
    assert "N305" in plan.explain()


def test_a_block_size_in_the_file_wins_over_what_a_backend_prefers_and_the_plan_says_so() -> None:
    plan = negotiate(request(block_size=explicit(16)), [backend("a", preferred_block_sizes=SIXTY_FOUR)], [FULL])
    assert plan.block_size == 16
    (note,) = noted(plan, "N305")
    assert note.text.startswith("16 (run.toml:1) stands")
    assert not plan.downgrades


def test_a_preferred_block_size_passes_strict() -> None:
    plan = negotiate(request(strict=True), [backend("a", preferred_block_sizes=SIXTY_FOUR)], [FULL])
    assert plan.block_size == 64


@pytest.mark.parametrize("picky", ["a", "b"])
def test_a_preference_decides_the_block_size_and_not_the_backend(picky: str) -> None:
    offers = [
        backend(name, priority=10 * (name == "a"), preferred_block_sizes=SIXTY_FOUR if name == picky else Align())
        for name in "ab"
    ]
    plan = negotiate(request(), offers, [FULL])
    assert plan.groups[0].backend == "a"
    assert plan.block_size == (64 if picky == "a" else 16)
    (lost,) = plan.groups[0].rejected
    assert [reason.text for reason in lost.reasons] == ["priority: 0, a has 10"]


def test_a_backend_that_needs_another_block_size_loses_by_that_and_not_by_its_preference() -> None:
    needs = backend("needs", priority=10, kernel_block_sizes=Align(multiple_of=48), preferred_block_sizes=SIXTY_FOUR)
    plan = negotiate(request(), [backend("plain"), needs], [FULL])
    assert (plan.groups[0].backend, plan.block_size) == ("plain", 16)
    (lost,) = plan.groups[0].rejected
    assert [reason.text for reason in lost.reasons] == ["block size: it would change the block size to 192"]


def test_a_preference_may_hold_for_some_layers_alone() -> None:
    limit = Limit(when="sliding_window", capability="preferred_block_sizes", offer=SIXTY_FOUR, note="the window's tile")
    offers = [backend("a", limits=(limit,))]
    assert negotiate(request(layer(0)), offers, [FULL]).block_size == 16
    plan = negotiate(request(layer(0), sliding(1)), offers, [FULL, SLIDING])
    assert plan.block_size == 64
    assert noted(plan, "N305")[0].because == ("a (sliding): multiples of 64 with sliding_window (the window's tile)",)


def test_a_preference_is_left_where_a_group_cannot_have_it() -> None:
    small = backend("small", kernel_block_sizes=Align(exact=(16,)), sliding_window=Flag(False))
    large = backend("large", preferred_block_sizes=SIXTY_FOUR)
    rigid = spec("rigid", block_sizes=Align((16,)))
    tables = explicit({"full": "small", "sliding": "large"})
    plan = negotiate(request(layer(0), sliding(1), backend=tables), [small, large], [rigid, SLIDING])
    assert plan.block_size == 16
    assert "does not suit all groups" in noted(plan, "N305")[0].text
    plan = negotiate(request(layer(0), sliding(1), backend=tables), [small, large], [FULL, SLIDING])
    assert {group.backend: group.kernel_block_size for group in plan.groups} == {"small": 16, "large": 64}


def test_a_preference_comes_on_top_of_what_is_needed() -> None:
    offers = [
        backend("a", kernel_block_sizes=Align(multiple_of=48), preferred_block_sizes=SIXTY_FOUR),
        backend("z", priority=-1),
    ]
    plan = negotiate(request(backend=explicit("a")), offers, [FULL])
    assert plan.block_size == 192
    assert [note.resolved for note in noted(plan, "N301")] == ["48"]
    assert [note.text for note in noted(plan, "N305")] == ["48 raised to 192, which kernels are fastest with"]


def test_where_preferences_differ_most_groups_decide() -> None:
    odd, even = backend("odd", preferred_block_sizes=Align((24,))), backend("even", preferred_block_sizes=SIXTY_FOUR)
    layers = (layer(0), sliding(1, 32), sliding(2, 64))
    asked = request(*layers, backend=explicit({"full": "odd", "sliding": "even"}))
    plan = negotiate(asked, [odd, even], [FULL, SLIDING])
    assert plan.block_size == 64
    assert "not those of full" in noted(plan, "N305")[0].text


def test_layers_without_a_cache_prefer_no_block_size() -> None:
    encoder = layer(0, attention_type="encoder_only")
    offer = backend("a", attention_types=Set(("decoder", "encoder_only")), preferred_block_sizes=SIXTY_FOUR)
    plan = negotiate(request(encoder), [offer], [FULL])
    assert plan.block_size == 16
    assert not noted(plan, "N305")


def test_the_layout_is_one_that_all_groups_of_a_cache_group_take() -> None:
    offers = [backend("a", layouts=Choice(("HND", "NHD"))), backend("b", layouts=Choice(("NHD",)))]
    choice = explicit({"full": "a", "sliding": "b"})
    assert negotiate(request(layer(0), backend=explicit("a")), offers, [FULL]).groups[0].layout == "HND"
    plan = negotiate(request(layer(0), sliding(1), backend=choice), offers, [FULL])
    assert [group.layout for group in plan.groups] == ["NHD", "NHD"]


# --- choices


def test_an_explicit_backend_that_cannot_serve_is_an_error_with_all_reasons_and_a_way_out() -> None:
    weak = backend("weak", head_sizes=Range(128, 128), dtypes=Set((("float16", "float16"),)))
    error = failure(request(backend=explicit("weak", "run.toml:3 attention.backend")), [weak, backend("torch")])
    texts = {reason.code: reason.text for reason in error.reasons}
    assert texts["N130"] == "head size: needs 64, offers 128"
    assert texts["N120"] == "dtype pair: needs float32/float32, offers float16/float16"
    assert 'attention.backend = "torch"' in str(error)
    assert "run.toml:3" in str(error)


def test_a_named_backend_that_nobody_offers_is_not_installed() -> None:
    error = failure(request(backend=explicit("flashinfr")), [backend("torch")])
    assert "N001" in {reason.code for reason in error.reasons}
    assert error.conflict[0].value == '"flashinfr"'


@pytest.mark.parametrize(
    ("broken", "code"),
    [
        (Candidate(name="x", load_error="ModuleNotFoundError: no module named 'x'"), "N002"),
        (Candidate(name="x", contract=None), "N003"),
        (Candidate(name="x", blocked="plugins.block"), "N004"),
        (evolve(backend("x"), probe_refusal="needs sm_90"), "N005"),
    ],
)
def test_an_unusable_plugin_is_an_error_if_named_and_a_row_if_not(broken: Candidate, code: str) -> None:
    plan = negotiate(request(), [broken, backend("torch")], [FULL])
    assert [reason.code for reason in plan.groups[0].rejected[0].reasons] == [code]
    assert code in {reason.code for reason in failure(request(backend=explicit("x")), [broken]).reasons}


def test_a_list_of_backends_is_an_order_of_preference_and_falling_back_is_recorded() -> None:
    first, second = backend("first", head_sizes=Range(128, 128)), backend("second", priority=1)
    asked = request(backend=explicit(("first", "second")))
    plan = negotiate(asked, [backend("third", priority=9), second, first], [FULL])
    assert plan.groups[0].backend == "second"
    (note,) = plan.downgrades
    assert note.code == "N303"
    assert note.because == ("first: N130 head size: needs 64, offers 128",)
    assert note.to_avoid == ('attention.backend = "second"',)
    better = negotiate(asked, [second, backend("first")], [FULL])
    assert (better.groups[0].backend, better.downgrades) == ("first", ())


def test_auto_at_the_end_of_a_list_admits_the_rest() -> None:
    asked = request(backend=explicit(("first", "auto")))
    assert (
        negotiate(asked, [backend("first", sinks=Flag(False)), backend("other")], [FULL]).groups[0].backend == "first"
    )
    assert negotiate(asked, [backend("other")], [FULL]).groups[0].backend == "other"


def test_a_table_chooses_a_backend_for_each_cache_kind() -> None:
    asked = request(layer(0), sliding(1), backend=explicit({"sliding": "b"}))
    plan = negotiate(asked, [backend("a", priority=5), backend("b")], [FULL])
    assert [group.backend for group in plan.groups] == ["a", "b"]


def test_a_table_entry_for_a_kind_that_the_model_lacks_is_a_warning() -> None:
    plan = negotiate(request(backend=explicit({"mla": "b"})), [backend("a")], [FULL])
    assert [(note.code, note.key) for note in plan.warnings] == [("N401", "attention.backend.mla")]


def test_auto_takes_the_highest_priority_and_then_the_first_name() -> None:
    offers = [backend("b", priority=1), backend("c", priority=2), backend("a", priority=2)]
    plan = negotiate(request(), offers, [FULL])
    assert plan.groups[0].backend == "a"
    texts = {item.name: item.reasons[0].text for item in plan.groups[0].rejected}
    assert texts["b"] == "priority: 1, a has 2"
    assert texts["c"] == "name: equal in all that counts, and a comes first by name"


# --- refusals, one capability each

_REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # code, the backend's offer, the layer, the request
    ("N101", {"devices": Set(("cuda",))}, {}, {}),
    ("N102", {"min_compute_capability": (10, 0)}, {}, {"device": GPU}),
    ("N111", {}, {"attention_type": "cross"}, {}),
    ("N120", {}, {}, {"kv_dtype": explicit("float8_e4m3fn")}),
    (
        "N121",
        {"dtypes": Set((("float32", "float8_e4m3fn"),))},
        {},
        {"kv_dtype": explicit("fp8"), "kv_scales": explicit("checkpoint")},
    ),
    ("N130", {"head_sizes": Range(64, 256, 64)}, {"head_size": 80, "head_size_v": 80}, {}),
    ("N131", {}, {"head_size_v": 32}, {}),
    ("N132", {"group_sizes": Range(1, 2)}, {}, {}),
    ("N140", {"kernel_block_sizes": Align(exact=(32,))}, {}, {"block_size": explicit(16)}),
    ("N150", {}, {}, {"layout": explicit("HND")}),
    ("N160", {"query_len": Max(4)}, {}, {"query_len": explicit(5, "drafter ngram: 1+4 tokens")}),
    ("N160", {"query_len": Max(4)}, {}, {"max_query_len": Asked(512)}),
    ("N170", {"sliding_window": Flag(False)}, {"window": 64}, {}),
    ("N171", {}, {"soft_cap": 50.0}, {}),
    ("N172", {}, {"sinks": True}, {}),
    ("N181", {}, {"alibi_slopes": (0.5,) * 8}, {}),
    ("N173", {}, {}, {"tree_mask": explicit(True)}),
    ("N174", {}, {}, {"cascade": explicit(True)}),
    ("N175", {}, {}, {"batch_invariant": explicit(True)}),
    ("N176", {}, {}, {"needs": (Need(capability="lse", origin="merge"),)}),
]


@pytest.mark.parametrize(("code", "offer", "facts", "asked"), _REFUSALS)
def test_a_backend_is_refused_for_the_need_it_lacks_and_for_no_other(
    code: str, offer: dict[str, Any], facts: dict[str, Any], asked: dict[str, Any]
) -> None:
    assert codes_against(backend("weak", **offer), request(layer(0, **facts), **asked)) == {code}


def test_all_reasons_are_kept_not_the_first_alone() -> None:
    weak = backend("weak", head_sizes=Range(128, 128), sliding_window=Flag(False), devices=Set(("tpu",)))
    assert codes_against(weak, request(sliding(0, sinks=True))) == {"N101", "N130", "N170", "N172"}


def test_a_refusal_names_who_needs_it() -> None:
    asked = request(query_len=explicit(5, "drafter ngram: 1+4 tokens"))
    error = failure(asked, [backend("weak", query_len=Max(1))])
    assert [(reason.code, reason.origin) for reason in error.reasons] == [("N160", "drafter ngram: 1+4 tokens")]
    assert error.failure is not None
    assert error.failure.remedies == ('drafter.name = ""',)


def test_a_limit_refuses_only_where_the_other_need_is_there() -> None:
    limit = Limit(when="sliding_window", capability="dtypes", offer=Set((("float16", "float16"),)), note="kernel bug 7")
    weak = backend("weak", limits=(limit,), priority=9)
    plan = negotiate(request(layer(0), sliding(1)), [weak, backend("torch")], [FULL])
    assert [group.backend for group in plan.groups] == ["weak", "torch"]
    reason = plan.groups[1].rejected[0].reasons[0]
    assert reason.text == "dtype pair: needs float32/float32, offers float16/float16 with sliding_window (kernel bug 7)"


def test_a_limit_can_shrink_block_sizes_and_layouts() -> None:
    limits = (
        Limit(when="sliding_window", capability="kernel_block_sizes", offer=Align(multiple_of=64)),
        Limit(when="sliding_window", capability="layouts", offer=Choice(("HND",))),
    )
    both = backend("a", limits=limits, layouts=Choice(("NHD", "HND")))
    plain, windowed = (negotiate(request(item), [both], [FULL]) for item in (layer(0), sliding(0)))
    assert (plain.block_size, plain.groups[0].layout) == (16, "NHD")
    assert (windowed.block_size, windowed.groups[0].layout) == (64, "HND")


# --- dtypes


def test_a_dtype_left_open_falls_back_and_says_so() -> None:
    asked = request(dtype=Asked("bfloat16", "checkpoint"), dtype_fallbacks=("float32",))
    plan = negotiate(asked, [backend("a")], [FULL])
    assert (plan.dtype, plan.kv_dtype) == ("float32", "float32")
    assert [note.code for note in plan.downgrades] == ["N320"]
    assert plan.downgrades[0].to_avoid == ('dtype = "float32"',)


def test_an_explicit_dtype_does_not_fall_back() -> None:
    error = failure(request(dtype=explicit("bfloat16"), dtype_fallbacks=("float32",)), [backend("a")])
    assert error.failure is not None
    assert error.failure.remedies == ('dtype = "float32"',)


# --- cache specs


def test_an_exact_spec_is_preferred_to_one_that_wastes() -> None:
    plan = negotiate(request(layer(0), sliding(1)), [backend("a")], [FULL, SLIDING])
    assert [group.kv_spec for group in plan.groups] == ["full", "sliding"]
    assert plan.downgrades == ()
    lost = {group.name: group.rejected[0] for group in plan.cache_groups}
    assert [reason.code for reason in lost["full"].reasons] == ["N110"]
    assert lost["sliding"].reasons[0].text == "cache spec: full wastes more or shares less than sliding"


def test_without_an_exact_spec_a_general_one_holds_the_kind_and_the_plan_says_so() -> None:
    plan = negotiate(request(layer(0), sliding(1)), [backend("a")], [FULL])
    assert [group.inexact for group in plan.cache_groups] == [("sliding",)]
    (note,) = plan.downgrades
    assert (note.code, note.to_avoid) == ("N330", ('cache.kv_spec.sliding = "full"',))


def test_a_general_spec_that_is_asked_for_is_no_downgrade() -> None:
    plan = negotiate(request(sliding(0), kv_specs={"sliding": explicit("full")}), [backend("a")], [FULL, SLIDING])
    assert (plan.groups[0].kv_spec, plan.downgrades) == ("full", ())


def test_windows_that_differ_get_block_tables_of_their_own_where_the_spec_frees_by_window() -> None:
    layers = (sliding(0, window=128), sliding(1, window=512))
    assert [g.name for g in negotiate(request(*layers), [backend("a")], [SLIDING]).cache_groups] == [
        "sliding_128",
        "sliding_512",
    ]
    assert [g.name for g in negotiate(request(*layers), [backend("a")], [FULL]).cache_groups] == ["full"]


@pytest.mark.behaviour(158)
def test_a_layer_that_reads_anothers_cache_joins_its_cache_group_without_owning_one() -> None:
    plan = negotiate(request(layer(0), layer(1, shares_kv_with=0)), [backend("a")], [FULL])
    assert [item.index for item in plan.groups[0].layers] == [0, 1]
    assert [item.index for item in plan.cache_groups[0].layers] == [0]


@pytest.mark.behaviour(163)
def test_encoder_only_layers_get_a_backend_and_no_cache() -> None:
    able = backend("a", attention_types=Set(("encoder_only",)))
    plan = negotiate(request(layer(0, attention_type="encoder_only", kv_kind="none")), [able], [])
    assert (plan.groups[0].cache_group, plan.cache_groups) == ("", ())


def test_a_kind_that_no_spec_holds_is_inherent_to_the_model() -> None:
    error = failure(request(layer(0, kv_kind="mla")), [backend("a")])
    assert [(member.key, member.inherent) for member in error.conflict] == [("model.kv_kind[mla]", True)]
    assert error.failure is not None
    assert (error.failure.code, error.failure.inherent) == ("N502", True)


def test_prefix_caching_goes_off_with_a_note_or_is_an_error_if_asked_for() -> None:
    rigid = spec("rigid", prefix_caching=Flag(False))
    plan = negotiate(request(), [backend("a")], [rigid])
    assert ([note.code for note in plan.downgrades], plan.prefix_caching) == (["N331"], False)
    assert negotiate(request(), [backend("a")], [FULL]).prefix_caching is True
    assert "N142" in {r.code for r in failure(request(prefix_caching=explicit(True)), [backend("a")], [rigid]).reasons}


# --- strict


def test_strict_makes_a_downgrade_an_error_unless_its_code_is_allowed() -> None:
    asked = request(sliding(0), strict=True)
    error = failure(asked, [backend("a")])
    assert error.failure is not None
    assert (error.failure.code, [note.code for note in error.failure.notes]) == ("N510", ["N330"])
    assert error.failure.remedies == ('cache.kv_spec.sliding = "full"', 'allow = ["N330"]')
    assert negotiate(evolve(asked, allow=("N330",)), [backend("a")], [FULL]).downgrades


def test_strict_makes_a_failed_import_an_error_unless_allowed() -> None:
    offers = [backend("a"), Candidate(name="broken", load_error="ImportError: libfoo.so")]
    assert [note.code for note in negotiate(request(), offers, [FULL]).warnings] == ["N002"]
    assert "libfoo.so" in str(failure(request(strict=True), offers))
    assert negotiate(request(strict=True, allow=("N002",)), offers, [FULL]).groups[0].backend == "a"


def test_a_split_block_passes_strict_since_it_costs_nothing() -> None:
    plan = negotiate(request(strict=True), [backend("a", kernel_block_sizes=Align(exact=(8,)))], [FULL])
    assert [note.code for note in plan.notes] == ["N302"]


def test_an_unknown_code_in_allow_is_a_warning() -> None:
    assert [note.code for note in negotiate(request(allow=("N999",)), [backend("a")], [FULL]).warnings] == ["N402"]


# --- the plan as a whole


def test_the_order_of_candidates_does_not_change_the_decision() -> None:
    offers = [backend("a", priority=2), backend("b", priority=2), backend("c", kernel_block_sizes=Align((8,)))]
    asked = request(layer(0), sliding(1), layer(2, soft_cap=None))
    digests = {negotiate(asked, order, [SLIDING, FULL]).digest for order in (offers, offers[::-1])}
    assert len(digests) == 1


def test_the_digest_changes_with_decisions_and_not_with_reasons() -> None:
    plan = negotiate(request(), [backend("a")], [FULL])
    assert plan.digest == negotiate(request(), [backend("a"), backend("z")], [FULL]).digest
    assert plan.digest != negotiate(request(), [backend("a", version="1.1")], [FULL]).digest
    assert plan.digest != plan.with_parts(Part(kind="drafter", name="ngram")).digest


def test_the_digest_is_equal_in_every_process() -> None:
    script = (
        "from negotiation_cases import *; from slotline.registry.negotiation import negotiate;"
        "print(negotiate(request(layer(0), sliding(1)), [backend('b'), backend('a')], [FULL, SLIDING]).digest)"
    )
    path = os.pathsep.join(sys.path)
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


def test_negotiation_imports_no_torch() -> None:
    script = "import sys, slotline.registry.negotiation; print('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_plan_and_error_are_json() -> None:
    plan = negotiate(request(layer(0), sliding(1)), [backend("a"), backend("b")], [FULL])
    assert json.loads(json.dumps(plan.to_json()))["groups"][0]["backend"] == "a"
    error = failure(request(backend=explicit("nope")), [backend("a")])
    assert json.loads(json.dumps(error.to_json()))["conflict"][0]["key"] == "attention.backend"


def test_the_request_stays_as_it_was_and_the_plan_shows_asked_beside_resolved() -> None:
    asked = request()
    plan = negotiate(asked, [backend("a", kernel_block_sizes=Align(multiple_of=32))], [FULL])
    assert asked.block_size.value == "auto"
    shown = {setting.key: (setting.asked, setting.resolved) for setting in plan.settings}
    assert shown["cache.block_size"] == ("auto", "32")


def test_no_candidates_at_all_is_an_error_that_says_so() -> None:
    error = failure(request(), [], [])
    assert error.conflict == ()
    assert "no usable plugin" in error.message


def test_the_contract_of_each_plugin_is_on_record() -> None:
    candidate = evolve(backend("a"), contract=1)
    assert candidate.descriptor is not None
    assert candidate.descriptor.contract == ContractRange(1, 1)
    assert negotiate(request(), [candidate], [FULL]).groups[0].contract == 1


def test_six_groups_of_eight_candidates_take_well_below_a_second() -> None:
    layers = [sliding(i, window=2**i) for i in range(3)] + [layer(i, soft_cap=float(i)) for i in range(3, 6)]
    sizes = [Align(), Align((8,)), Align(multiple_of=32), Align((16, 64)), Align(multiple_of=256), Align((24,))]
    offers = [
        backend(f"b{i}", priority=i, soft_cap=Flag(True), kernel_block_sizes=sizes[i % 6], limits=()) for i in range(8)
    ]
    best = []
    for asked in (request(*layers, device=GPU), request(*layers, device=GPU, backend=explicit("none"))):
        for _ in range(3):
            start = time.process_time()
            with contextlib.suppress(NegotiationError):
                negotiate(asked, offers, [FULL, SLIDING])
            best.append(time.process_time() - start)
    assert min(best[:3]) < 0.5
    assert min(best[3:]) < 0.5


def test_every_code_that_a_capability_maps_to_exists() -> None:
    from slotline.registry.negotiation.codes import CAPABILITY_CODES

    assert set(CAPABILITY_CODES.values()) <= set(CODES)


def test_device_without_a_name_is_fine() -> None:
    assert negotiate(request(device=DeviceInfo(type="cpu")), [backend("a")], [FULL]).device.type == "cpu"
    assert CPU.name in negotiate(request(), [backend("a")], [FULL]).explain()


def test_strict_with_several_downgrades_promises_no_single_setting() -> None:
    wide = backend("wide", kernel_block_sizes=Align(multiple_of=256))
    error = failure(request(sliding(0), strict=True), [wide])
    assert error.failure is not None
    assert error.failure.remedies == ('allow = ["N301", "N330"]',)


def test_a_model_without_attention_layers_gets_a_plan() -> None:
    plan = negotiate(PlanRequest(device=GPU, groups=(), graphs=explicit("full")), [backend("a")], [FULL])
    assert (plan.groups, plan.cache_groups) == ((), ())
