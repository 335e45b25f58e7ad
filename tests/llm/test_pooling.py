"""Pooling tasks: embeddings and class scores equal transformers', whatever chunking, sharing and preemption do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from engine_driver import random_prompts, recorded, run_all
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, family

from slotline.core import LLM, PoolingParams, SamplingParams
from slotline.core.batch.request import Request
from slotline.plugins.model_families.decoder import ARCHITECTURES, CLASSIFIERS, EMBEDDERS
from slotline.plugins.model_families.logits import NoHead
from slotline.plugins.model_families.pooling import make_pooler
from slotline.registry.errors import (
    CapacityError,
    ConfigError,
    ContractError,
    ModelError,
    NegotiationError,
    RequestError,
)

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
HIDDEN = 64
POOLING = "model_family.transformers_decoder.pooling"
METHODS = ("last", "cls", "mean")


@cache
def _loaded(path: Path, auto_class: str) -> Any:
    found = getattr(transformers, auto_class)
    return found.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False).eval()


def states_of(path: Path, prompt: list[int]) -> torch.Tensor:
    """transformers' last hidden states [len(prompt), hidden_size] of one prompt alone."""
    with torch.no_grad():
        states: torch.Tensor = _loaded(path, "AutoModel")(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
    return states


def embedding_of(path: Path, prompt: list[int], method: str, *, size: int = HIDDEN, unit: bool = True) -> torch.Tensor:
    """The embedding [size] by its definition."""
    states = states_of(path, prompt)
    pooled = {"last": states[-1], "cls": states[0], "mean": states.mean(0)}[method][:size]
    return pooled / pooled.norm() if unit else pooled


def logits_of(path: Path, prompt: list[int]) -> torch.Tensor:
    """transformers' class logits [num_labels]."""
    with torch.no_grad():
        model = _loaded(path, "AutoModelForSequenceClassification")
        logits: torch.Tensor = model(torch.tensor([prompt]), use_cache=False).logits[0]
    return logits


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def assert_embeddings(llm: LLM, path: Path, prompts: list[list[int]], method: str) -> list[int]:
    """Every embedding is right; returns the cached tokens of each."""
    outputs = llm.embed(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert (output.finished, output.finish_reason) == (True, "stop")
        assert output.outputs is not None
        assert_equal(output.outputs.data, embedding_of(path, prompt, method))
    return [output.metrics.num_cached_tokens for output in outputs]


def answer(request: Request) -> torch.Tensor:
    assert request.answer is not None
    return torch.from_numpy(request.answer)


@pytest.mark.spread(8)
@pytest.mark.parametrize(
    ("backend", "optimize", "block_size", "overlap"), [("torch", False, 4, True), ("cpu", True, 16, False)]
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
@pytest.mark.behaviour(35, 99)
def test_embeddings_equal_transformers_states_in_chunked_shared_batches(
    name: str, method: str, backend: str, optimize: bool, block_size: int, overlap: bool, tiny: Tiny, engines: Engines
) -> None:
    path = tiny(name)
    settings = {"scheduler.max_batched_tokens": 24, POOLING: method, "task": "embed", "scheduler.async": overlap}
    llm = engines(path, backend=backend, optimize=optimize, block_size=block_size, **settings)
    with recorded(llm) as steps:
        assert assert_embeddings(llm, path, PROMPTS, method) == [0] * len(PROMPTS)
    assert max(int(step.num_scheduled.max(initial=0)) for step in steps) < 40  # the longest prompt came in chunks
    assert max(len(step.rows) for step in steps) > 1
    assert llm.engine.asynchronous is overlap
    hits = assert_embeddings(llm, path, PROMPTS, method)
    reusable = [(len(p) - 1) // block_size * block_size for p in PROMPTS]
    assert hits == (reusable if method == "last" else [0] * len(PROMPTS))  # the others need every state


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.behaviour(33, 35)
def test_a_prompt_that_is_preempted_and_computed_again_gives_the_same_embedding(
    method: str, tiny: Tiny, engines: Engines
) -> None:
    path = tiny("llama")
    llm = engines(path, block_size=4, **{"scheduler.max_batched_tokens": 16, POOLING: method, "task": "embed"})
    (prompt,) = random_prompts([40], seed=3)
    request = llm.engine.add("one", prompt, PoolingParams(task="embed"))
    llm.engine.step()
    llm.engine.step()
    llm.engine.scheduler._preempt_last()  # one prompt at a time is in mid-way, so no crowd makes this happen
    run_all(llm)
    assert request.metrics.num_preemptions == 1
    assert_equal(answer(request), embedding_of(path, prompt, method))


@pytest.mark.spread(4, slow=1)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.behaviour(35)
def test_prompts_that_come_go_and_start_over_at_random_give_what_they_give_alone(
    method: str, overlap: bool, tiny: Tiny, engines: Engines
) -> None:
    rng, path = Random(f"{method} pooling"), tiny("qwen3")
    settings = {"scheduler.max_batched_tokens": 13, POOLING: method, "task": "embed", "memory": "256KiB"}
    llm = engines(path, block_size=4, max_num_seqs=3, **settings, **{"scheduler.async": overlap})
    heads = random_prompts([40, 40], seed=90)
    prompts = [
        rng.choice(heads)[: rng.randint(1, 40)] + random_prompts([rng.randint(0, 8)], seed=i)[0] for i in range(24)
    ]
    requests = dict[int, Request]()
    aborted = set[int]()
    for index, prompt in enumerate(prompts):
        params = PoolingParams(task="embed", normalize=index % 2 == 0)
        requests[index] = llm.engine.add(str(index), prompt, params)
        for _ in range(rng.randint(0, 3)):
            llm.engine.step()
        if llm.engine.scheduler.running and rng.random() < 0.4:
            llm.engine.scheduler._preempt_last()
        if rng.random() < 0.2 and llm.engine.abort(str(index)) is not None:
            aborted.add(index)
    run_all(llm)
    assert aborted
    assert sum(request.metrics.num_preemptions for request in requests.values()) > 0
    assert method != "last" or sum(request.metrics.num_cached_tokens for request in requests.values()) > 0
    for index, request in requests.items():
        if index in aborted:
            assert (request.answer, request.finish_reason) == (None, "abort")
        else:
            assert_equal(answer(request), embedding_of(path, prompts[index], method, unit=index % 2 == 0))


@pytest.mark.spread(7)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama_tied" and name != "qwen2_sliding"])
@pytest.mark.behaviour(35)
def test_every_architecture_embeds_without_an_output_projection_and_classifies_with_a_score_head(
    name: str, tiny: Tiny, engines: Engines
) -> None:
    base = family(name).architecture.removesuffix("ForCausalLM")
    embedder = next(a for a in EMBEDDERS if a in (f"{base}Model", f"{base}TextModel"))
    path = tiny(name, architecture=embedder)
    assert_embeddings(engines(path), path, PROMPTS[:3], "last")
    classifier = next((a for a in CLASSIFIERS if a.startswith(embedder.removesuffix("Model") + "For")), None)
    assert (classifier is None) == (name in ("granite", "glm4_moe"))
    if classifier is not None:
        path = tiny(name, architecture=classifier, num_labels=3)
        outputs = engines(path).classify(PROMPTS[:3])
        for prompt, output in zip(PROMPTS, outputs, strict=False):
            assert output.outputs is not None
            assert_equal(torch.tensor(output.outputs.probs), logits_of(path, prompt).softmax(-1))


def test_there_is_an_embedder_of_every_decoder_and_a_classifier_of_all_that_transformers_has() -> None:
    bases = {name.removesuffix("ForCausalLM") for name in ARCHITECTURES}
    assert {name.removesuffix("Model").removesuffix("Text") for name in EMBEDDERS} == bases
    classifiers = {name.removesuffix("ForSequenceClassification").removesuffix("Text") for name in CLASSIFIERS}
    assert classifiers == {base for base in bases if hasattr(transformers, f"{base}ForSequenceClassification")}


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({"num_labels": 4}, "softmax"),
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 2, "problem_type": "regression"}, "none"),
    ],
)
@pytest.mark.behaviour(35)
def test_class_scores_equal_transformers_with_the_checkpoints_activation(
    settings: dict[str, Any], activation: str, tiny: Tiny, engines: Engines
) -> None:
    path = tiny("llama", architecture="LlamaForSequenceClassification", **settings)
    llm = engines(path, block_size=4, **{"scheduler.max_batched_tokens": 24})
    apply: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "softmax": lambda x: x.softmax(-1),
        "sigmoid": torch.sigmoid,
        "none": lambda x: x,
    }
    for _ in range(2):  # the second time with cached prefixes
        plain = [index % 3 == 0 for index in range(len(PROMPTS))]
        outputs = llm.classify(PROMPTS, [PoolingParams(use_activation=False if p else None) for p in plain])
        for prompt, raw, output in zip(PROMPTS, plain, outputs, strict=True):
            logits = logits_of(path, prompt)
            assert output.outputs is not None
            assert output.outputs.num_classes == settings["num_labels"]
            assert_equal(output.outputs.data, logits if raw else apply[activation](logits))
    assert outputs[3].metrics.num_cached_tokens == 36


