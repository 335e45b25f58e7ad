"""Layers that read the keys and values of others: who they are is seen, and no memory is kept for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, random_prompts, tokens_of
from tiny_models import MAX_LEN, SHARING_FAMILIES, logits_reference

from slotline.core import LLM
from slotline.plugins.model_families.transformers_model import TransformersDecoder
from tests.plugins.model_families.test_model_family import load, logits_of, prompt

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]


@pytest.mark.behaviour(26, 158)
def test_a_layer_called_with_the_keys_of_another_reads_its_cache(tiny: Tiny) -> None:
    layers = TransformersDecoder().inspect(tiny("gemma3n")).layers
    assert [layer.shares_kv_with for layer in layers] == [None, None, None, 1, 2, 1]
    assert all(layers[x.shares_kv_with].window == x.window for x in layers if x.shares_kv_with is not None)


def test_layers_of_unequal_shapes_share_a_pool_each_with_pages_of_its_size(tiny: Tiny, engines: Engines) -> None:
    """Gemma 4's layers without a window have larger heads."""
    llm = engines(tiny("gemma4"), block_size=4)
    assert [{layer.head_size for layer in group.layers} for group in llm.plan.cache_groups] == [{16}, {24}]
    assert llm.plan.pool is not None
    assert llm.plan.pool.shared


def test_layers_of_equal_needs_and_unequal_sizes_share_a_block_table(
    tiny: Tiny, engines: Engines, greedy: Callable[[Path, list[int], int], list[int]]
) -> None:
    """A window that never hides a key is none, so all of Gemma 4's layers need the same then, in pages of two sizes."""
    path, prompts = tiny("gemma4", sliding_window=MAX_LEN), random_prompts([3, 33, 17, 40])
    llm = engines(path, block_size=4, **{"scheduler.max_batched_tokens": 24})
    (group,) = llm.plan.cache_groups
    assert [(group.kv_spec, layer.head_size) for layer in group.layers] == [("full", 16), ("full", 24)] * 2
    assert llm.plan.pool is not None
    assert llm.plan.pool.block_bytes == 2 * 4 * 2 * (16 + 24) * 2 * 4  # pairs, tokens, heads, sizes, K and V, bytes
    for _ in range(2):
        assert tokens_of(llm, prompts, GREEDY) == [greedy(path, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("name", SHARING_FAMILIES)
def test_logits_equal_those_of_transformers(name: str, optimize: bool, tiny: Tiny) -> None:
    path, token_ids = tiny(name), prompt()
    logits = logits_of(load(path, optimize=optimize), token_ids)
    torch.testing.assert_close(logits, logits_reference(path, token_ids.tolist()), atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.behaviour(157)
def test_shared_layers_take_no_memory_and_give_transformers_tokens(
    backend: str, tiny: Tiny, engines: Engines, greedy: Callable[[Path, list[int], int], list[int]]
) -> None:
    path, prompts = tiny("gemma3n"), random_prompts([3, 33, 17, 40, 1, 25])
    llm = engines(path, backend=backend, block_size=4, **{"scheduler.max_batched_tokens": 24})
    assert [len(group.layers) for group in llm.plan.cache_groups] == [2, 1]  # three of six own a cache
    caches = llm.engine.runner.router.caches()
    assert [caches[reader].key.data_ptr() == caches[owner].key.data_ptr() for reader, owner in ((3, 1), (4, 2), (5, 1))]
    for _ in range(2):
        assert tokens_of(llm, prompts, GREEDY) == [greedy(path, prompt, 20) for prompt in prompts]
