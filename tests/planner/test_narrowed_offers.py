"""What a probe takes back on this machine counts everywhere, not in the choice of backends alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import SUPPORT
from tiny_engines import DEFAULTS

from slotline.core import LLM
from slotline.planner.plan import SMALL_MODEL, Planned
from slotline.registry.errors import NegotiationError
from tests.kv_cache.test_pages import HYBRID, planned

Tiny = Callable[..., Path]
TREE = {"drafter.name": "tree", "drafter.tokens": 2}


def inline(*kinds: str) -> dict[str, Any]:
    """Makes the narrowing plugins of these kinds known, and the tree drafter of the tests."""
    named = tuple(f"{SUPPORT / 'narrowing_plugins.py'}:{kind}" for kind in kinds)
    return {"plugins.inline": (*named, f"{SUPPORT / 'tree_drafter.py'}:Tree")}


def setting(found: Planned, key: str) -> Any:
    return next(s for s in found.plan.settings if s.key == key)


def test_trees_are_chains_where_the_probe_takes_tree_masks_back(tiny: Tiny) -> None:
    found = planned(tiny("llama"), **inline("attention"), **TREE, **{"attention.backend": "narrow"})
    assert setting(found, "drafter.tree").resolved == "chain"
    assert "attention backend 'narrow': tree mask" in setting(found, "drafter.tree").origin
    assert found.draft_form == "chain"
    beside = planned(tiny("llama"), **inline("attention"), **TREE, **{"attention.backend": "torch"})
    assert beside.draft_form == "request_trees"


def test_a_drafter_whose_probe_takes_trees_back_proposes_none(tiny: Tiny) -> None:
    found = planned(tiny("llama"), **inline("drafter"), **{**TREE, "drafter.name": "narrow"})
    assert "drafter.tree" not in [s.key for s in found.plan.settings]
    assert not found.drafter.capabilities.tree.support


def test_a_drafters_steps_are_not_captured_where_the_probe_takes_plan_once_back() -> None:
    eagle = {"drafter.name": "eagle", "drafter.tokens": 2, "attention.backend": "narrow"}
    found = planned(SMALL_MODEL, **inline("attention"), **eagle)
    assert "attention backend 'narrow': plan once" in setting(found, "drafter.graphs").origin


def test_steps_do_not_overlap_beside_drafts_where_the_probe_takes_bounded_lengths_back() -> None:
    eagle = {"drafter.name": "eagle", "drafter.tokens": 2, "scheduler.async": True}
    assert planned(SMALL_MODEL, **inline("attention"), **eagle, **{"attention.backend": "torch"}).asynchronous
    with pytest.raises(NegotiationError, match=r"'narrow' plans with exact lengths"):
        planned(SMALL_MODEL, **inline("attention"), **eagle, **{"attention.backend": "narrow"})


def test_steps_are_not_cut_where_the_probe_takes_several_plans_back(tiny: Tiny) -> None:
    settings = {"attention.backend": "narrow", "scheduler.microbatches": 2}
    with pytest.raises(NegotiationError, match=r"'narrow' keeps one plan at a time"):
        planned(tiny("llama"), **inline("attention"), **settings)


def test_pages_are_contiguous_where_the_probe_takes_strides_back(tiny: Tiny) -> None:
    path = tiny("gemma3", **HYBRID)
    assert planned(path).plan.pool.shared
    narrow = planned(path, **inline("kv_spec"), **{"cache.kv_spec.full": "narrow"})
    assert not narrow.plan.pool.shared


def test_writes_go_through_the_backend_where_the_probe_takes_plain_ones_back(tiny: Tiny) -> None:
    llm = LLM(tiny("llama"), **{**DEFAULTS, **inline("attention"), "backend": "narrow"})
    assert [group.plain_writes for group in llm.engine.runner.router.groups] == [False]


def test_a_lora_plugin_is_refused_for_a_dtype_that_its_probe_takes_back(tiny: Tiny) -> None:
    with pytest.raises(NegotiationError, match=r"lora plugin 'narrow', dtype: needs float32, offers bfloat16"):
        planned(tiny("llama"), **inline("lora"), **{"lora.name": "narrow"})


def test_a_logits_processor_is_refused_where_its_probe_refuses(tiny: Tiny) -> None:
    with pytest.raises(NegotiationError, match=r"logits processor 'narrow' cannot run on cpu: no kernels for cpu"):
        planned(tiny("llama"), **inline("logits_processor"), **{"logits_processors.narrow": {}})
