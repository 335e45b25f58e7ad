"""Trees that an EAGLE head builds by confidence: the nodes, the attention of the head, and the texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import head_folders
import pytest
import torch
from engine_driver import GREEDY, random_prompts, tokens_of

from slotline.core import LLM, SamplingParams
from slotline.proposers.eagle.candidates import Candidates
from slotline.proposers.speculation.draft_runner import DraftRunner
from slotline.registry.contracts import Draft, DraftBatch

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=20, ignore_eos=True)


def test_the_nodes_of_the_highest_confidence_are_taken_and_the_likeliest_path_comes_first() -> None:
    grown = Candidates(
        torch.tensor([[10, 11]]), torch.tensor([[-0.1, -0.4]]), torch.tensor([[-1, -1]])
    ).with_children(
        torch.tensor([[12, 13, 14, 15]]), torch.tensor([[-0.5, -0.9, -0.45, -3.0]]), torch.tensor([[0, 0, 1, 1]])
    )  # fmt: skip
    token_ids, parents = grown.best(5)
    assert token_ids.tolist() == [[10, 12, 11, 14, 13]]
    assert parents.tolist() == [[-1, 0, -1, 2, 0]]
    assert [part.tolist() for part in grown.best(3)] == [[[10, 11, 14]], [[-1, -1, 1]]]


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[list[int]], Any]]:
    """Positions, tokens and parents of each proposal."""
    ask, asked = DraftRunner.call_drafter, list[tuple[list[int], list[list[int]], Any]]()

    def recorded(self: DraftRunner, batch: DraftBatch, attend: Any) -> Draft:
        draft = ask(self, batch, attend)
        parents = None if draft.parents is None else draft.parents.tolist()
        asked.append((batch.positions.tolist(), draft.token_ids.tolist(), parents))
        return draft

    monkeypatch.setattr(DraftRunner, "call_drafter", recorded)
    return asked


@pytest.mark.parametrize("kind", ["eagle", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_a_tree_holds_the_chain_and_its_texts_are_those_without_drafts(
    tiny: Tiny, engines: Engines, tmp_path: Path, drafts: list[Any], kind: str
) -> None:
    """The head's attention over its own nodes is right: with one branch the tree is the chain that `eagle` drafts."""
    path = tiny("llama_deep" if kind == "eagle3" else "llama")
    folder = head_folders.build(tmp_path, path, kind)
    prompts = random_prompts((5, 40, 17, 1), seed=3)
    expected = {params: tokens_of(engines(path), prompts, params) for params in (GREEDY, SAMPLED)}
    common = {"drafter.path": str(folder), "drafter.adaptive": False}
    chain = engines(path, **common, **{"drafter.name": kind, "drafter.tokens": 4, "scheduler.async": False})
    tokens_of(chain, prompts[:1])
    chains = {positions[0]: token_ids[0] for positions, token_ids, _ in drafts}
    drafts.clear()
    one = {"drafter.name": f"{kind}_tree", "drafter.tokens": 4, f"drafter.{kind}_tree.branches": 1}
    llm = engines(path, **common, **one)
    assert tokens_of(llm, prompts[:1]) == expected[GREEDY][:1]
    assert all(parents == [[-1, 0, 1, 2]] for *_, parents in drafts)
    assert {positions[0]: token_ids[0] for positions, token_ids, _ in drafts}.items() <= chains.items()
    drafts.clear()
    bushy = {"drafter.name": f"{kind}_tree", "drafter.tokens": 12}
    for backend in ("torch", "cpu")[kind == "eagle3" :]:
        llm = engines(path, **common, **bushy, backend=backend)
        for params, texts in expected.items():
            assert tokens_of(llm, prompts, params) == texts
        counts = llm.engine.extension("drafts").drafting.counts
        assert (counts.failures, counts.proposed > 50) == (0, True)
    forms = {tuple(parents) for *_, each in drafts for parents in each}
    assert len(forms) > 4, "all requests have the same tree"
    sequences = [drafts[i][1] for i in range(len(drafts))]
    assert all(len(tokens) == 12 for each in sequences for tokens in each)


def test_one_tree_for_all_is_proposed_where_trees_of_requests_are_not_verified(
    tiny: Tiny, engines: Engines, tmp_path: Path, drafts: list[Any]
) -> None:
    path = tiny("llama")
    prompts = random_prompts((5, 40), seed=3)
    expected = tokens_of(engines(path), prompts)
    settings = {
        "drafter.path": str(head_folders.build(tmp_path, path, "eagle")),
        "drafter.name": "eagle_tree",
        "drafter.tokens": 8,
        "drafter.eagle_tree.by_confidence": False,
    }
    llm = engines(path, **settings)
    assert tokens_of(llm, prompts) == expected
    assert len({tuple(parents) for *_, parents in drafts}) == 1
    assert llm.engine.extension("drafts").drafting.counts.failures == 0
