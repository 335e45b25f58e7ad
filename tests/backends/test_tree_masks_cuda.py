"""Masks of trees in the `triton` backend on a GPU: in the kernels, and in whole texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slotline.core import LLM
from slotline.testing.environments.attention import Case, World
from tests.llm.test_small_model_files import FOLDER
from tests.proposers.test_drafters_cuda import PARAMS, SETTINGS, prompts

pytest.importorskip("triton")

from slotline.backends.triton.backend import TritonBackend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PARENTS = (-1, 0, 1, -1, 3, 0, 4, 3)
REQUESTS = ((9, 40), (1, 17), (9, 1500), (12, 60), (20, 20), (7, 300), (9, 9))
NODES = (8, 0, 8, 8, 0, 6, 8)
CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": torch.bfloat16, "num_heads": 8, "num_kv_heads": 2},
    "float16, heads of 256": {"dtype": torch.float16, "head_size": 256},
    "float32": {"dtype": torch.float32},
    "eight-bit cache": {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn, "kv_scales": (0.25, 8.0)},
    "window": {"dtype": torch.bfloat16, "window": 5},
    "long window, sinks, soft cap": {"dtype": torch.bfloat16, "window": 100, "sinks": True, "soft_cap": 5.0},
}


@pytest.mark.parametrize("features", CASES)
def test_nodes_see_the_known_tokens_and_their_own_path(features: str) -> None:
    case = Case(requests=REQUESTS, parents=PARENTS, num_nodes=NODES, **{"head_size": 128, **CASES[features]})
    world = World(case, "cuda")
    world.check(*world.run(TritonBackend(case.context("cuda"))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_text_with_a_tree_is_the_same_and_more_of_it_stands_than_of_a_chain(dtype: str) -> None:
    settings = {**SETTINGS, "dtype": dtype, "backend": "triton", "max_num_batched_tokens": 256}
    texts = [output.outputs[0].token_ids for output in LLM(**settings).generate(prompts(), PARAMS)]
    lengths = {}
    for name, tokens in (("medusa", 4), ("medusa_tree", 16)):
        path = {"drafter.path": str(FOLDER / "medusa")} if name == "medusa_tree" else {}
        llm = LLM(**settings, **path, **{"drafter.name": name, "drafter.tokens": tokens, "drafter.adaptive": False})
        found = [output.outputs[0].token_ids for output in llm.generate(prompts(), PARAMS)]
        same = sum(a == b for a, b in zip(found, texts, strict=True))
        # In bfloat16 a batch of another shape may decide a near tie otherwise.
        assert same == len(texts) if dtype == "float32" else same >= len(texts) - 3
        counts = llm.engine.extension("drafts").drafting.counts
        assert counts.failures == 0, counts.last_failure
        lengths[name] = llm.engine.extension("drafts").drafting.counts.acceptance_length
        if name == "medusa_tree":
            (setting,) = [s for s in llm.plan.settings if s.key == "drafter.tree"]
            assert setting.resolved == "request_trees", setting.origin
    assert lengths["medusa_tree"] > lengths["medusa"] + 0.1, lengths
