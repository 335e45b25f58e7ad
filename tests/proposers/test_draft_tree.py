"""Drafts as trees: the path that stands is the text without drafts, whatever the tree and wherever its nodes lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import GREEDY, add, random_prompts, run_all, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import SUPPORT

from slotline.core import LLM, SamplingParams, StructuredOutputsParams
from slotline.proposers.speculation.draft_tree import DraftTree, TreesByRow, VerifiedTrees, first_paths
from slotline.registry.contracts import Draft, DraftBatch
from slotline.testing.oracles.drafter import verify_by_match
from tests.proposers.test_drafting import drafted_by, pool_of

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
PARENTS = [-1, 0, 1, -1, 3, 0, 4, 3]
"""A chain of three, and side branches at each depth."""
TREE_DRAFTER = f"{SUPPORT / 'tree_drafter.py'}:Tree"
TREE = {
    "plugins.inline": (TREE_DRAFTER,),
    "drafter.name": "tree",
    "drafter.tokens": len(PARENTS),
    "drafter.adaptive": False,
}


class Branches:
    """Knows what will come and puts it on some path of a fixed tree, wrong tokens everywhere else.

    With `differ` each request of each proposal has another tree.
    """

    def __init__(
        self, prompts: list[list[int]], texts: list[list[int]], right: float, vocab: int, *, differ: bool = False
    ) -> None:
        self.differ = differ
        self.texts = {tuple(p): t for p, t in zip(prompts, texts, strict=True)}
        self.right, self.vocab, self.rng = right, vocab, Random(0)
        self.rows: dict[int, list[int]] = {}

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        self.rows[row] = prompt_token_ids

    def release(self, row: int) -> None:
        del self.rows[row]

    def propose(self, batch: DraftBatch) -> Draft:
        ids = np.array([[self.rng.randrange(self.vocab) for _ in PARENTS] for _ in batch.rows])
        parents = np.tile(PARENTS, (len(ids), 1))
        for i, row in enumerate(batch.rows.tolist()):
            if self.differ:
                parents[i] = [self.rng.randrange(max(-1, node - 3), node) for node in range(len(PARENTS))]
            tree = DraftTree.of(parents[i])
            prompt = self.rows[row]
            coming = self.texts[tuple(prompt)][int(batch.num_tokens[i]) - len(prompt) :]
            node = self.rng.randrange(len(PARENTS))
            for depth, passed in enumerate(tree.paths[node][: tree.depths[node]]):
                if depth < len(coming) and self.rng.random() < self.right:
                    ids[i, passed] = coming[depth]
        return Draft(token_ids=torch.from_numpy(ids), parents=torch.from_numpy(parents if self.differ else parents[0]))


# ---- the form


def trees(most: int = 9) -> st.SearchStrategy[list[int]]:
    return st.integers(1, most).flatmap(lambda n: st.tuples(*(st.integers(-1, i - 1) for i in range(n)))).map(list)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**32), trees()), min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_the_path_that_stands_is_that_of_the_oracle(requests: list[tuple[int, int, list[int]]]) -> None:
    """Requests with some nodes of a tree of their own, over a vocabulary of three, so that branches are equal."""
    table = TreesByRow(len(requests), max(len(parents) for *_, parents in requests))
    tokens, nodes, drafts, expected, whose = [], [], [], [], []
    for row, (count, seed, parents) in enumerate(requests):
        table.write(np.array([row]), np.array([parents]))
        rng, count = Random(seed), min(count, len(parents))
        draft = [rng.randrange(3) for _ in range(count)]
        answers = [rng.randrange(3) for _ in range(count + 1)]  # the model's token behind the root and each node
        by_prefix = {}

        def choose(taken: tuple[int, ...], draft=draft, answers=answers, count=count, parents=parents) -> int:
            node = -1
            for token in taken:
                node = next(i for i in range(count) if parents[i] == node and draft[i] == token)
            return answers[node + 1]

        by_prefix = verify_by_match(draft, parents[:count], choose)
        tokens += answers
        nodes += range(count + 1)
        drafts += [0, *draft]
        expected.append(list(by_prefix))
        whose += [row] * (count + 1)
    verified = VerifiedTrees.of(np.array(nodes), table.parents[whose], table.depths[whose])
    stands = verified.accepted(np.array(tokens), np.array(drafts))
    first = np.flatnonzero(np.array(nodes) == 0)
    parts = np.split(np.where(stands, np.array(tokens), -1), first[1:])
    assert [[int(t) for t in part if t >= 0] for part in parts] == expected
    kept = verified.num_kept(np.flatnonzero(stands))
    path_nodes = np.split(np.array(nodes)[stands], np.flatnonzero(np.array(nodes)[stands] == 0)[1:])
    for path, found in zip(path_nodes, np.split(kept, np.cumsum([len(p) for p in path_nodes])[:-1]), strict=True):
        run = 0
        for depth, node in enumerate(path.tolist()):
            run = depth if node == depth and run == max(depth - 1, 0) else run
            assert found[depth] == run


def test_paths_depths_and_the_first_path() -> None:
    tree = DraftTree.of(np.array([-1, 0, 0, -1, 2]))
    assert tree.depths.tolist() == [1, 2, 2, 1, 3]
    assert tree.paths.tolist() == [[0, -1, -1], [0, 1, -1], [0, 2, -1], [3, -1, -1], [0, 2, 4]]
    assert tree.first_path.tolist() == [0, 1]
    table = TreesByRow(2, 5)
    table.write(np.array([1]), np.array([[-1, 0, 0, -1]]))
    assert table.depths.tolist() == [[1, 2, 3, 4, 5], [1, 2, 2, 1, 1]]
    assert table.paths[1, :, :2].tolist() == [[0, -1], [0, 1], [0, 2], [3, -1], [4, -1]]
    assert table.num_chained(np.arange(2)).tolist() == [5, 2]
    assert first_paths(np.array([[5, 6, 7, 8]]), np.array([[-1, -1, 0, 2]])).tolist() == [[5, 7, 8, -1]]


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, -2], [-1, 2, 0]])
def test_what_is_no_tree_is_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="are no tree"):
        DraftTree.of(np.array(parents))


# ---- whole engines


@pytest.mark.spread(4)
@pytest.mark.parametrize("family", ["llama", "qwen2_sliding", "gemma2", "mistral", "llama4"])
@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
def test_texts_are_the_same_with_trees(tiny: Tiny, engines: Engines, family: str, right: float) -> None:
    """Windows and chunks of eight tokens among them, so that they end inside the tree's context."""
    plain, llm = engines(tiny(family)), engines(tiny(family), **TREE)
    assert llm.engine.extension("drafts") is not None
    prompts = random_prompts((5, 40, 17, 1, 30, 12), seed=3)
    counts = llm.engine.extension("drafts").drafting.counts
    for params in (GREEDY, SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=20, ignore_eos=True)):
        expected, before = tokens_of(plain, prompts, params), counts.accepted
        with drafted_by(llm, Branches(prompts, expected, right, 384, differ=right == 0.8)):
            assert tokens_of(llm, prompts, params) == expected
        assert counts.failures == 0
        assert counts.accepted - before > (30 if right else -1)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "tight", [{"max_num_batched_tokens": 16}, {"memory": pool_of(9), "max_num_batched_tokens": 40, "max_num_seqs": 4}]
)
def test_chunks_preemption_and_prefix_hits_change_nothing(tiny: Tiny, engines: Engines, tight: dict[str, Any]) -> None:
    rng = Random(1)
    plain, llm = engines(tiny("llama")), engines(tiny("llama"), **TREE, **tight)
    heads = random_prompts((16, 32), seed=1)
    prompts = random_prompts([rng.randint(1, 30) for _ in range(60)], seed=5)
    prompts = [rng.choice(heads) + p[:8] if rng.random() < 0.5 else p for p in prompts]
    expected = tokens_of(plain, prompts)
    with drafted_by(llm, Branches(prompts, expected, 0.9, 384, differ=True)):
        requests = [add(llm, str(i), prompt) for i, prompt in enumerate(prompts)]
        run_all(llm)
    assert [r.output_token_ids for r in requests] == expected
    assert sum(r.metrics.num_cached_tokens > 0 for r in requests) > 5
    if "memory" in tight:
        assert sum(r.metrics.num_preemptions for r in requests) > 0


