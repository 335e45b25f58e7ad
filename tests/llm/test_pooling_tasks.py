"""A vector for each token and scores of pairs: they equal transformers' in any batch, chunk and repetition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine_driver import random_prompts, recorded, run_all
from pooling_folders import SIZES, bert, hf_model, llama_states
from tiny_models import FAMILIES, family

from slotline.core import LLM, PoolingParams
from slotline.plugins.model_families.decoder import TAGGERS
from slotline.plugins.model_families.encoder import TAGGERS as ENCODERS
from slotline.plugins.model_families.reward_models import CLASSES
from slotline.registry.errors import ContractError, ModelError, RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
WORD_PROMPTS = [[token % 60 for token in prompt] for prompt in PROMPTS[:3]]
TEXTS = ["the cat sat on a mat", "a dog", "cat on the dog"]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ["last", "mean"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.behaviour(35, 99)
def test_tokens_and_whole_prompts_are_embedded_in_shared_chunked_steps(
    method: str, overlap: bool, tiny: Tiny, engines: Engines
) -> None:
    path = tiny("llama")
    settings = {"scheduler.max_batched_tokens": 24, "model_family.transformers_decoder.pooling": method}
    llm = engines(path, block_size=4, task="embed", **settings, **{"scheduler.async": overlap})
    tasks = ["token_embed" if index % 2 else "embed" for index in range(len(PROMPTS))]
    for _ in range(2):  # the second time with cached prefixes, which token_embed does not take
        with recorded(llm) as steps:
            outputs = llm.encode(PROMPTS, [PoolingParams(task=task) for task in tasks])
        assert max(len(step.rows) for step in steps) > 1
        for prompt, task, output in zip(PROMPTS, tasks, outputs, strict=True):
            states = llama_states(path, prompt)
            pooled = states[-1] if method == "last" else states.mean(0)
            wanted = states if task == "token_embed" else pooled
            assert output.outputs is not None
            assert_close(output.outputs.data, wanted / wanted.norm(dim=-1, keepdim=True))
            assert task == "embed" or output.metrics.num_cached_tokens == 0
    assert max(int(step.num_scheduled.max(initial=0)) for step in steps) < 40  # the longest prompt came in chunks


@pytest.mark.behaviour(33, 35, 99)
def test_a_preempted_prompt_gives_each_token_once_and_an_aborted_one_leaves_nothing(
    tiny: Tiny, engines: Engines
) -> None:
    path = tiny("llama", matryoshka_dimensions=[16, 64])
    llm = engines(path, block_size=4, task="embed", **{"scheduler.max_batched_tokens": 16})
    params = PoolingParams(task="token_embed", dimensions=16, normalize=False)
    request = llm.engine.add("one", PROMPTS[3], params)
    other = llm.engine.add("two", PROMPTS[1], params)
    llm.engine.step()
    llm.engine.step()
    llm.engine.abort("two")
    llm.engine.scheduler._preempt_last()
    run_all(llm)
    assert (request.metrics.num_preemptions, other.answer) == (1, None)
    assert request.answer is not None
    found = llm.engine.extension("pooling").output(request).outputs.data
    assert_close(found, llama_states(path, PROMPTS[3])[:, :16])


@pytest.mark.behaviour(35, 124)
def test_class_scores_of_tokens_and_the_score_of_one_label(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama", architecture="LlamaForSequenceClassification", num_labels=1)
    llm = engines(path, **{"scheduler.max_batched_tokens": 24})
    outputs = llm.encode(PROMPTS, pooling_task="token_classify")
    raw = llm.encode(PROMPTS, PoolingParams(use_activation=False), pooling_task="score")
    head = hf_model(path, "AutoModelForSequenceClassification").score
    for prompt, tokens, one in zip(PROMPTS, outputs, raw, strict=True):
        logits = head(llama_states(path, prompt))  # [num_tokens, 1]
        assert tokens.outputs is not None
        assert one.outputs is not None
        assert_close(tokens.outputs.data, logits.sigmoid())
        assert one.outputs.score == pytest.approx(float(logits[-1]), abs=1e-4)
    five = engines(tiny("llama", architecture="LlamaForSequenceClassification", num_labels=5))
    for ask in (lambda: five.score("a", "b"), lambda: five.encode(PROMPTS, pooling_task="score")):
        with pytest.raises(RequestError, match="one label, and this one has 5"):
            ask()
    assert len(five.classify(PROMPTS)) == len(PROMPTS)


@pytest.mark.behaviour(35, 49)
@pytest.mark.parametrize(
    ("architecture", "types"), [("BertForSequenceClassification", 2), ("RobertaForSequenceClassification", 1)]
)
def test_a_cross_encoder_scores_pairs_as_transformers_does(architecture: str, types: int, tmp_path: Path) -> None:
    path = bert(tmp_path / "cross", architecture, num_labels=1, type_vocab_size=types)
    llm = LLM(path, device="cpu", max_num_batched_tokens=64)
    model = hf_model(path, "AutoModelForSequenceClassification")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    first, second = [*TEXTS, TEXTS[0]], [*TEXTS[::-1], ""]
    kwargs = [dict(tokenizer(*pair, return_tensors="pt")) for pair in zip(first, second, strict=True)]
    if types == 1:
        kwargs = [{"input_ids": one["input_ids"]} for one in kwargs]
    else:
        assert [bool(one["token_type_ids"].any()) for one in kwargs] == [True, True, True, False]
    with torch.no_grad(), recorded(llm) as steps:
        expected = [float(model(**one).logits.sigmoid()) for one in kwargs]
        found = llm.score(first, second)
        plain = llm.score(first[0], second[0], PoolingParams(use_activation=False))
    assert max(len(step.rows) for step in steps) == 4  # those with types and those without run side by side
    assert [one.outputs.score for one in found] == pytest.approx(expected, abs=2e-5)
    assert plain[0].outputs.score == pytest.approx(float(torch.tensor(expected[0]).logit()), abs=2e-4)
    assert found[0].prompt_token_ids == kwargs[0]["input_ids"][0].tolist()


@pytest.mark.behaviour(35, 49)
def test_pairs_are_cut_as_the_tokenizer_cuts_them(tmp_path: Path) -> None:
    path = bert(tmp_path / "cross", "BertForSequenceClassification", num_labels=1)
    llm = LLM(path, device="cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    pairs = [(TEXTS[0] * 9, TEXTS[1]), (TEXTS[1], TEXTS[0] * 9), (TEXTS[0] * 9, TEXTS[2] * 9), (TEXTS[1], TEXTS[1])]
    for limit in (5, 8, 11, 64, -1):
        found = llm.score(*map(list, zip(*pairs, strict=True)), PoolingParams(truncate_prompt_tokens=limit))
        for pair, one in zip(pairs, found, strict=True):
            expected = tokenizer(*pair, truncation=True, max_length=64 if limit == -1 else limit)
            assert one.prompt_token_ids == expected["input_ids"]
    with torch.no_grad():
        logits = hf_model(path, "AutoModelForSequenceClassification")(
            **tokenizer(*pairs[2], truncation=True, max_length=8, return_tensors="pt")
        ).logits
    (scored,) = llm.score(*pairs[2], PoolingParams(truncate_prompt_tokens=8))
    assert scored.outputs.score == pytest.approx(float(logits.sigmoid()), abs=2e-5)
    typed = {"prompt_token_ids": [1, 7, 8, 2, 9, 2], "token_type_ids": [0, 0, 0, 0, 1, 1]}
    (ids,) = llm.classify([typed], PoolingParams(truncate_prompt_tokens=4))
    assert ids.prompt_token_ids == [8, 2, 9, 2]
    for limit, says in (
        (65, "truncate_prompt_tokens=65 is above max_model_len=64"),
        (4, "the tokenizer adds 3 special tokens"),
    ):
        with pytest.raises(RequestError, match=says):
            llm.score("a cat", "a dog", PoolingParams(truncate_prompt_tokens=limit))
    for wrong in (0, -2, True, 2.5, "8"):
        with pytest.raises(RequestError, match=r"truncate_prompt_tokens=.* is not allowed"):
            PoolingParams(truncate_prompt_tokens=wrong)  # type: ignore[arg-type]
    assert not llm.engine.has_work


@pytest.mark.behaviour(49)
def test_token_types_come_with_a_prompt_and_wrong_ones_are_named(tmp_path: Path) -> None:
    path = bert(tmp_path / "bert", "BertModel")
    llm = LLM(path, device="cpu")
    typed = {"prompt_token_ids": [1, 7, 8, 2, 9, 2], "token_type_ids": [0, 0, 0, 0, 1, 1]}
    model = hf_model(path, "AutoModel")
    outputs = llm.encode(
        [typed, {**typed, "token_type_ids": [0] * 6}], PoolingParams(normalize=False), pooling_task="token_embed"
    )
    for output, types in zip(outputs, ([0, 0, 0, 0, 1, 1], [0] * 6), strict=True):
        with torch.no_grad():
            states = model(torch.tensor([typed["prompt_token_ids"]]), token_type_ids=torch.tensor([types]))
        assert_close(output.outputs.data, states.last_hidden_state[0])
    for types, says in (
        ([0, 1], "2 entries for 6 tokens"),
        ([1, 0, 0, 0, 0, 0], "zeros and ones after them"),
        ([0, 0, 0, 0, 2, 2], "zeros and ones after them"),
    ):
        with pytest.raises(RequestError, match=says):
            llm.embed({**typed, "token_type_ids": types})
    assert not llm.engine.has_work


@pytest.mark.behaviour(35)
def test_embeddings_score_by_cosine_or_max_sim(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama")
    llm = engines(path, task="embed")
    states = [llama_states(path, llm.tokenizer.encode(text)) for text in TEXTS]
    unit = [one / one.norm(dim=-1, keepdim=True) for one in states]
    cosine = [float(unit[0][-1] @ one[-1]) for one in unit]
    late = [float((unit[0] @ one.T).amax(1).sum()) for one in unit]
    with recorded(llm) as steps:
        found = llm.score(TEXTS[0], TEXTS)
    assert sum(len(step.rows) for step in steps) == 3  # each text is computed once
    assert [one.outputs.score for one in found] == pytest.approx(cosine, abs=1e-4)
    best = llm.score(TEXTS[0], TEXTS, score_type="late-interaction")
    assert [one.outputs.score for one in best] == pytest.approx(late, abs=1e-3)
    assert len(best[1].prompt_token_ids) == len(states[0]) + len(states[1])
    for ask, says in (
        (lambda: llm.score("a", "b", score_type="cross-encoder"), "served|serves"),
        (lambda: llm.score("a", "b", score_type="best"), "scored as 'best'"),
        (lambda: llm.score(["a", "b"], ["c", "d", "e"]), "2 texts against 3"),
        (lambda: llm.score([], []), "0 texts"),
        (lambda: llm.score(3, "b"), "first texts cannot be read"),  # type: ignore[arg-type]
        (lambda: llm.score("a", "b", PoolingParams(task="score")), "scores by 'embed'"),
        (lambda: llm.score("a", "b " * 100), "at most 64 fit"),
        (lambda: engines(path).score("a", "b"), "this engine runs 'generate'"),
    ):
        with pytest.raises(RequestError, match=says):
            ask()
    assert not llm.engine.has_work


@pytest.mark.behaviour(35, 124)
def test_a_decoder_whose_tokens_see_later_ones_is_refused(tiny: Tiny, engines: Engines) -> None:
    with pytest.raises(ModelError, match="is_causal = false, so it is no causal decoder"):
        engines(tiny("qwen2", architecture="Qwen2Model", is_causal=False))


@pytest.mark.behaviour(124, 141)
def test_every_task_is_tried_at_full_size_before_the_first_request(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from slotline.plugins.model_families.class_poolers import ClassPooler
    from slotline.plugins.pooling.head import PoolingHead

    tried: dict[str, int] = {}
    whole, try_all, kept = ClassPooler.pool, PoolingHead._try_all, list[tuple[int, ...]]()

    def keep(*args: Any) -> Any:
        pending = try_all(*args)
        assert pending.vectors is not None
        kept.append(pending.vectors.wait().shape)
        return pending

    def pool(self: Any, states: torch.Tensor, params: Any) -> torch.Tensor:
        tried[params[0].task] = max(tried.get(params[0].task, 0), len(states))
        return whole(self, states, params)

    monkeypatch.setattr(ClassPooler, "pool", pool)
    monkeypatch.setattr(PoolingHead, "_try_all", keep)
    settings: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 40, "max_model_len": 64}
    path = tiny("llama", architecture="LlamaForSequenceClassification", num_labels=1)
    llm = LLM(path, memory="4MiB", **settings)
    assert tried == {"classify": 6, "token_classify": 40, "score": 6}
    assert max(kept) == (40, 1), "the largest answers are on their way to the host beside the others"
    assert any(note.endswith("classify, token_classify, score") for note in llm.engine.notes)
    monkeypatch.setattr(ClassPooler, "tasks", ())
    with pytest.raises(ContractError, match="serves no task"):
        LLM(path, memory="4MiB", **settings)


def test_nans_of_one_token_end_its_request_alone(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), task="embed", max_num_seqs=4, **{"observability.count_nans": True})
    embeddings = llm.engine.runner.model.hf_model.base_model.embed_tokens.weight  # type: ignore[attr-defined]
    saved = embeddings[7].clone()
    embeddings[7] = float("nan")
    try:
        outputs = llm.encode([[8, 9, 7], [8, 9]], pooling_task="token_embed")
    finally:
        embeddings[7] = saved
    assert [output.finish_reason for output in outputs] == ["error", "stop"]
    assert outputs[0].metrics.num_nans in (64, 192)  # a backend may spread them over the request's other tokens
    assert np.isfinite(outputs[1].outputs.data.numpy()).all()  # type: ignore[union-attr]


@pytest.mark.behaviour(35)
def test_an_encoder_classifies_its_tokens(tmp_path: Path) -> None:
    path = bert(tmp_path / "tagger", "BertForTokenClassification", num_labels=3)
    llm = LLM(path, device="cpu")
    model = hf_model(path, "AutoModelForTokenClassification")
    for prompt, output in zip(WORD_PROMPTS, llm.encode(WORD_PROMPTS, pooling_task="token_classify"), strict=True):
        with torch.no_grad():
            assert_close(output.outputs.data, model(torch.tensor([prompt])).logits[0].softmax(-1))
    with pytest.raises(RequestError, match="a head for each token, and none for the text"):
        llm.classify(WORD_PROMPTS[0])


@pytest.mark.slow
@pytest.mark.behaviour(35)
@pytest.mark.parametrize("architecture", [one for one in (*TAGGERS, *ENCODERS) if one not in CLASSES])
def test_every_architecture_classifies_tokens_as_transformers_does(
    architecture: str, tiny: Tiny, engines: Engines, tmp_path: Path
) -> None:
    if architecture in ENCODERS:
        sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96} if "Distil" in architecture else {}
        path = bert(tmp_path / "tagger", architecture, num_labels=3, **sizes)
        llm, prompts = LLM(path, device="cpu"), WORD_PROMPTS
    else:
        base = architecture.removesuffix("ForTokenClassification")
        name = next(name for name in FAMILIES if family(name).architecture == f"{base}ForCausalLM")
        path = tiny(name, architecture=architecture, num_labels=3)
        llm, prompts = engines(path, max_num_batched_tokens=16), PROMPTS[:3]
    model = hf_model(path, "AutoModelForTokenClassification")
    for prompt, output in zip(prompts, llm.encode(prompts, pooling_task="token_classify"), strict=True):
        with torch.no_grad():
            assert_close(output.outputs.data, model(torch.tensor([prompt])).logits[0].softmax(-1))


@pytest.mark.behaviour(35)
def test_rewards_of_steps_and_of_texts(tiny: Tiny, engines: Engines, tmp_path: Path) -> None:
    text = [*PROMPTS[1][:9], 5, *PROMPTS[1][9:20], 5]
    llm = engines(tiny("qwen3", architecture="Qwen3ForTokenClassification", num_labels=2), max_num_batched_tokens=16)
    model = hf_model(llm.engine.runner.model.facts.path, "AutoModelForTokenClassification")
    logits = model(torch.tensor([text]), use_cache=False).logits[0]
    ends = torch.tensor(text) == 5
    (found,) = llm.reward([text], step_token=5)
    assert_close(found.outputs.data, logits.softmax(-1)[ends][:, 1])
    assert len(llm.reward([[6, 7]], step_token=5)[0].outputs.data) == 0
    for ask, says in (
        (lambda: llm.reward([text]), "no rewards of texts"),
        (lambda: llm.reward([text], step_token="<no such token>"), "no token of this model"),
        (lambda: engines(tiny("llama"), task="embed").reward([text], step_token=5), "no rewards of steps"),
    ):
        with pytest.raises(RequestError, match=says):
            ask()
    outcome = tiny("llama", architecture="LlamaForSequenceClassification", num_labels=1)
    plain = hf_model(outcome, "AutoModelForSequenceClassification")(torch.tensor([text]), use_cache=False).logits[0]
    assert_close(engines(outcome).reward([text])[0].outputs.data, plain)


@pytest.mark.behaviour(35)
@pytest.mark.parametrize("architecture", list(CLASSES))
def test_reward_models_without_a_class_of_transformers(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "reward"
    torch.manual_seed(3)
    cls: Any = CLASSES[architecture]
    reference = cls(transformers.Qwen2Config(**{**SIZES, "num_key_value_heads": 2})).eval()
    reference.save_pretrained(path)
    llm = LLM(path, device="cpu", memory="4MiB", max_num_batched_tokens=16)
    text = [*WORD_PROMPTS[1][:9], 5]
    with torch.no_grad():
        logits = reference.score(reference.model(torch.tensor([text])).last_hidden_state[0])
    if architecture == "Qwen2ForRewardModel":
        assert_close(llm.reward([text])[0].outputs.data, logits[-1])
    else:
        assert_close(llm.reward([text], step_token=5)[0].outputs.data, logits[-1:].softmax(-1)[:, 1])
