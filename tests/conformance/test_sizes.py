"""The rule for sizes where kernels break, and samples of shapes within a stated time."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from slotline.registry.capability import Align, Range, Set
from slotline.registry.contracts.attention import AttentionCapabilities
from slotline.registry.descriptor import Descriptor, Kind
from slotline.testing.check import Level
from slotline.testing.environments.attention_sizes import SHAPES_SHARE, shapes
from slotline.testing.reference.attention import descriptor as reference
from slotline.testing.sizes import SECONDS, behind, declared, sampled
from slotline.testing.subject import subject_of

AXES = {"a": [1, 2, 3, 4], "b": [1, 2, 3], "c": [1, 2, 3]}


def test_sizes_are_powers_of_two_and_two_behind_each() -> None:
    assert behind(16, start=8) == (8, 9, 12, 16)
    assert behind(300, start=64, step=8) == (64, 72, 96, 128, 136, 192, 256, 264, 296)
    assert behind(100, start=64, step=48) == (96,)
    assert behind(5, start=8) == ()
    with pytest.raises(ValueError, match="step is 0"):
        behind(8, step=0)


def test_declared_sizes_end_where_the_offer_ends() -> None:
    assert declared(Range(8, 256, step=8), 384, start=64) == (64, 72, 96, 128, 136, 192, 256)
    assert declared(Range(64, 64, extra=(128, 200)), 384, start=64) == (64, 128, 200)
    assert declared(Range(1, 11), 16, start=8) == (8, 9, 11)


def pairs(rows: Any) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return {pair for row in rows for pair in combinations(sorted(row.items()), 2)}


def test_a_sample_has_each_value_early_and_each_pair_at_the_end() -> None:
    whole = sampled(AXES, cost=lambda row: 1.0, budget=0.0, whole=True)
    every = {((x, i), (y, j)) for x, y in combinations(AXES, 2) for i in AXES[x] for j in AXES[y]}
    assert pairs(whole) == every
    assert len(whole) < 20  # of 36 combinations
    early = sampled(AXES, cost=lambda row: 1.0, budget=4.0)
    assert early == whole[:4]
    assert {(name, row[name]) for row in early for name in AXES} == {
        (n, v) for n, values in AXES.items() for v in values
    }


def test_a_sample_leaves_out_what_cannot_be_together() -> None:
    rows = sampled(AXES, cost=lambda row: 1.0, budget=99.0, allowed=lambda row: row.get("a") != 4 or row.get("b") != 3)
    assert not any(row["a"] == 4 and row["b"] == 3 for row in rows)
    assert {row["a"] for row in rows} == {1, 2, 3, 4}


def test_a_sample_has_one_row_even_if_it_costs_more_than_there_is() -> None:
    assert len(sampled(AXES, cost=lambda row: 5.0, budget=1.0)) == 1


def test_shapes_of_a_backend_stay_within_the_stated_time_and_what_is_declared() -> None:
    rows = shapes(subject_of(reference, device="cpu"))
    assert 5 <= len(rows) <= SECONDS[Level.NUMERICS] * SHAPES_SHARE
    assert {row["head_size"] for row in rows} >= {72, 120, 136, 192, 256}
    assert {row["group"] for row in rows} >= {8, 9, 12, 16}
    assert len(shapes(subject_of(reference, device="cpu", exhaustive=True))) > 5 * len(rows)
    offer = AttentionCapabilities(
        devices=Set(("cpu",)),
        dtypes=Set((("bfloat16", "bfloat16"),)),
        head_sizes=Range(64, 64, extra=(128,)),
        group_sizes=Range(1, 2),
        kernel_block_sizes=Align(multiple_of=256),
    )
    narrow = Descriptor(kind=Kind.ATTENTION, name="narrow", capabilities=offer, factory=lambda context: None)
    rows = shapes(subject_of(narrow, device="cpu"))
    assert {row["head_size"] for row in rows} == {64, 128}
    assert {row["group"] for row in rows} <= {1, 2}
    assert {row["block_size"] for row in rows} == {256}
    assert {row["num_kv_heads"] for row in rows} == {8, 9, 12, 16}