def test_processors_and_logprobs_are_those_of_the_path(tiny: Tiny, engines: Engines) -> None:
    plain, llm = engines(tiny("llama", eos_token_id=2)), engines(tiny("llama", eos_token_id=2), **TREE)
    prompts = random_prompts((5, 40, 17, 1, 30, 12), seed=6)
    params = SamplingParams(
        temperature=0.7,
        seed=3,
        max_tokens=24,
        min_tokens=9,
        presence_penalty=0.8,
        frequency_penalty=0.5,
        repetition_penalty=1.3,
        logit_bias={2: 6.0, 9: 3.0},
        logprobs=2,
    )
    expected = [o.outputs[0] for o in plain.generate(prompts, params)]
    with drafted_by(llm, Branches(prompts, [o.token_ids for o in expected], 0.9, 384)):
        found = [o.outputs[0] for o in llm.generate(prompts, params)]
    for output, right in zip(found, expected, strict=True):
        assert output.token_ids == right.token_ids
        for entry, other in zip(output.logprobs, right.logprobs, strict=True):
            assert list(entry) == list(other)
            assert [v.logprob for v in entry.values()] == pytest.approx([v.logprob for v in other.values()], abs=1e-4)


def test_without_tree_masks_the_first_path_is_verified_and_explain_says_why(tiny: Tiny, engines: Engines) -> None:
    plugins = (TREE_DRAFTER, f"{SUPPORT / 'partial_trees.py'}:descriptor")
    llm = engines(tiny("mistral"), **{**TREE, "plugins.inline": plugins, "backend": "partial_trees"})
    plain = engines(tiny("mistral"))
    prompts = random_prompts((5, 12), seed=3)
    assert "drafter.tree" in llm.plan.explain()
    (setting,) = [s for s in llm.plan.settings if s.key == "drafter.tree"]
    assert setting.resolved == "chain"
    assert "'partial_trees': tree mask: needs it" in setting.origin
    expected = tokens_of(plain, prompts)
    for differ in (False, True):
        accepted = llm.engine.extension("drafts").drafting.counts.accepted
        with drafted_by(llm, Branches(prompts, expected, 1.0, 384, differ=differ)):
            assert tokens_of(llm, prompts) == expected
        assert llm.engine.extension("drafts").drafting.counts.accepted > accepted
    (setting,) = [s for s in engines(tiny("llama"), **TREE).plan.settings if s.key == "drafter.tree"]
    assert setting.resolved == "request_trees"


