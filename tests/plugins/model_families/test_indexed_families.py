"""Families whose index picks keys among latents: transformers' tokens in texts of which the index leaves keys out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_driver import GREEDY, mixes_decode_and_prefill, random_prompts, recorded
from thread_ranks import ThreadRanks
from tiny_models import INDEXED_FAMILIES, family

from slotline.core import LLM, SamplingParams
from slotline.plugins.model_families import checkpoint, trial_runs
from slotline.plugins.model_families.decoder import INDEXED
from slotline.plugins.model_families.transformers_model import TransformersDecoder
from slotline.registry.errors import NegotiationError
from tests.engine.test_pipeline import planned
from tests.proposers.test_draft_tree import TREE, Branches
from tests.proposers.test_drafting import NGRAM, drafted_by, guided

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
Greedy = Callable[[Path, list[int], int], list[int]]

SUPPORT = Path(__file__).parents[2] / "support"
TOPK = 12
PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])  # of the longer ones, the index leaves out most keys
SMALL: dict[str, Any] = {"block_size": 4, "scheduler.max_batched_tokens": 24}
SHARED = {"deepseek_v32": [None] * 4, "glm_moe_dsa": [None, 0, None, 2]}


def expected(greedy: Greedy, path: Path, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [greedy(path, prompt, 20) for prompt in prompts]


def test_every_served_architecture_is_built() -> None:
    assert {family(name).architecture for name in INDEXED_FAMILIES} == set(INDEXED)


@pytest.mark.parametrize("name", INDEXED_FAMILIES)
def test_a_layer_has_an_index_or_uses_the_picks_of_the_layer_before(name: str, tiny: Tiny) -> None:
    facts = TransformersDecoder().inspect(tiny(name))
    assert {(x.kv_kind, x.mla, x.index_topk) for x in facts.layers} == {("dsa", True, TOPK)}
    assert [layer.index_from for layer in facts.layers] == SHARED[name]
    for layer in facts.layers:
        shapes = {each.name: (each.shape, each.dtype) for each in layer.inputs}
        own = {"index_query": ((16, 16), ""), "index_key": ((16,), ""), "index_weight": ((16,), "float32")}
        assert shapes == (own if layer.index_from is None else {})


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", INDEXED_FAMILIES)
def test_tokens_equal_those_of_transformers_in_chunks_with_hits_and_preemptions(
    name: str, asynchronous: bool, optimize: bool, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny(name)
    settings = {**SMALL, "optimize": optimize, "scheduler.async": asynchronous}
    llm = engines(path, **settings)
    (group,) = llm.plan.groups  # layers with an index and those that use its picks
    assert (group.kv_spec, group.cache_format, len(group.layers)) == ("dsa", "latent_index", 4)
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
    indices = sum(owner is None for owner in SHARED[name])
    assert pool.block_bytes == 4 * 4 * (4 * (24 + 8) + indices * 16)  # tokens, bytes, latents and keys of indices
    tight = engines(path, **settings, memory=f"{20 * pool.block_bytes // 1024}KiB")
    outputs = tight.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == expected(greedy, path)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0


@pytest.mark.parametrize("name", INDEXED_FAMILIES)
def test_layers_whose_index_picks_all_keys_are_plain_latents(
    name: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    path = tiny(name)
    llm = engines(path, **SMALL, max_model_len=TOPK)
    assert [(group.kv_spec, group.layers[0].inputs) for group in llm.plan.groups] == [("mla", ())]
    (output,) = llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert list(output.outputs[0].token_ids) == greedy(path, PROMPTS[0], 9)


@pytest.mark.parametrize("name", INDEXED_FAMILIES)
def test_chains_and_trees_of_drafts_change_no_token(name: str, tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    path = tiny(name)
    wanted = expected(greedy, path)
    trees = Branches(PROMPTS, wanted, 0.8, tiny_models.VOCAB_SIZE, differ=True)
    for settings, drafter in ((NGRAM, guided(PROMPTS, wanted)), (TREE, trees)):
        llm = engines(path, **{**SMALL, "scheduler.max_batched_tokens": 64}, **settings)
        with drafted_by(llm, drafter), recorded(llm) as steps:
            assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == wanted
        assert len(steps) < 20  # drafts stood


def test_a_drafting_model_has_an_index_of_its_own(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    path = tiny("glm_moe_dsa")
    drafter = {"drafter.name": "draft_model", "drafter.path": str(path), "drafter.tokens": 3}
    llm = engines(path, **SMALL, **drafter)
    with recorded(llm) as steps:
        outputs = llm.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == expected(greedy, path)
    assert len(steps) < 16  # its drafts are the model's own tokens


@pytest.mark.parametrize("name", INDEXED_FAMILIES)
def test_ranks_that_divide_the_heads_pick_the_same_keys(name: str, tiny: Tiny, greedy: Greedy) -> None:
    path = tiny(name)
    ranks = ThreadRanks(path, tensor=2, dtype="float32", max_model_len=64, **{"cache.memory": "1MiB"}, **SMALL)
    texts = ranks.same(lambda llm: [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY)])
    assert texts == expected(greedy, path)
    ranks.close()


@pytest.mark.spread(0, slow=1)
@pytest.mark.parametrize("name", INDEXED_FAMILIES)
def test_forward_passes_are_compiled_with_the_index(name: str, tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    path = tiny(name)
    llm = engines(path, **SMALL, **{"compile.mode": "stock", "compile.backend": "eager"})
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == expected(greedy, path)


@pytest.mark.parametrize("name", INDEXED_FAMILIES)
def test_the_self_check_of_tried_models_knows_an_index(name: str, tiny: Tiny) -> None:
    found = checkpoint.read(tiny(name))
    reference = found.model_class(found.config).float().eval()
    reference.load_state_dict(tiny_models.oracle(found.path).state_dict())
    with torch.no_grad():
        texts = [trial_runs.generated(reference, length) for length in trial_runs.PROMPTS]
        found_traces = trial_runs.ours(found, reference, texts)
    for (_, wanted), got in zip(texts, found_traces, strict=True):
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), atol=1e-3, rtol=0)


def test_a_backend_without_an_index_is_refused_with_the_reason(tiny: Tiny) -> None:
    with pytest.raises(NegotiationError, match="N185 index top-k") as refusal:
        LLM(tiny("deepseek_v32"), backend="triton", dtype="float32", max_model_len=64, memory="1MiB")
    assert "N122 cache format" in str(refusal.value)
    assert "N183 layer inputs: needs index_query" in str(refusal.value)


def test_picks_do_not_pass_from_stage_to_stage(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    path = tiny("glm_moe_dsa")
    with pytest.raises(NegotiationError, match=r"layers.1.self_attn' in stage 1 uses the picks of .*layers.0"):
        planned(path, **{"parallel.pipeline": ("cpu", "cpu"), "parallel.layers": (1, 3)})
    llm = engines(path, **SMALL, **{"parallel.pipeline": ("cpu", "cpu"), "parallel.layers": (2, 2)})
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)] == expected(greedy, path)


def test_the_plan_says_what_an_index_picks_and_who_uses_its_picks(tiny: Tiny, engines: Engines) -> None:
    text = " ".join(engines(tiny("glm_moe_dsa"), **SMALL).plan.explain().split())
    assert "index picks 12 keys, 2 layers by the picks of another, inputs index_query, index_key, index_weight" in text
    assert "latent_index, which spec and backend share" in text


def test_other_weights_are_read_in_place(tiny: Tiny, engines: Engines, greedy: Greedy) -> None:
    path, other = tiny("glm_moe_dsa"), tiny("glm_moe_dsa", seed=1)
    llm = engines(path, **SMALL)
    llm.engine.runner.model.reload_weights(other)
    (output,) = llm.generate([PROMPTS[1]], GREEDY)
    llm.engine.runner.model.reload_weights(path)
    assert output.outputs[0].token_ids == greedy(other, PROMPTS[1], 20)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU here")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of log2(0), which is minus infinity here
@pytest.mark.parametrize("name", INDEXED_FAMILIES)
def test_triton_s_kernels_give_transformers_tokens_in_chunks_and_with_hits(
    name: str, tiny: Tiny, engines: Engines, greedy: Greedy
) -> None:
    pytest.importorskip("triton")
    path, prompts = tiny(name), PROMPTS[:2]
    plugin = {
        "plugins": [f"{SUPPORT / 'interpreted_attention.py'}:descriptor"],
        "attention.backend": "interpreted_triton",
    }
    llm = engines(path, **SMALL, **plugin)
    assert [group.backend for group in llm.plan.groups] == ["interpreted_triton"]
    few = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for _ in range(2):  # the second time with prefixes that are cached
        outputs = llm.generate(prompts, few)
        assert [list(o.outputs[0].token_ids) for o in outputs] == [greedy(path, prompt, 3) for prompt in prompts]
