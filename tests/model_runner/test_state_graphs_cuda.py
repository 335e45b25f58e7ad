"""Captured graphs of models with states on a GPU: the same text as without them, whatever breaks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_driver import random_prompts

from slotline.core import LLM, SamplingParams
from slotline.registry.contracts import Draft, DraftBatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25, 9])
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def exact_matrix_products() -> None:
    """float32 means float32 here, not tf32."""
    torch.set_float32_matmul_precision("highest")


def engine(path: Path, **settings: Any) -> LLM:
    options = {"dtype": "float32", "max_model_len": 96, "max_num_batched_tokens": 24, "memory": "64MiB"}
    options |= {"graphs.sizes": (1, 2, 4, 8, 16), "observability.check_integrity": True}
    options |= {"observability.progress": False, "max_num_seqs": 16}
    return LLM(model=str(path), device="cuda", **{**options, **settings})


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("mode", ["piecewise", "full_decode_only", "full_and_piecewise"])
@pytest.mark.parametrize("family", ["mamba2", "bamba", "mamba", "lfm2"])
@pytest.mark.behaviour(21, 23, 87, 149)
def test_every_graph_mode_gives_the_same_text(family: str, mode: str, tmp_path: Path) -> None:
    path = tiny_models.build(family, tmp_path, 0)
    expected = tokens(LLM(model=str(path), device="cpu", dtype="float32", backend="torch", max_model_len=96))
    llm = engine(path, **{"graphs.mode": mode})
    assert llm.engine.graphs is not None
    assert tokens(llm) == expected
    assert tokens(llm) == expected, "again, from checkpoints"


def test_a_state_group_that_cannot_be_captured_breaks_the_graph_at_its_own_layers(tmp_path: Path) -> None:
    path = tiny_models.build("bamba", tmp_path, 0)
    llm = engine(path, backend="triton", **{"state.backend": "torch", "graphs.mode": "full_decode_only"})
    assert llm.engine.graphs is not None
    breaks = sum(len(group.layers) for group in llm.plan.state_groups)
    assert {len(c.parts) for s, c in llm.engine.graphs.captured.items() if s.query_len == 1} == {2 * breaks + 1}


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("family", ["bamba", "mamba", "qwen3_next", "lfm2", "recurrent_gemma"])
@pytest.mark.behaviour(87, 149, 153)
def test_drafts_are_verified_in_graphs_and_taken_back(
    family: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that knows the text guesses right, then wrong at each place in turn."""
    path = tiny_models.build(family, tmp_path, 0)
    texts = [[*p, *out] for p, out in zip(PROMPTS, tokens(engine(path, **{"graphs.mode": "none"})), strict=True)]
    llm = engine(
        path, **{"drafter.name": "ngram", "drafter.tokens": 3, "drafter.adaptive": False, "state.backend": backend}
    )
    assert {group.backend for group in llm.plan.state_groups} == {backend}
    assert llm.engine.extension("drafts") is not None
    asked = 0

    def propose(batch: DraftBatch) -> Draft:
        nonlocal asked
        guesses = []
        for row, known in zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True):
            (text,) = (t for t in texts if t[:known] == batch.token_table[row, :known].tolist())
            guess, wrong = [*text[known : known + 3], 0, 0, 0][:3], asked % 4
            asked += 1
            guesses.append([token if place < wrong else (token + 1) % 384 for place, token in enumerate(guess)])
        return Draft(token_ids=torch.tensor(guesses))

    monkeypatch.setattr(llm.engine.extension("drafts").drafting.drafter, "propose", propose)
    counts = llm.engine.extension("drafts").drafting.counts
    for _ in range(2):  # the second time from checkpoints
        assert [[*p, *out] for p, out in zip(PROMPTS, tokens(llm), strict=True)] == texts
    assert 20 < counts.accepted < counts.proposed
    assert counts.failures == 0


def test_auto_takes_the_kernels_beside_a_drafter(tmp_path: Path) -> None:
    llm = engine(tiny_models.build("bamba", tmp_path, 0), **{"drafter.name": "ngram"})
    assert {group.backend for group in llm.plan.state_groups} == {"triton"}
