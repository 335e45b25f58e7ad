"""Layers that read the keys and values of others: who they are is seen, and no memory is kept for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, random_prompts, tokens_of
from test_model_family import load, logits_of, prompt
from tiny_models import logits_reference

from slotline.core import LLM
from slotline.plugins.model_families.transformers_model import TransformersDecoder

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]


@pytest.mark.behaviour(26, 158)
def test_a_layer_called_with_the_keys_of_another_reads_its_cache(tiny: Tiny) -> None:
    layers = TransformersDecoder().inspect(tiny("gemma3n")).layers
    assert [layer.shares_kv_with for layer in layers] == [None, None, None, 1, 2, 1]
    assert all(layers[x.shares_kv_with].window == x.window for x in layers if x.shares_kv_with is not None)


@pytest.mark.parametrize("optimize", [False, True])
def test_logits_equal_those_of_transformers(optimize: bool, tiny: Tiny) -> None:
    path, token_ids = tiny("gemma3n"), prompt()
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
