"""Prefixes that all requests of a step share: found, served apart, and never replayed by a graph without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from engine_driver import random_prompts, recorded, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from slotline.builder.made_up import made_up_inputs
from slotline.core import LLM
from slotline.core.batch.graph_dispatcher import GraphDispatcher, GraphShape
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.plugins.cascade.prefixes import Cascade, CascadeGroup
from slotline.plugins.cascade.step_prefixes import CommonPrefixes
from slotline.registry.errors import NegotiationError

pytestmark = pytest.mark.usefixtures("one_thread")

SHARED = random_prompts([40], seed=3)[0]
PROMPTS = [SHARED + own for own in random_prompts([1, 3, 9, 17])]


def engine(path: Path, **settings: Any) -> LLM:
    options = {"device": "cpu", "dtype": "float32", "backend": "torch", "max_model_len": 96, "memory": "2MiB"}
    return LLM(model=str(path), **{**options, **settings})


def prefixes_of(llm: LLM, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The tokens, and the common prefix of each step's batch, as a group with a cascade sees it if there is one."""
    seen: list[int] = []
    groups = llm.engine.runner.router.groups
    backend = next((group.backend for group in groups if group.cascade), groups[0].backend)
    original = backend.plan

    def plan(batch: Any) -> Any:
        seen.append(batch.common_prefix_len)
        assert (batch.common_prefix is None) == (batch.common_prefix_len == 0)
        return original(batch)

    backend.plan = plan  # type: ignore[method-assign]
    try:
        return tokens_of(llm, prompts), seen
    finally:
        del backend.plan


@given(
    table=st.lists(st.lists(st.integers(1, 2), min_size=5, max_size=5), min_size=1, max_size=4),
    size=st.integers(1, 4),
    data=st.data(),
)
@pytest.mark.behaviour(71)
def test_the_common_prefix_is_what_row_by_row_comparison_finds(
    table: list[list[int]], size: int, data: st.DataObject
) -> None:
    computed = [data.draw(st.integers(0, 5 * size)) for _ in table]
    blocks = 0
    while (blocks + 1) * size <= min(computed) and len({row[blocks] for row in table}) == 1:
        blocks += 1
    rows = np.arange(len(table))
    group = CascadeGroup(Table(table), size, (Declines(answer=True),))  # type: ignore[arg-type]
    found = Cascade([group], RequestTable(4, 16)).prefixes(rows, np.array(computed), np.ones_like(rows))
    assert lengths(found) == [blocks * size if len(table) > 1 else 0]


def lengths(found: Any) -> list[int]:
    """The tokens of the prefix of all requests, by cache group."""
    assert found is None or isinstance(found, CommonPrefixes)
    return [0] if found is None else list(found.lengths)


@pytest.mark.spread(2)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.behaviour(11, 71)
def test_a_shared_prefix_served_apart_gives_the_same_text(family: str, block_size: int, tmp_path: Path) -> None:
    path = tiny_models.build(family, tmp_path, 0)
    settings = {"block_size": block_size, "observability.check_integrity": True}
    expected, none = prefixes_of(engine(path, **settings, **{"attention.cascade": False}), PROMPTS)
    assert set(none) == {0}
    llm = engine(path, **settings)
    tokens_of(llm, [SHARED])  # so that the prompts find their prefix
    found, seen = prefixes_of(llm, PROMPTS)
    assert found == expected
    # 40 prompt tokens and 20 more were computed; the shared part of them, in whole blocks
    assert max(seen) == len(SHARED) // block_size * block_size


@pytest.mark.behaviour(71)
def test_a_step_whose_requests_share_nothing_has_no_common_prefix(tmp_path: Path) -> None:
    llm = engine(tiny_models.build("llama", tmp_path, 0))
    _, seen = prefixes_of(llm, random_prompts([33, 40, 20]))
    assert set(seen) == {0}
    _, seen = prefixes_of(llm, [SHARED])
    assert set(seen) == {0}, "one request alone shares with nobody"


@pytest.mark.behaviour(71)
def test_layers_with_a_window_have_no_common_prefix(tmp_path: Path) -> None:
    llm = engine(tiny_models.build("mistral", tmp_path, 0), block_size=4)
    windows = {layer.window for group in llm.plan.groups for layer in group.layers}
    assert None not in windows
    assert {group.cascade for group in llm.plan.groups} == {"none"}
    tokens_of(llm, [SHARED])
    _, seen = prefixes_of(llm, PROMPTS)
    assert set(seen) == {0}


@pytest.mark.behaviour(11)
def test_cascade_is_asked_for_left_open_or_switched_off(tmp_path: Path) -> None:
    path = tiny_models.build("llama", tmp_path, 0)
    states = {
        (asked, backend): engine(path, backend=backend, **{"attention.cascade": asked}).plan.groups[0].cascade
        for asked, backend in (("auto", "torch"), ("auto", "cpu"), (True, "torch"), (False, "torch"))
    }
    assert list(states.values()) == ["eager", "none", "eager", "none"]
    with pytest.raises(NegotiationError, match="N174") as caught:
        engine(path, backend="cpu", **{"attention.cascade": True})
    assert "attention.cascade = false" in str(caught.value)
    assert engine(path, **{"cache.prefix_caching": False}).plan.groups[0].cascade == "none"


