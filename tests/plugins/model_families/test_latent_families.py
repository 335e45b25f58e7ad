"""Families with multi-head latent attention: transformers' tokens from latents alone, whatever the engine does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import GREEDY, mixes_decode_and_prefill, random_prompts, recorded
from tiny_models import LATENT_FAMILIES, MAX_LEN, family, greedy_reference, logits_reference

from slotline.core import LLM
from slotline.plugins.model_families.decoder import LATENT
from slotline.plugins.model_families.latents import Expansion
from slotline.plugins.model_families.transformers_model import TransformersDecoder
from slotline.registry.errors import NegotiationError
from tests.plugins.model_families.test_model_family import load, logits_of, prompt

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
SMALL: dict[str, Any] = {"block_size": 4, "scheduler.max_batched_tokens": 24}


def expected(greedy: Greedy, path: Path, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [greedy(path, prompt, 20) for prompt in prompts]


def test_every_served_architecture_is_built() -> None:
    assert {family(name).architecture for name in LATENT_FAMILIES} == set(LATENT)


@pytest.mark.parametrize("name", LATENT_FAMILIES)
def test_a_layer_is_one_head_of_latents(name: str, tiny: Tiny) -> None:
    facts = TransformersDecoder().inspect(tiny(name))
    shapes = {(x.num_heads, x.num_kv_heads, x.head_size, x.head_size_v, x.mla, x.kv_kind) for x in facts.layers}
    assert (len(facts.layers), shapes) == (4, {(4, 1, 24 + 8, 24, True, "mla")})


def test_the_scale_is_that_of_the_expanded_heads_and_of_yarn(tiny: Tiny) -> None:
    plain, stretched = (TransformersDecoder().inspect(tiny(name)).layers[0] for name in ("deepseek_v2", "deepseek_v3"))
    assert plain.scale == pytest.approx((16 + 8) ** -0.5)
    assert stretched.scale > plain.scale  # DeepSeek multiplies by the square of yarn's factor


@pytest.mark.parametrize("settings", [{}, {"lean": False}, {"optimize": True}], ids=str)
@pytest.mark.parametrize("name", LATENT_FAMILIES)
def test_logits_equal_those_of_transformers(name: str, settings: dict[str, Any], tiny: Tiny) -> None:
    path, token_ids = tiny(name), prompt()
    model = load(path, **settings)
    logits, wanted = logits_of(model, token_ids), logits_reference(path, token_ids.tolist())
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
    expansions = [module for module in model.hf_model.modules() if isinstance(module, Expansion)]
    assert len(expansions) == 4  # no pass has packed or merged a weight that attention reads


@pytest.mark.spread(4, slow=4)
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", LATENT_FAMILIES)
@pytest.mark.behaviour(18, 33, 39, 41, 46, 62)
def test_tokens_equal_those_of_transformers_in_chunks_with_hits_and_preemptions(
    name: str, asynchronous: bool, optimize: bool, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny(name)
    settings = {**SMALL, "optimize": optimize, "scheduler.async": asynchronous}
    llm = engines(path, **settings)
    assert [(group.name, group.kv_spec) for group in llm.plan.cache_groups] == [("mla", "mla")]
    with recorded(llm) as steps:
        first = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in first] == expected(greedy, path)
    assert any(mixes_decode_and_prefill(step) for step in steps)
    assert max(int(step.num_scheduled.max(initial=0)) for step in steps) < 40  # the longest prompt came in chunks
    again = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in again] == expected(greedy, path)
    assert [o.metrics.num_cached_tokens for o in again] == [(len(p) - 1) // 4 * 4 for p in PROMPTS]
    pool = llm.plan.pool
    assert pool is not None
    assert pool.block_bytes == 4 * 4 * (24 + 8) * 4  # layers, tokens, a latent, bytes: no heads, no values
    tight = engines(path, **settings, memory=f"{20 * pool.block_bytes // 1024}KiB")
    outputs = tight.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == expected(greedy, path)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0


def test_other_weights_are_read_in_place(tiny: Tiny, tmp_path: Path) -> None:
    path, other = tiny("deepseek_v3"), tiny("deepseek_v3", seed=1)
    model = load(path)
    model.reload_weights(other)
    token_ids = prompt()
    wanted = logits_reference(other, token_ids.tolist())
    torch.testing.assert_close(logits_of(model, token_ids), wanted, atol=1e-4, rtol=0)


def test_a_backend_that_reads_no_latents_is_refused_with_the_reason(tiny: Tiny) -> None:
    with pytest.raises(NegotiationError, match="N168 multi-head latent attention"):
        LLM(tiny("deepseek_v3"), backend="cpu", dtype="float32", max_model_len=64, memory="1MiB")


def test_positions_beyond_the_original_length_follow_yarn(tiny: Tiny, engines: Engines) -> None:
    path = tiny("deepseek_v3")
    (long,) = random_prompts([MAX_LEN // 4 + 30], seed=3)
    llm = engines(path, max_model_len=MAX_LEN // 2, **SMALL)
    (output,) = llm.generate([long], GREEDY)
    assert output.outputs[0].token_ids == greedy_reference(path, long, 20)
