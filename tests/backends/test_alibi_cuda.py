"""Layers that bias scores by distance (ALiBi) on a GPU: transformers' tokens, in graphs and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_driver import tokens_of
from tiny_models import greedy_reference

from slotline.testing import Outcome, check_plugin
from tests.backends.test_alibi import BIASED, PROMPTS
from tests.device.test_graphs_cuda import engine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def exact_matrix_products() -> None:
    """float32 means float32 here, not tf32."""
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", BIASED)
@pytest.mark.behaviour(10, 21, 149)
def test_the_text_is_that_of_transformers_in_graphs_and_without(name: str, tiny: Callable[..., Path]) -> None:
    path = tiny(name)
    expected = [greedy_reference(path, ids, 20) for ids in PROMPTS]
    for settings in ({"graphs.mode": "none"}, {}, {"drafter.name": "ngram", "drafter.tokens": 3}):
        llm = engine(path, **settings)
        assert {group.backend for group in llm.plan.groups} == {"triton"}
        assert (llm.plan.graphs.resolved == "none") == ("graphs.mode" in settings)
        for _ in range(2):
            assert tokens_of(llm, PROMPTS) == expected, settings


CHECKS = ("attention.alibi", "attention.alibi.long", "attention.lse.scores", "attention.tree_mask.alibi")


@pytest.mark.parametrize("name", ["triton", "flash_attn", "flex", "torch"])
@pytest.mark.behaviour(10)
def test_backends_on_a_gpu_pass_the_checks_of_it(name: str) -> None:
    if name == "flash_attn":
        pytest.importorskip("flash_attn")
    records = check_plugin(f"attention:{name}", device="cuda", only=lambda check: check.id in CHECKS)
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    assert {*CHECKS[:2]} <= {record.id for record in records if record.outcome is Outcome.PASSED}
