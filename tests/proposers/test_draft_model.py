"""A smaller model as a drafter: what it drafts, from which cache, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_speech
import torch
from engine_driver import GREEDY, add, random_prompts, run_all, tokens_of
from tiny_models import known_oracle
from transformers import OPTConfig, OPTForCausalLM

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import ConfigError, ModelError, NegotiationError
from tests.proposers.test_eagle import watch

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
LENGTHS = (5, 40, 17, 1, 30, 12)
SMALLER = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def settings_of(path: Path, tokens: int = 4) -> dict[str, Any]:
    return {
        "drafter.name": "draft_model",
        "drafter.path": str(path),
        "drafter.tokens": tokens,
        "drafter.adaptive": False,
        "memory": "8MiB",
    }


@torch.no_grad()
def expected(path: Path, tokens: list[int], count: int) -> list[int]:
    """The model's greedy continuation."""
    tokens, model = list(tokens), known_oracle(path)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-count:]


def agree(seen: list[tuple[list[int], list[int]]], path: Path, length: int = 64) -> float:
    """The share of proposals that are the draft model's own text; past the longest text they count not."""
    cut = [(tokens, drafts[: length - len(tokens)]) for tokens, drafts in seen]
    return sum(drafts == expected(path, tokens, 4)[: len(drafts)] for tokens, drafts in cut) / len(cut)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("family", "draft"), [("llama", "llama"), ("qwen3", "llama"), ("gemma2", "qwen3"), ("llama", "mistral")]
)
@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 16}, {"optimize": True}], ids=["whole", "chunks", "optimize"]
)
def test_a_model_drafts_its_own_greedy_text(
    tiny: Tiny, engines: Engines, family: str, draft: str, settings: dict[str, Any]
) -> None:
    path, other = tiny(family), tiny(draft, **SMALLER)
    llm = engines(path, **settings_of(other), **settings)
    prompts, seen = random_prompts(LENGTHS, seed=3), watch(llm)
    assert tokens_of(llm, prompts) == tokens_of(engines(path), prompts)
    assert llm.engine.extension("drafts").drafting.counts.failures == 0
    assert agree(seen[::3], other) == 1