def sentence_transformers_folder(
    path: Path, to: Path, *, modules: tuple[str, ...] = ("Transformer", "Pooling", "Normalize"), **pooling: Any
) -> Path:
    """A copy of a checkpoint with the files that sentence-transformers adds."""
    shutil.copytree(path, to)
    entries = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if name == "Transformer" else f"{i}_{name}",
            "type": f"sentence_transformers.models.{name}",
        }
        for i, name in enumerate(modules)
    ]
    (to / "modules.json").write_text(json.dumps(entries))
    if "Pooling" in modules:
        (to / "1_Pooling").mkdir()
        config = {"word_embedding_dimension": HIDDEN, **(pooling or {"pooling_mode_mean_tokens": True})}
        (to / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return to


@pytest.mark.parametrize(
    ("pooling", "method"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.behaviour(35)
def test_a_sentence_transformers_folder_embeds_as_it_says(
    unit: bool, pooling: dict[str, Any], method: str, tiny: Tiny, engines: Engines, tmp_path: Path
) -> None:
    modules = ("Transformer", "Pooling", "Normalize") if unit else ("Transformer", "Pooling")
    path = sentence_transformers_folder(tiny("llama"), tmp_path / "st", modules=modules, **pooling)
    llm = engines(path)  # no task is named: the folder was made for embeddings
    for prompt, output in zip(PROMPTS, llm.embed(PROMPTS), strict=True):
        assert output.outputs is not None
        assert_equal(torch.tensor(output.outputs.embedding), embedding_of(path, prompt, method, unit=unit))
    (asked,) = llm.embed([PROMPTS[1]], PoolingParams(normalize=not unit))
    assert asked.outputs is not None
    assert_equal(asked.outputs.data, embedding_of(path, PROMPTS[1], method, unit=not unit))
    assert any(note.startswith(f"embed: {method} pooling") for note in llm.engine.notes)


@pytest.mark.parametrize(
    ("modules", "pooling", "named"),
    [
        (("Transformer", "Pooling", "Dense"), {}, "Dense"),
        (("Transformer", "Normalize"), {}, "one Pooling"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (
            ("Transformer", "Pooling"),
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "pooling_mode_cls_token, pooling_mode_mean_tokens",
        ),
        (("Transformer", "Pooling"), {"pooling_mode": "weightedmean"}, "weightedmean"),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 32}, "32"),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt"),
    ],
)
@pytest.mark.behaviour(35)
def test_a_pooling_that_cannot_be_done_is_refused_when_the_model_loads(
    modules: tuple[str, ...], pooling: dict[str, Any], named: str, tiny: Tiny, engines: Engines, tmp_path: Path
) -> None:
    path = sentence_transformers_folder(tiny("llama"), tmp_path / "st", modules=modules, **pooling)
    with pytest.raises(ModelError, match=named):
        engines(path)
    assert engines(path, task="generate").generate([PROMPTS[0]], SamplingParams(max_tokens=1))


def test_broken_sentence_transformers_files_are_named(tiny: Tiny, engines: Engines, tmp_path: Path) -> None:
    path = sentence_transformers_folder(tiny("llama"), tmp_path / "st")
    for name, text, says in (
        ("1_Pooling/config.json", "[]", "no JSON object"),
        ("1_Pooling/config.json", "{", "cannot be read as JSON"),
        ("modules.json", '{"a": 1}', "no list of modules"),
        ("modules.json", "nothing", "cannot be read as JSON"),
    ):
        (path / name).write_text(text)
        with pytest.raises(ModelError, match=f"{name}.* {says}"):
            engines(path)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.behaviour(35)
def test_a_matryoshka_model_cuts_its_embeddings_request_by_request(method: str, tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama", matryoshka_dimensions=[16, 32, 64])
    llm = engines(path, task="embed", **{POOLING: method})
    sizes = [16, None, 32, 64, 16, None]
    outputs = llm.embed(PROMPTS, [PoolingParams(dimensions=s, normalize=s != 32) for s in sizes])
    for prompt, size, output in zip(PROMPTS, sizes, outputs, strict=True):
        assert output.outputs is not None
        assert output.outputs.hidden_size == len(output.outputs.embedding) == (size or HIDDEN)
        assert_equal(output.outputs.data, embedding_of(path, prompt, method, size=size or HIDDEN, unit=size != 32))
    with pytest.raises(RequestError, match=r"dimensions=48.*\n.*16, 32, 64"):
        llm.embed(PROMPTS, PoolingParams(dimensions=48))


def test_any_length_will_do_where_the_checkpoint_says_no_more_than_that_it_is_matryoshka(
    tiny: Tiny, engines: Engines
) -> None:
    path = tiny("llama", is_matryoshka=True)
    (output,) = engines(path, task="embed").embed([PROMPTS[1]], PoolingParams(dimensions=7))
    assert output.outputs is not None
    assert_equal(output.outputs.data, embedding_of(path, PROMPTS[1], "last", size=7))
    with pytest.raises(RequestError, match="1 to 64"):
        engines(path, task="embed").embed(PROMPTS, PoolingParams(dimensions=65))


@pytest.mark.behaviour(4, 35)
def test_a_request_for_another_task_or_none_is_refused_and_the_engine_goes_on(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama")
    llm = engines(path, task="embed")
    for ask, says in (
        (
            lambda: llm.encode(PROMPTS),
            r"task is missing; the model serves generate, embed, and this engine runs 'embed'",
        ),
        (lambda: llm.classify(PROMPTS), r"the task 'classify' cannot run: .*\n.*take a model that serves it"),
        (lambda: llm.encode(PROMPTS, pooling_task="score"), r"the task 'score' cannot run: the model serves gen"),
        (lambda: llm.generate(PROMPTS), r"the task 'generate' cannot run: .*\n.*an engine with task = \"generate\""),
        (lambda: llm.embed(PROMPTS, PoolingParams(task="classify")), r"task='classify' in a call for 'embed'"),
        (lambda: llm.embed(PROMPTS, PoolingParams(use_activation=True)), r"use_activation=True has no meaning"),
        (lambda: llm.embed(PROMPTS, PoolingParams(dimensions=8)), r"prompt 0: dimensions=8 is not served"),
        (lambda: llm.embed(PROMPTS, SamplingParams()), r"is no PoolingParams"),  # type: ignore[arg-type]
        (lambda: llm.embed(PROMPTS, [PoolingParams()]), r"1 pooling parameters for 6 prompts"),
        (lambda: llm.embed([[*PROMPTS[0]], []]), r"prompt 1: the prompt is empty"),
        (lambda: llm.embed([[5] * 65]), r"at most 64 fit into max_model_len=64"),
        (lambda: llm.embed([[5, 10**6]]), r"outside the vocabulary"),
    ):
        with pytest.raises(RequestError, match=says):
            ask()
        assert not llm.engine.has_work
    assert_embeddings(llm, path, PROMPTS, "last")
    generating = engines(path)
    with pytest.raises(RequestError, match=r"the task 'embed' cannot run: .*\n.*task = \"embed\""):
        generating.embed(PROMPTS)
    with pytest.raises(RequestError, match=r"is no SamplingParams"):
        generating.generate(PROMPTS, PoolingParams(task="embed"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"task": "generate"}, "SamplingParams"),
        ({"task": 3}, "no pooling task"),
        ({"dimensions": 0}, "dimensions=0"),
        ({"dimensions": True}, "dimensions=True"),
        ({"dimensions": "8"}, "dimensions='8'"),
        ({"normalize": 1}, "normalize=1"),
        ({"use_activation": "no"}, "use_activation='no'"),
        ({"task": "classify", "dimensions": 8}, "belongs to task 'embed'"),
        ({"task": "embed", "use_activation": False}, "belongs to task 'classify'"),
    ],
)
def test_wrong_pooling_parameters_are_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        PoolingParams(**values)


def test_a_prompt_may_fill_the_whole_length_since_nothing_is_sampled(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama")
    llm = engines(path, task="embed", **{"scheduler.max_batched_tokens": 24})
    assert_embeddings(llm, path, random_prompts([64, 63], seed=4), "last")


def test_prompts_come_as_text_and_mappings_too(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama")
    llm = engines(path, task="embed")
    text = "def main(argv):"
    ids = llm.tokenizer.encode(text)
    outputs = llm.embed([text, {"prompt_token_ids": ids, "request_id": "mine"}])
    assert [(o.prompt, o.request_id != "mine") for o in outputs] == [(text, True), (None, False)]
    for output in outputs:
        assert output.outputs is not None
        assert_equal(output.outputs.data, embedding_of(path, ids, "last"))


def test_an_aborted_request_has_no_answer_and_the_others_get_theirs(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama")
    llm = engines(path, task="embed", **{POOLING: "mean", "scheduler.max_batched_tokens": 16})
    params = PoolingParams(task="embed")
    first, second = (llm.engine.add(str(i), PROMPTS[i], params) for i in (1, 3))
    llm.engine.step()
    llm.engine.abort("1")
    output = llm.engine.extension("pooling").output(first)
    assert (output.outputs, output.finished, output.finish_reason) == (None, True, "abort")
    run_all(llm)
    assert_equal(answer(second), embedding_of(path, PROMPTS[3], "mean"))


@pytest.mark.behaviour(4, 35, 124)
def test_the_task_is_the_models_own_unless_named_and_stands_in_the_plan(tiny: Tiny, engines: Engines) -> None:
    def of(llm: LLM) -> tuple[str, str, str]:
        setting = next(s for s in llm.plan.settings if s.key == "task")
        return setting.asked, setting.resolved, setting.origin

    causal, scored = tiny("llama"), tiny("llama", architecture="LlamaForSequenceClassification", num_labels=3)
    why = "auto: what the checkpoint was made for"
    assert of(engines(causal)) == ("auto", "generate", why)
    assert of(engines(scored)) == ("auto", "classify", why)
    assert of(engines(tiny("llama", architecture="LlamaModel"))) == ("auto", "embed", why)
    llm = engines(causal, task="embed")
    assert of(llm) == ("embed", "embed", "argument task")
    assert "embed" in next(line for line in llm.plan.explain().splitlines() if line.split()[:1] == ["task"])
    assert not llm.engine.pipeline.slots  # nothing is sampled, so no logits processor is built
    assert not hasattr(llm.engine.runner.model.hf_model, "lm_head")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"task": "classify"}, NegotiationError, r"task = 'classify' \(argument task\): .* serves generate, embed"),
        ({"task": "translate"}, ConfigError, "translate"),
        ({"task": "embed", "drafter.name": "ngram"}, NegotiationError, r"drafter.name = 'ngram': task 'embed' samples"),
        ({"task": "embed", "logits_processors.logit_bias": {}}, NegotiationError, r"\[logits_processors.logit_bias\]"),
        ({"task": "embed", POOLING: "max"}, ConfigError, "max"),
        ({POOLING: "mean"}, ModelError, "is for task 'embed', and the task is 'generate'"),
    ],
)
@pytest.mark.behaviour(35)
def test_what_a_task_cannot_work_with_is_an_error_at_the_start(
    settings: dict[str, Any], error: type[Exception], says: str, tiny: Tiny, engines: Engines
) -> None:
    with pytest.raises(error, match=says):
        engines(tiny("llama"), **settings)


@pytest.mark.behaviour(141)
def test_the_pooler_runs_at_full_size_before_the_first_request_and_must_fit(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    poolers: list[list[int]] = []
    memory = True

    def made(*given: Any) -> Any:
        pooler, notes = make_pooler(*given)
        poolers.append([])

        def pool(states: torch.Tensor, params: Any) -> torch.Tensor:
            poolers[-1].append(len(states))
            if not memory:
                raise torch.OutOfMemoryError("out of memory")
            return pooler.pool(states, params)

        return SimpleNamespace(method=pooler.method, adjust=pooler.adjust, pool=pool), notes

    monkeypatch.setattr("slotline.plugins.model_families.transformers_model.make_pooler", made)
    settings: dict[str, Any] = {"task": "embed", "max_num_seqs": 6, "max_num_batched_tokens": 40, "max_model_len": 64}
    LLM(tiny("llama"), memory="4MiB", **settings)
    assert poolers[0]
    assert max(poolers[0]) == 6
    memory = False
    with pytest.raises(CapacityError, match=r"a step of 40 tokens of 6 requests does not fit[\s\S]*max_requests"):
        LLM(tiny("llama"), memory="4MiB", **settings)


def test_a_family_that_offers_a_task_and_brings_no_pooler_is_named(
    tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "slotline.plugins.model_families.transformers_model"
    monkeypatch.setattr(f"{module}.make_pooler", lambda *_: (None, ()))
    monkeypatch.setattr(f"{module}.head_of", lambda hf_model, **_: NoHead(hf_model))
    with pytest.raises(
        ContractError, match="'transformers_decoder' offers the task 'embed', and its model has no pool"
    ):
        engines(tiny("llama"), task="embed", max_model_len=32)


def test_an_embedding_checkpoint_needs_no_output_projection_and_no_prefix_in_its_names(
    tiny: Tiny, engines: Engines, tmp_path: Path
) -> None:
    path = tmp_path / "bare"
    shutil.copytree(tiny("llama"), path)
    weights = load_file(path / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in weights.items() if not name.startswith("lm_head")}
    assert len(bare) == len(weights) - 1
    save_file(bare, path / "model.safetensors", {"format": "pt"})
    found = engines(path, task="embed").embed([PROMPTS[1]])[0].outputs
    assert found is not None
    assert_equal(found.data, embedding_of(tiny("llama"), PROMPTS[1], "last"))
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        engines(path, task="generate")


@pytest.mark.parametrize("optimize", [False, True])
def test_reloaded_weights_change_embeddings_and_class_scores(
    optimize: bool, tiny: Tiny, engines: Engines, tmp_path: Path
) -> None:
    scored = {"architecture": "LlamaForSequenceClassification", "num_labels": 3}
    first, second = tiny("llama", **scored), tiny("llama", seed=1, **scored)
    small: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "memory": "4MiB", "observability.progress": False}
    llm = LLM(first, dtype="float32", optimize=optimize, **small)
    (before,) = llm.classify([PROMPTS[1]])
    llm.update_config(model=str(second))
    llm.reload_weights()
    (after,) = llm.classify([PROMPTS[1]])
    assert before.outputs is not None
    assert after.outputs is not None
    assert_equal(before.outputs.data, logits_of(first, PROMPTS[1]).softmax(-1))
    assert_equal(after.outputs.data, logits_of(second, PROMPTS[1]).softmax(-1))


def test_nans_in_an_answer_are_counted_for_their_request_alone(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), task="embed", max_num_seqs=4, **{POOLING: "mean", "observability.count_nans": True})
    embeddings = llm.engine.runner.model.hf_model.base_model.embed_tokens.weight  # type: ignore[attr-defined]
    saved = embeddings[7].clone()
    embeddings[7] = float("nan")
    try:
        outputs = llm.embed([[7, 8], [8, 9], [9, 8, 7]])
    finally:
        embeddings[7] = saved
    assert [output.metrics.num_nans for output in outputs] == [HIDDEN, 0, HIDDEN]
    again = llm.embed([[8, 9]] * 4)  # the rows of those that had NaNs are used again
    assert [output.metrics.num_nans for output in again] == [0] * 4


def test_a_step_of_pooling_copies_to_the_host_once_however_many_requests_end(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), task="embed", **{POOLING: "mean"})
    staging = llm.engine.runner.staging
    original, sizes = staging.download, list[tuple[int, ...]]()

    def download(tensor: torch.Tensor) -> Any:
        sizes.append(tuple(tensor.shape))
        return original(tensor)

    staging.download = download  # type: ignore[method-assign]
    try:
        llm.embed(random_prompts([5, 6, 7, 8], seed=2))
    finally:
        del staging.download
    assert sizes == [(4, HIDDEN)]