class Declines:
    """A backend's answer, and what it was asked."""

    def __init__(self, *, answer: bool) -> None:
        self.answer, self.asked = answer, list[tuple[int, list[int], list[int]]]()

    def use_cascade(self, length: int, query_lens: Any, seq_lens: Any) -> bool:
        self.asked.append((length, query_lens.tolist(), seq_lens.tolist()))
        return self.answer


class Table:
    """The part of a cache group that is read."""

    num_replaced = 0

    def __init__(self, blocks: list[list[int]]) -> None:
        self.table = np.array(blocks, np.int32)


BLOCKS = [[7, 8, 1], [7, 8, 2], [7, 8, 3], [5, 8, 3]]


@pytest.mark.behaviour(71)
def test_all_backends_of_a_cache_must_agree() -> None:
    rows, computed, new = np.array([0, 2]), np.array([11, 9]), np.array([1, 3])
    for answers, expected in (((True, True), 8), ((True, False), 0)):
        backends = [Declines(answer=answer) for answer in answers]
        groups = [CascadeGroup(Table(BLOCKS), 4, tuple(backends)), None]  # type: ignore[arg-type]
        cascade = Cascade(groups, RequestTable(4, 16))
        assert lengths(cascade.prefixes(rows, computed, new)) == ([expected, 0] if expected else [0])
        assert backends[0].asked == [(8, [1, 3], [12, 12])]
    assert cascade.prefixes(np.array([0, 3]), computed, new) is None
    assert len(backends[0].asked) == 1, "nobody is asked where nothing is shared"


@pytest.mark.behaviour(92)
def test_a_step_with_a_common_prefix_takes_no_graph_but_one_with_it() -> None:
    phases = {"decode": "full", "mixed": "piecewise"}
    limits: dict[str, int] = {"query_len": 1, "max_requests": 16, "max_tokens": 64}
    plain = GraphDispatcher(phases, (1, 2, 4, 8, 16), **limits)
    both = GraphDispatcher(phases, (1, 2, 4, 8, 16), **limits, cascade=lambda requests, _: [1] if requests >= 4 else [])
    three, nine, mixed = steps([1] * 3), steps([1] * 9), steps([1, 1, 5])
    assert plain.shape_for(three) == both.shape_for(three) == GraphShape(4, 1)
    assert plain.shape_for(three, cascade=1) is None
    assert both.shape_for(three, cascade=1) == GraphShape(4, 1, cascade=1)
    assert both.shape_for(nine, cascade=1) == GraphShape(16, 1, cascade=1)
    assert both.shape_for(mixed) == GraphShape(8, 0)
    assert both.shape_for(mixed, cascade=1) is None
    captured = [shape.num_tokens for shape in both.largest_first if shape.cascade]
    assert captured == [16, 8, 4]
    kinds = GraphDispatcher(phases, (4, 8), **limits, cascade=lambda requests, _: [1, 2] if requests >= 8 else [1])
    assert [shape.cascade for shape in kinds.largest_first if shape.query_len] == [0, 1, 2, 0, 1]
    assert kinds.shape_for(three, cascade=2) == GraphShape(8, 1, cascade=2)


def steps(counts: list[int]) -> SchedulerOutput:
    lens = np.array(counts, np.int64)
    return SchedulerOutput(
        rows=np.arange(len(lens)), num_scheduled=lens, num_computed=0 * lens + 40, num_tokens=int(lens.sum()),
        num_decodes=int((lens == 1).sum()),
    )  # fmt: skip


@pytest.mark.behaviour(71)
def test_requests_that_join_in_mid_prefill_bound_the_common_prefix(tmp_path: Path) -> None:
    """Chunks of a prompt whose prefix is shared so far: what is computed of it counts, what is to come does not."""
    path = tiny_models.build("llama", tmp_path, 0)
    prompts = [SHARED + own for own in random_prompts([30, 35])]
    settings = {"block_size": 4, "scheduler.max_batched_tokens": 16}
    expected = tokens_of(engine(path, **settings, **{"attention.cascade": False}), prompts)
    llm = engine(path, **settings)
    tokens_of(llm, [SHARED])
    with recorded(llm) as schedules:
        found, seen = prefixes_of(llm, prompts)
    assert found == expected
    assert any(prefix and len(s.rows) > s.num_decodes for prefix, s in zip(seen, schedules, strict=True))


def test_the_common_prefix_reaches_the_device_where_there_is_one(tmp_path: Path) -> None:
    llm = engine(tiny_models.build("llama", tmp_path, 0), block_size=4)
    batch = made_up_inputs(llm.engine.gatherer, [1, 1], seq_len=40, prefixes=CommonPrefixes((36,))).batches[0]
    assert (batch.common_prefix_len, batch.common_prefix.dtype) == (36, torch.int32)  # type: ignore[union-attr]
    assert batch.common_prefix.tolist() == [36]  # type: ignore[union-attr]