def test_the_model_itself_is_always_right(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama")
    llm, prompts = engines(path, **settings_of(path)), random_prompts(LENGTHS, seed=5)
    before = llm.engine.extension("drafts").drafting.counts.to_json()
    assert tokens_of(llm, prompts) == tokens_of(engines(path), prompts)
    counts = llm.engine.extension("drafts").drafting.counts
    assert counts.accepted - before["accepted"] == counts.proposed - before["proposed"] > 0


@pytest.mark.spread(2, slow=1)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("right", [True, False])
def test_tokens_that_it_drafted_are_not_computed_again(
    tiny: Tiny, engines: Engines, asynchronous: bool, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees prompts, and what is left once nobody has room for drafts; proposals are what they were."""
    path = tiny("llama")
    draft = path if right else tiny("llama", **SMALLER)
    llm = engines(path, **settings_of(draft), **{"scheduler.async": asynchronous})
    prompts, drafting = random_prompts((5, 9, 3), seed=7), llm.engine.extension("drafts").drafting
    assert drafting is not None
    shown, observe, seen = list[int](), drafting.drafter.observe, watch(llm)  # type: ignore[attr-defined]

    def count(computed: Any) -> Any:
        shown.append(len(computed.token_ids))
        return observe(computed)

    monkeypatch.setattr(drafting.drafter, "observe", count)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (41, 23, 12)]  # they end in turn
    texts = [
        [output.outputs[0].token_ids for output in each.generate([{"prompt_token_ids": p} for p in prompts], params)]
        for each in (llm, engines(path))
    ]
    assert texts[0] == texts[1]
    assert drafting.counts.failures == 0
    assert drafting.counts.proposals > 6
    assert shown[0] == 17
    assert sum(shown[1:]) <= 8
    if right:
        assert drafting.counts.accepted == drafting.counts.proposed > 0
    if not asynchronous:
        assert agree(seen, draft) == 1


@pytest.mark.slow
def test_preemption_and_prefix_hits_keep_its_cache_right(tiny: Tiny, engines: Engines) -> None:
    path, other = tiny("llama"), tiny("llama", **SMALLER)
    llm = engines(path, **{**settings_of(other), "memory": f"{11 * 20}KiB", "max_num_batched_tokens": 24})
    prompts, seen = random_prompts((30, 25, 40, 10, 33, 28), seed=8), watch(llm)
    requests = [add(llm, str(i), prompt) for i, prompt in enumerate(prompts)]
    run_all(llm)
    texts = [request.output_token_ids for request in requests]
    assert texts == tokens_of(engines(path), prompts)
    assert sum(request.metrics.num_preemptions for request in requests) > 0
    assert agree(seen, other) > 0.9  # where blocks are short, the last drafts see a hole

    cached, longer = engines(path, **settings_of(other)), [p + t[:14] for p, t in zip(prompts, texts, strict=True)]
    tokens_of(cached, prompts)
    seen = watch(cached)
    again = [add(cached, str(i), prompt, GREEDY) for i, prompt in enumerate(longer)]
    run_all(cached)
    assert all(request.metrics.num_cached_tokens >= 16 for request in again)
    assert [request.output_token_ids for request in again] == tokens_of(engines(path), longer)
    assert agree(seen, other) == 1


def test_sampled_texts_are_the_same(tiny: Tiny, engines: Engines) -> None:
    path, other = tiny("llama"), tiny("llama", **SMALLER)
    llm, prompts = engines(path, **settings_of(other)), random_prompts(LENGTHS, seed=9)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=20, ignore_eos=True)
    assert tokens_of(llm, prompts, params) == tokens_of(engines(path), prompts, params)


@pytest.mark.behaviour(114)
@pytest.mark.parametrize(
    ("draft", "changes", "words"),
    [
        ("llama", {"vocab_size": 400}, r"vocabulary of 400 tokens, LlamaForCausalLM (.|\n)* one of 384"),
        ("llama", {"max_position_embeddings": 32}, "sequences of 32 tokens, and max_model_len is 64"),
        ("mamba2", {}, "keeps states"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(tiny: Tiny, draft: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        LLM(tiny("llama"), device="cpu", max_model_len=64, **settings_of(tiny(draft, **changes)))


@pytest.fixture(scope="module")
def short_opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 32 learned positions, and none beyond."""
    torch.manual_seed(0)
    folder, sizes = tmp_path_factory.mktemp("opt"), {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
    OPTForCausalLM(OPTConfig(vocab_size=384, **sizes, **layers)).save_pretrained(folder)
    return folder


@pytest.mark.behaviour(114)
@pytest.mark.parametrize("overlapped", [False, True])
def test_requests_that_outgrow_the_drafter_go_on_without_drafts(
    overlapped: bool, tiny: Tiny, short_opt: Path, engines: Engines
) -> None:
    path, shorter = tiny("llama"), short_opt
    settings = settings_of(shorter) | {"drafter.max_model_len": 32, "scheduler.async": overlapped}
    llm, prompts = engines(path, **settings), random_prompts(LENGTHS, seed=3)
    drafter, lengths, positions = llm.engine.extension("drafts").drafting.drafter, list[int](), list[int]()
    propose, observe = drafter.propose, drafter.observe

    def proposing(batch: Any) -> Any:
        lengths.extend((batch.positions + 1).tolist())
        return propose(batch)

    def observing(computed: Any) -> Any:
        positions.extend(computed.positions.tolist())
        return observe(computed)

    drafter.propose, drafter.observe = proposing, observing
    found = tokens_of(llm, prompts)
    del drafter.propose, drafter.observe
    assert found == tokens_of(engines(path), prompts)
    assert max(lengths) == 32 - 4  # its own tokens and the drafts after them
    assert min(lengths) < 10
    assert max(positions) == 31
    assert llm.engine.extension("drafts").counts.failures == 0
    (setting,) = (one for one in llm.plan.settings if one.key == "drafter.max_model_len")
    assert setting.origin.endswith("; longer requests go on without drafts")


def test_without_a_model_the_fix_is_named(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no model(.|\n)*drafter.path"):
        LLM(tiny("llama"), device="cpu", **{"drafter.name": "draft_model"})
    with pytest.raises(ModelError, match=r"config\.json"):
        LLM(tiny("llama"), device="cpu", **settings_of(tmp_path))


def test_a_draft_model_with_cross_attention_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(NegotiationError, match=r"'draft_model' has an attention layer .* of type cross"):
        LLM(tiny("llama"), device="cpu", max_model_len=64, **settings_of(tiny_speech.build(tmp_path / "whisper")))
