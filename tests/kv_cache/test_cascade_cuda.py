"""Common prefixes and eight-bit caches on a GPU, inside captured graphs and beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_driver import random_prompts, tokens_of

from slotline.core import LLM
from slotline.core.batch.graph_dispatcher import GraphShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHARED = random_prompts([1100], seed=3)[0]
PROMPTS = [SHARED + own for own in random_prompts([1, 3, 9, 17, 30, 2, 5, 8, 12])]


@pytest.fixture(autouse=True)
def exact_matrix_products() -> None:
    """float32 means float32 here, not tf32."""
    torch.set_float32_matmul_precision("highest")


def engine(path: Path, **settings: Any) -> LLM:
    options = {"dtype": "float32", "max_model_len": 1216, "memory": "256MiB", "device": "cuda"}
    options |= {
        "graphs.sizes": (1, 2, 4, 8, 16),
        "observability.check_integrity": True,
        "observability.progress": False,
    }
    return LLM(model=str(path), **{**options, **settings})


def replayed(llm: LLM, prompts: list[list[int]], fewest: int = 1) -> tuple[list[list[int]], set[GraphShape | None]]:
    """The tokens, and the shapes that steps of at least `fewest` requests had."""
    seen = set()
    original = llm.engine.runner.launch

    def launch(inputs: Any) -> Any:
        if len(inputs.rows) >= fewest:  # a batch has padded requests too
            seen.add(inputs.shape)
        return original(inputs)

    llm.engine.runner.launch = launch  # type: ignore[method-assign]
    try:
        return tokens_of(llm, prompts), seen
    finally:
        del llm.engine.runner.launch


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama_deep", tmp_path_factory.mktemp("llama_deep"), 0, max_position_embeddings=2048)


@pytest.mark.behaviour(11, 71, 92)
def test_a_common_prefix_is_replayed_from_graphs_of_its_own(path: Path) -> None:
    expected = tokens_of(engine(path, backend="torch", **{"graphs.mode": "none", "attention.cascade": False}), PROMPTS)
    llm = engine(path, backend="triton")
    assert llm.plan.groups[0].cascade == "captured"
    tokens_of(llm, [SHARED])
    found, shapes = replayed(llm, PROMPTS)
    assert found == expected
    assert GraphShape(16, 1, cascade=1) in shapes
    assert GraphShape(16, 1) not in shapes
    few, shapes = replayed(llm, PROMPTS[:2])
    assert few == expected[:2]
    assert not any(shape and shape.cascade for shape in shapes), "two requests are too few to pay"


def test_prefixes_of_groups_are_replayed_from_graphs_of_their_own(path: Path) -> None:
    own = random_prompts([1, 3, 9, 17, 30, 2, 5, 8, 12, 4, 7, 6, 11, 20, 3, 2], seed=4)
    groups = [SHARED, random_prompts([1088], seed=5)[0]]
    prompts = [groups[index % 2] + behind for index, behind in enumerate(own)]
    expected = tokens_of(engine(path, backend="torch", **{"graphs.mode": "none", "attention.cascade": False}), prompts)
    # The two that compute the prefixes end a step before the others, which are then too few in each group.
    found, shapes = replayed(engine(path, backend="triton"), prompts, fewest=len(prompts))
    assert found == expected
    assert GraphShape(16, 1, cascade=2) in shapes
    assert GraphShape(16, 1) not in shapes


@pytest.mark.behaviour(11, 71, 92)
def test_a_backend_that_cannot_capture_its_cascade_breaks_the_graph_there(path: Path) -> None:
    llm = engine(path, backend="torch")
    assert llm.plan.groups[0].cascade == "eager"
    expected = tokens_of(engine(path, backend="torch", **{"graphs.mode": "none", "attention.cascade": False}), PROMPTS)
    tokens_of(llm, [SHARED])
    assert replayed(llm, PROMPTS)[0] == expected


@pytest.mark.behaviour(3, 93)
def test_an_eight_bit_cache_gives_the_same_text_in_graphs_and_without(path: Path) -> None:
    texts = {}
    for backend in ("torch", "triton"):
        for mode in ("none", "full_and_piecewise"):
            settings = {"cache.dtype": "fp8", "cache.calculate_kv_scales": True, "graphs.mode": mode}
            llm = engine(path, backend=backend, **settings, **{"attention.cascade": False})
            first, shapes = replayed(llm, PROMPTS[:1])
            assert None in shapes, "the step that calculates the scales runs without a graph"
            texts[backend, mode] = (first, tokens_of(llm, PROMPTS))
    # backends round differently, and eight bits turn a last bit into a step; graphs change nothing
    assert texts["torch", "none"] == texts["torch", "full_and_piecewise"]
    assert texts["triton", "none"] == texts["triton", "full_and_piecewise"]