@pytest.mark.parametrize(("family", "resolved"), [("llama", "tree"), ("mistral", "chain")])
def test_masks_that_a_backend_has_for_other_layers_alone_are_not_counted_on(
    tiny: Tiny, engines: Engines, family: str, resolved: str
) -> None:
    plugins = (TREE_DRAFTER, f"{SUPPORT / 'partial_trees.py'}:descriptor")
    llm = engines(tiny(family), **{**TREE, "plugins.inline": plugins, "backend": "partial_trees"})
    (setting,) = [s for s in llm.plan.settings if s.key == "drafter.tree"]
    assert setting.resolved == resolved
    assert ("tree mask: needs it, not implemented with sliding_window" in setting.origin) == (resolved == "chain")
    assert ("all requests get the same tree; attention backend" in setting.origin) == (resolved == "tree")
    prompts = random_prompts((5, 12), seed=3)
    expected, failures = tokens_of(engines(tiny(family)), prompts), 0
    for differ in (False, True):  # trees that differ cost their drafts where one for all was negotiated
        with drafted_by(llm, Branches(prompts, expected, 1.0, 384, differ=differ)):
            assert tokens_of(llm, prompts) == expected
        counts = llm.engine.extension("drafts").drafting.counts
        assert (counts.failures > failures) == (differ and resolved == "tree")
        failures = counts.failures


def test_a_tree_that_is_none_costs_drafts_and_nothing_else(tiny: Tiny, engines: Engines) -> None:
    plain, llm = engines(tiny("llama")), engines(tiny("llama"), **TREE)
    prompts = random_prompts((5, 12), seed=3)
    expected = tokens_of(plain, prompts)
    drafter = Branches(prompts, expected, 1.0, 384)
    inner = drafter.propose

    def broken(batch: DraftBatch) -> Draft:
        draft = inner(batch)
        return Draft(token_ids=draft.token_ids, parents=torch.tensor([3, *PARENTS[1:]]))

    drafter.propose = broken  # type: ignore[method-assign]
    with drafted_by(llm, drafter):
        assert tokens_of(llm, prompts) == expected
    assert "are no tree" in llm.engine.extension("drafts").drafting.counts.last_failure


class OneTree:
    """Proposes two guesses for the next place once, and fails from then on."""

    def __init__(self) -> None:
        self.calls = 0

    def admit(self, row: int, prompt_token_ids: list[int]) -> None: ...

    def release(self, row: int) -> None: ...

    def propose(self, batch: DraftBatch) -> Draft:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("no more")
        return Draft(token_ids=torch.full((len(batch.rows), 2), 5), parents=torch.tensor([-1, -1]))


def test_the_form_of_drafts_that_are_gone_does_not_cut_what_a_grammar_forces(engines: Engines) -> None:
    llm = engines(None, **TREE, backend="torch", max_model_len=64, **{"structured_output.backend": "xgrammar"})
    forced = StructuredOutputsParams(regex="[ab]antidisestablishmentarianism")
    with drafted_by(llm, OneTree()):
        request = add(llm, "forced", [5, 6, 7], SamplingParams(max_tokens=40, structured_outputs=forced))
        steps = 0
        while llm.engine.has_work:
            llm.engine.step()
            steps += 1
    assert request.finish_reason == "stop"
    assert steps < len(request.output_token_ids) / 2
