"""A drafter of another distribution whose trees differ between requests: it conforms, and its texts are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_driver import GREEDY, tokens_of
from repository import SUPPORT

from slotline.core import LLM
from slotline.registry.contracts import Draft, DraftBatch
from slotline.testing import Outcome, check_plugin

pytestmark = pytest.mark.usefixtures("one_thread")

FORKS = f"{SUPPORT / 'forking_drafter.py'}:descriptor"
Tiny = Callable[..., Path]
Engines = Callable[..., LLM]


def test_it_conforms_and_no_check_of_trees_is_left_out() -> None:
    records = check_plugin(FORKS, only=lambda check: not check.id.startswith("drafter.engine"))
    assert [f"{r.id}: {r.reason}" for r in records if r.outcome not in (Outcome.PASSED, Outcome.SKIPPED)] == []
    ran = {record.id for record in records if record.outcome is Outcome.PASSED}
    assert {"drafter.tree.declared", "drafter.tree.parents", "drafter.tree.forms", "drafter.fuzz.traffic"} <= ran


def test_its_trees_are_verified_and_the_texts_are_those_without_drafts(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama")
    prompts = [[5, 6, 5, 7, 5, 6, 9, 5], [8, 8, 8], [20, 21, 22, 20, 23, 20]]
    expected = tokens_of(engines(path), prompts, GREEDY)
    settings = {"plugins.inline": (FORKS,), "drafter.name": "forks", "drafter.tokens": 6, "drafter.adaptive": False}
    llm = engines(path, **settings, **{"observability.check_integrity": True})
    (form,) = [setting.resolved for setting in llm.plan.settings if setting.key == "drafter.tree"]
    assert form == "request_trees"
    drafting = llm.engine.extension("drafts").drafting
    proposed, propose = list[list[list[int]]](), drafting.drafter.propose

    def remembered(batch: DraftBatch) -> Draft:
        draft: Any = propose(batch)
        proposed.append(draft.parents.tolist())
        return draft

    drafting.drafter.propose = remembered
    assert tokens_of(llm, prompts, GREEDY) == expected
    assert any(len({tuple(tree) for tree in trees}) > 1 for trees in proposed), "all trees of each batch are the same"
    assert (drafting.counts.failures, drafting.counts.accepted > 5) == (0, True)
