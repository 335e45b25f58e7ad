"""Adapters in an engine: every request gets what PEFT gives for its adapter, whatever else is in the batch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import random_prompts
from lora_cases import PeftOracle, expansions
from repository import SUPPORT
from safetensors.torch import load_file, save, save_file

from slotline.builder.made_up import made_up_inputs
from slotline.core import LLM, BeamSearchParams, LoRARequest, SamplingParams
from slotline.core.batch.graph_dispatcher import GraphDispatcher, GraphShape
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.plugins.lora.manager.adapter_use import AdapterUse
from slotline.registry.errors import ConfigError, NegotiationError, RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
LORA = {"lora.name": "torch", "lora.max_adapters": 2, "lora.max_rank": 8}
LENGTHS = (5, 40, 17, 1, 30, 12)
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stabilised": {"r": 8, "use_rslora": True},
    "queries": {"target_modules": ["q_proj", "down_proj"], "r": 2, "lora_alpha": 3},
    "patterns": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.1.self_attn.v_proj": 20}},
    "head": {"target_modules": ["lm_head", "v_proj"]},
}


@pytest.fixture(scope="module")
def llama(tiny: Tiny) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def oracle(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> PeftOracle:
    return PeftOracle(llama, tmp_path_factory.mktemp("adapters"), ADAPTERS)


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["embed_tokens", "v_proj"], "r": 3},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "queries": {"target_modules": ["embed_tokens", "q_proj"], "use_rslora": True},
}
"""Adapters of the embedding, by themselves: PEFT saves an adapted embedding with every adapter of the model."""


@pytest.fixture(scope="module")
def embedded(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> PeftOracle:
    return PeftOracle(llama, tmp_path_factory.mktemp("embedded"), EMBEDDINGS)


@pytest.fixture
def engine(llama: Path, engines: Engines) -> Iterator[Callable[..., LLM]]:
    """An engine with two slots that knows no adapter."""
    used: list[LLM] = []

    def get(path: Path = llama, **settings: Any) -> LLM:
        used.append(engines(path, **{**LORA, **settings}))
        return used[-1]

    yield get
    for llm in used:
        for number in llm.list_loras():
            llm.remove_lora(number)


def prompts_of(count: int) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": prompt} for prompt in random_prompts([LENGTHS[i % 6] for i in range(count)])]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def check(llm: LLM, oracle: PeftOracle, names: list[str | None], *, length: int = 6) -> None:
    """The tokens of a batch of requests with these adapters, against PEFT's."""
    prompts = prompts_of(len(names))
    outputs = llm.generate(prompts, greedy(length), lora_request=[oracle.request(n) for n in names])
    for prompt, name, output in zip(prompts, names, outputs, strict=True):
        wanted = oracle.greedy(name, prompt["prompt_token_ids"], length)
        assert list(output.outputs[0].token_ids) == wanted, (name, output)


def check_scores(llm: LLM, oracle: PeftOracle, names: list[str | None]) -> None:
    """The log-probabilities of prompts, against PEFT's."""
    prompts, params = prompts_of(len(names)), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate(prompts, params, lora_request=[oracle.request(name) for name in names])
    for prompt, name, output in zip(prompts, names, outputs, strict=True):
        tokens = prompt["prompt_token_ids"]
        scores = oracle.logits(name, tokens).log_softmax(-1)
        found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)]
        wanted = scores[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
        np.testing.assert_allclose(found, wanted.numpy(), atol=5e-4)


@pytest.mark.spread(5)
@pytest.mark.behaviour(75)
@pytest.mark.parametrize("optimize", [False, True], ids=["plain", "passes"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma3", "phi3", "mixtral", "starcoder2", "granite", "bamba", "lfm2"]
)
def test_a_batch_with_and_without_an_adapter_equals_peft(family, optimize, tiny, tmp_path):
    path = tiny(family)
    oracle = PeftOracle(path, tmp_path, {"first": {}, "second": {"r": 3, "use_rslora": True}})
    settings = {"dtype": "float32", "backend": "torch", "block_size": 16, "max_model_len": 64, "max_num_seqs": 8}
    checks = {"observability.check_integrity": True, "observability.progress": False}
    llm = LLM(path, **settings, **checks, **LORA, memory="8MiB", optimize=optimize)
    check(llm, oracle, ["first", None, "second", "first"], length=5)
    check_scores(llm, oracle, ["second", None, "first"])
    first, base = (oracle.logits(name, prompts_of(1)[0]["prompt_token_ids"]) for name in ("first", None))
    assert float((first - base).abs().max()) > 0.1


def test_a_layer_whose_weight_is_read_beside_its_forward_takes_no_adapter(tiny, tmp_path):
    path = tiny("jamba")
    oracle = PeftOracle(
        path, tmp_path, {"good": {"target_modules": ["in_proj", "x_proj"]}, "bad": {"target_modules": ["dt_proj"]}}
    )
    llm = LLM(path, dtype="float32", backend="torch", max_model_len=64, max_num_seqs=4, memory="8MiB", **LORA)
    check(llm, oracle, ["good", None])
    with pytest.raises(RequestError, match=r"dt_proj.* belongs to no module that may carry an adapter"):
        llm.add_lora(oracle.request("bad"))


@pytest.mark.behaviour(75)
@pytest.mark.parametrize("optimize", [False, True], ids=["plain", "passes"])
def test_ranks_scales_and_targets_of_all_kinds_share_steps_with_chunked_prompts(engine, oracle, optimize):
    llm = engine(max_num_batched_tokens=16, optimize=optimize, **{"lora.max_adapters": 4})
    check(llm, oracle, ["plain", None, "stabilised", "queries", "patterns", None, "plain", "queries"])


def test_an_adapter_of_the_output_projection_changes_logits_and_scores_of_the_prompt(engine, oracle):
    llm = engine(**{"lora.target_modules": ("lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "down_proj")})
    check(llm, oracle, ["head", None, "queries", "head"])
    check_scores(llm, oracle, ["head", None])


EMBEDDED = {"lora.target_modules": ("embed_tokens", "lm_head", "q_proj", "v_proj", "down_proj")}


@pytest.mark.behaviour(75)
@pytest.mark.parametrize("optimize", [False, True], ids=["plain", "passes"])
def test_adapters_of_the_embedding_and_of_the_output_projection_equal_peft(engine, embedded, optimize):
    llm = engine(optimize=optimize, max_num_batched_tokens=16, **EMBEDDED, **{"lora.max_adapters": 3})
    check(llm, embedded, ["embedding", None, "both", "queries", "embedding"])
    check_scores(llm, embedded, ["both", None, "embedding"])
    plain, embedded = (embedded.logits(name, prompts_of(1)[0]["prompt_token_ids"]) for name in (None, "embedding"))
    assert float((plain - embedded).abs().max()) > 0.1


@pytest.mark.parametrize("family", ["gemma3", "granite", "qwen3"])
def test_an_embedding_that_is_scaled_or_tied_to_the_output_projection_takes_an_adapter(family, tiny, tmp_path):
    path = tiny(family)
    oracle = PeftOracle(path, tmp_path, {"first": {"target_modules": ["embed_tokens"], "r": 2}})
    settings = {"dtype": "float32", "backend": "torch", "max_model_len": 64, "max_num_seqs": 4, "memory": "8MiB"}
    llm = LLM(path, **settings, **LORA, **{"lora.target_modules": ("embed_tokens",)})
    check(llm, oracle, ["first", None, "first"])
    check_scores(llm, oracle, ["first", None])


def test_an_adapter_of_the_embedding_is_merged_into_it(engine, embedded):
    llm = engine(**EMBEDDED, **{"lora.merge": True})
    check(llm, embedded, ["both"])
    llm.remove_lora(embedded.request("both").lora_int_id)
    check(llm, embedded, [None])


@pytest.mark.spread(1)
@pytest.mark.parametrize("family", ["llama", "starcoder2"], ids=["plain", "with-biases"])
def test_products_with_adapters_behind_their_weights_equal_peft(family, tiny, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from slotline.plugins.lora.segmented import plugin

    if torch.cuda.is_available():
        pytest.skip("tests/plugins/lora/test_lora_cuda.py has it with the compiled kernels")
    monkeypatch.setattr(plugin, "MOST_EXTENDED", 100)
    monkeypatch.setattr(plugin, "FEW_TOKENS", 8)  # so that prompts are computed without, and decoded with it
    path = tiny(family)
    oracle = PeftOracle(path, tmp_path, {"first": {}, "second": {"r": 3, "use_rslora": True}})
    settings = {"dtype": "float32", "backend": "torch", "max_model_len": 64, "max_num_seqs": 8, "memory": "8MiB"}
    named = {"lora.name": "interpreted_lora", "plugins.inline": (str(INLINE).replace("narrow", "interpreted"),)}
    llm = LLM(path, optimize=False, **{**settings, **LORA, **named})
    model, expanded = llm.engine.runner.model, expansions(llm)
    names = ["first", None, "second", "first"]
    check(llm, oracle, names, length=4)
    assert len(set(expanded)) == len(model.linears) - 1  # all but the output projection
    model.reload_weights()
    check(llm, oracle, names[::-1], length=3)
    used = len(expanded)
    check(llm, oracle, [None, None], length=3)
    assert len(expanded) == used


def test_steps_of_one_adapter_are_told_as_such_and_equal_peft(llama, oracle, monkeypatch):
    pytest.importorskip("triton")
    from slotline.plugins.lora.segmented import plugin

    if torch.cuda.is_available():
        pytest.skip("tests/plugins/lora/test_lora_cuda.py has it with the compiled kernels")
    monkeypatch.setattr(plugin, "MOST_EXTENDED", 100)
    named = {"lora.name": "interpreted_lora", "plugins.inline": (str(INLINE).replace("narrow", "interpreted"),)}
    settings = {"dtype": "float32", "backend": "torch", "max_model_len": 64, "max_num_seqs": 8, "memory": "8MiB"}
    llm = LLM(llama, optimize=False, **{**settings, **LORA, **named})
    single, slots = llm.engine.extension("adapters").steps._plan_single, list[int]()

    def plan_single(planned: torch.Tensor, slot: int) -> None:
        assert set(planned.tolist()) <= {slot, -1}
        slots.append(slot)
        single(planned, slot)

    monkeypatch.setattr(llm.engine.extension("adapters").steps, "_plan_single", plan_single)
    check(llm, oracle, ["plain", "stabilised"], length=3)
    assert slots == []
    check(llm, oracle, ["stabilised", None], length=3)
    check(llm, oracle, ["plain"], length=3)
    assert slots == [1, 1, 1, 0, 0, 0]
    check(llm, oracle, ["queries", None, "queries"], length=3)  # in the slot of the one that was used least recently
    check(llm, oracle, ["plain", "queries", None], length=3)
    assert slots[6:] == [1, 1, 1]


@pytest.mark.slow
def test_a_family_without_embeddings_and_room_takes_adapters_on_its_linear_layers(llama, oracle):
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the plugin's kernels are interpreted here")
    inline = [INLINE.replace("narrow_lora", name) for name in ("plain_family", "interpreted_lora")]
    settings = {"dtype": "float32", "backend": "torch", "max_model_len": 64, "max_num_seqs": 4, "memory": "8MiB"}
    named = {"lora.name": "interpreted_lora", "plugins.inline": inline, "plugins.block": ("transformers_decoder",)}
    llm = LLM(llama, optimize=False, **{**settings, **LORA, **named})
    assert "plain_decoder" in llm.plan.explain()
    check(llm, oracle, ["plain", None], length=3)
    check(llm, oracle, ["plain", "stabilised", None], length=3)
    with pytest.raises(ConfigError, match=r"the model has no embed_tokens to adapt"):
        LLM(llama, optimize=False, **{**settings, **LORA, **named, "lora.target_modules": ("embed_tokens",)})


def test_an_embedding_is_refused_with_the_key_that_allows_it(engine, embedded):
    with pytest.raises(RequestError, match=r"(embed_tokens|lm_head)\.\S+ belongs to no module") as error:
        engine().add_lora(embedded.request("embedding"))
    assert "lora.target_modules" in error.value.fix


def test_more_adapters_than_slots_swap_in_and_out_while_others_run(engine, oracle):
    llm = engine()
    loads = counted(llm, "load")
    check(llm, oracle, ["plain", "stabilised", "queries", None, "patterns", "plain", None, "queries", "stabilised"])
    assert len(loads) > 4
    assert llm.list_loras() == {1, 2, 3, 4}


def test_a_swap_reads_no_file_while_the_host_holds_the_adapter_and_the_one_used_least_recently_goes(
    engine, oracle, monkeypatch
):
    from slotline.plugins.lora import slots

    llm, read, original = engine(**{"lora.max_adapters": 1, "lora.max_cpu_adapters": 2}), list[str](), slots.read

    def noted(path: str, *rest: Any) -> Any:
        read.append(Path(path).name)
        return original(path, *rest)

    monkeypatch.setattr(slots, "read", noted)
    for name in ("plain", "stabilised", "plain", "queries", "plain", "stabilised"):
        check(llm, oracle, [name], length=2)
    assert read == ["plain", "stabilised", "queries", "stabilised"]


@pytest.mark.parametrize(("drafts", "most"), [({}, 32), ({"drafter.name": "ngram", "drafter.tokens": 3}, 128)])
def test_a_plugin_has_room_for_every_captured_batch_even_above_the_budget(drafts, most, engine):
    llm = engine(**drafts, max_num_batched_tokens=16, max_num_seqs=32)
    assert llm.engine.extension("adapters")._lora.context.max_tokens == most


def test_an_adapter_waits_for_a_slot_without_being_passed_and_base_requests_go_on(engine, oracle):
    llm = engine(**{"lora.max_adapters": 1})
    names = ["plain", "stabilised", "plain", None]
    prompts = prompts_of(4)
    for i, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        llm.engine.add(str(i), prompt["prompt_token_ids"][:4], greedy(3), lora_request=oracle.request(name))
    llm.engine.step()
    joined = [request.request_id for request in llm.engine.scheduler.running]
    assert joined == ["0", "3"]
    order = []
    while llm.engine.has_work:
        order += [request.request_id for request in llm.engine.step().finished]
    assert order.index("1") < order.index("2")


def test_preempted_requests_keep_their_adapters(engine, oracle):
    llm = engine(memory="160KiB", max_num_seqs=6)
    check(llm, oracle, ["plain", "stabilised", None, "plain", "stabilised", None], length=20)
    preempted = llm.engine
    assert preempted.rows.num_free == 6


def test_prefixes_are_shared_under_one_adapter_and_with_no_other(engine, oracle):
    llm = engine()
    prompt = prompts_of(2)[1]

    def hit(name: str | None) -> int:
        (output,) = llm.generate(prompt, greedy(2), lora_request=oracle.request(name))
        wanted = oracle.greedy(name, prompt["prompt_token_ids"], 2)
        assert list(output.outputs[0].token_ids) == wanted
        return output.metrics.num_cached_tokens

    assert [hit("plain"), hit("plain"), hit(None), hit("stabilised"), hit("stabilised"), hit(None)] == [
        0,
        32,
        0,
        0,
        32,
        32,
    ]


@pytest.mark.parametrize("drafter", ["ngram", "foreseeing"])
def test_drafts_are_verified_with_the_adapter(drafter, engine, oracle):
    inline = f"{SUPPORT / 'device_drafter.py'}:Foreseeing"  # steps overlap beside this one
    more = {"plugins.inline": (inline,), "scheduler.async": True} if drafter == "foreseeing" else {}
    llm = engine(**{"drafter.name": drafter, "drafter.tokens": 3}, **more)
    check(llm, oracle, ["plain", None, "stabilised", "plain"], length=12)
    assert llm.engine.extension("drafts").drafting.counts.proposed > 0
    assert any("guesses without adapters" in note for note in llm.engine.notes)


def test_the_adapters_of_a_run_are_added_listed_pinned_and_removed(engine, oracle):
    llm = engine()
    assert llm.list_loras() == set()
    assert llm.add_lora(oracle.request("plain"))
    assert not llm.add_lora(oracle.request("plain"))
    assert llm.pin_lora(1)
    loads = counted(llm, "load")
    check(llm, oracle, ["stabilised", "queries", "patterns", "plain"], length=2)
    assert "plain" not in loads
    assert llm.list_loras() == {1, 2, 3, 4}
    assert llm.remove_lora(1)
    assert not llm.remove_lora(1)
    assert llm.list_loras() == {2, 3, 4}
    by_name = llm.generate(prompts_of(1), greedy(4), lora_request="stabilised")
    assert list(by_name[0].outputs[0].token_ids) == oracle.greedy("stabilised", prompts_of(1)[0]["prompt_token_ids"], 4)


def test_the_last_slot_is_not_pinned_and_an_adapter_in_use_is_not_removed(engine, oracle):
    llm = engine()
    llm.add_lora(oracle.request("plain"))
    llm.add_lora(oracle.request("stabilised"))
    llm.pin_lora(1)
    with pytest.raises(RequestError, match=r"'stabilised' would be pinned in the last of 2 slots"):
        llm.pin_lora(2)
    with pytest.raises(RequestError, match="no adapter 7"):
        llm.pin_lora(7)
    llm.engine.add("r", [3, 4], SamplingParams(max_tokens=2), lora_request=oracle.request("plain"))
    with pytest.raises(RequestError, match="'plain' is in use by 1 requests"):
        llm.remove_lora(1)
    llm.engine.abort("r")
    assert llm.remove_lora(1)


@pytest.mark.parametrize("merge", [False, True])
def test_a_request_that_a_later_extension_refuses_uses_no_adapter(engine, oracle, merge):
    refuses = {"plugins.inline": (f"{SUPPORT / 'extension_plugins.py'}:refuses",), "extensions.refuses": {}}
    llm = engine(**{"lora.merge": merge, **refuses})
    unlucky = SamplingParams(max_tokens=2, seed=13)
    with pytest.raises(RequestError, match="seed=13 is unlucky"):
        llm.engine.add("r", [3, 4], unlucky, lora_request=oracle.request("plain"))
    assert not llm.engine.requests
    assert llm.remove_lora(1)


def test_adapters_beyond_the_host_s_limit_are_forgotten_unless_a_request_needs_them(engine, oracle):
    llm = engine(**{"lora.max_cpu_adapters": 2})
    check(llm, oracle, ["plain", "stabilised", "queries", "patterns"], length=2)
    llm.add_lora(oracle.request("plain"))
    assert len(llm.list_loras()) == 2
    assert 1 in llm.list_loras()


def test_adapters_named_in_the_file_are_loaded_at_the_start(llama, oracle, tmp_path):
    shutil.copytree(oracle.folder / "plain", tmp_path / "adapters" / "style")
    (tmp_path / "run.toml").write_text(
        f'model = "{llama}"\ndtype = "float32"\n[attention]\nbackend = "torch"\n[scheduler]\nmax_model_len = 64\n'
        '[cache]\nmemory = "4MiB"\n[lora]\nname = "torch"\n[lora.adapters]\nstyle = "adapters/style"\n'
    )
    llm = LLM(tmp_path / "run.toml", **{"observability.progress": False})
    assert llm.list_loras() == {1}
    (output,) = llm.generate([[5, 6, 7]], greedy(4), lora_request="style")
    assert list(output.outputs[0].token_ids) == oracle.greedy("plain", [5, 6, 7], 4)
    text = llm.plan.explain()
    assert "lora" in text
    assert "run.toml" in text


def test_layers_are_hooked_once_for_all_steps_in_a_row_with_adapters(engine, oracle, monkeypatch):
    llm, hooked = engine(), list[torch.nn.Module]()
    register = torch.nn.Module.register_forward_hook

    def noted(module: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        hooked.append(module)
        return register(module, *arguments, **options)

    monkeypatch.setattr(torch.nn.Module, "register_forward_hook", noted)
    params, prompts = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), random_prompts([9])
    for name in (None, "plain", None, "plain"):  # without adapters they are taken off
        hooked.clear()
        llm.generate(prompts, params, lora_request=oracle.request(name))
        assert len(hooked) == len(set(hooked))
        assert bool(hooked) == (name is not None)


def test_beams_of_a_prompt_use_its_adapter(engine, oracle):
    llm = engine()
    prompts = prompts_of(2)
    params = BeamSearchParams(beam_width=1, max_tokens=4)
    outputs = llm.beam_search(prompts, params, lora_request=[oracle.request("plain"), None])
    for prompt, name, output in zip(prompts, ("plain", None), outputs, strict=True):
        tokens = prompt["prompt_token_ids"]
        assert output.sequences[0].tokens == tokens + oracle.greedy(name, tokens, 4)


def test_a_stream_uses_its_adapter(tiny, tmp_path):
    path = tiny("llama")
    oracle = PeftOracle(path, tmp_path, {"first": {}})
    llm = LLM(path, dtype="float32", max_model_len=64, memory="4MiB", **LORA)
    streamed = list(llm.stream({"prompt_token_ids": [5, 6, 7]}, greedy(4), lora_request=oracle.request("first")))
    assert list(streamed[-1].outputs[0].token_ids) == oracle.greedy("first", [5, 6, 7], 4)


@pytest.mark.behaviour(137)
def test_made_up_steps_use_every_slot_or_none_and_leave_the_slots_as_they_were(engine, oracle):
    llm = engine()
    gatherer, runner = llm.engine.gatherer, llm.engine.runner
    check(llm, oracle, ["plain"], length=2)
    inputs = made_up_inputs(gatherer, [3, 2], variant=AdapterUse.MANY)
    assert inputs.extras["adapters"].slots.tolist() == [0, 1, 0, 1, 0]
    assert made_up_inputs(gatherer, [3, 2]).extras["adapters"] is None
    padded = made_up_inputs(
        gatherer, [1, 1, 1], shape=GraphShape(4, 1, variant=AdapterUse.MANY), variant=AdapterUse.MANY
    )
    assert padded.extras["adapters"].slots.tolist() == [0, 1, 0, -1]
    assert padded.extras["adapters"].single_slot is None
    single = made_up_inputs(gatherer, [1, 1, 1], shape=GraphShape(4, 1, variant=AdapterUse.ONE), variant=AdapterUse.ONE)
    found = single.extras["adapters"]
    assert (found.slots.tolist(), found.single_slot) == ([0, 0, 0, -1], 0)
    runner.run(inputs)
    runner.run(made_up_inputs(gatherer, [3, 2]))
    assert llm.list_loras() == {1}
    check(llm, oracle, ["plain", None], length=4)


NONE, ONE, MANY = AdapterUse


@pytest.mark.behaviour(146)
@pytest.mark.parametrize(
    ("captured", "taken"),
    [
        ((NONE, MANY), (NONE, MANY, MANY)),
        ((NONE, ONE, MANY), (NONE, ONE, MANY)),
        ((MANY,), (MANY, MANY, MANY)),
        ((NONE,), (NONE, None, None)),
    ],
    ids=str,
)
def test_a_step_takes_the_graphs_that_its_adapters_allow(captured, taken):
    shapes = GraphDispatcher(
        {"decode": "full"}, (1, 2, 4), query_len=1, max_requests=4, max_tokens=16, variants=lambda _: captured
    )
    assert {shape.variant for shape in shapes.largest_first} == set(captured)
    assert len(shapes.largest_first) == 3 * len(captured)
    one = np.ones(3, np.int64)
    schedule = SchedulerOutput(rows=np.arange(3), num_scheduled=one, num_computed=one, num_tokens=3, num_decodes=3)
    found = [shapes.shape_for(schedule, variant=use) for use in AdapterUse]
    assert found == [None if use is None else GraphShape(4, 1, variant=use) for use in taken]


# --- over pipeline stages, each with a plugin of its own


def test_stages_give_their_own_layers_shares_and_an_adapter_swaps_in_all_of_them(engine, tiny, tmp_path):
    embedded = PeftOracle(tiny("llama_deep"), tmp_path, EMBEDDINGS)
    llm = engine(tiny("llama_deep"), **EMBEDDED, max_num_batched_tokens=16, **{"parallel.pipeline": ("cpu",) * 3})
    parts = llm.engine.extension("adapters")._lora._parts
    layers = [{path.split(".")[2] for path in part.lora.context.modules if ".layers." in path} for part in parts]
    assert set.union(*layers) == set("0123")
    assert sum(map(len, layers)) == 4
    assert ["embed" in str(part.lora.context.modules) for part in parts] == [True, False, False]
    assert ["lm_head" in part.lora.context.modules for part in parts] == [False, False, True]
    check(llm, embedded, ["embedding", None, "both", "queries", "embedding"])  # of three adapters in two slots
    check_scores(llm, embedded, ["both", None, "embedding"])
    for part in parts:
        for shares in part.lora._shares.values():
            assert shares.keys() <= part.lora.context.modules.keys()


@pytest.mark.slow
def test_products_over_stages_are_extended_and_planned_for_one_adapter(tiny, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from slotline.plugins.lora.segmented import plugin

    if torch.cuda.is_available():
        pytest.skip("the plugin's kernels are interpreted here")
    monkeypatch.setattr(plugin, "MOST_EXTENDED", 100)
    named = {"lora.name": "interpreted_lora", "plugins.inline": (str(INLINE).replace("narrow", "interpreted"),)}
    settings = {"dtype": "float32", "backend": "torch", "max_model_len": 64, "max_num_seqs": 4, "memory": "8MiB"}
    oracle = PeftOracle(tiny("llama_deep"), tmp_path, ADAPTERS)
    llm = LLM(tiny("llama_deep"), optimize=False, **{**settings, **LORA, **named, "parallel.pipeline": ("cpu",) * 2})
    expanded = expansions(llm)
    check(llm, oracle, ["plain", "stabilised", None], length=3)
    check(llm, oracle, ["stabilised", None], length=3)
    assert len(set(expanded)) == 28
    assert [part.lora._places for part in llm.engine.extension("adapters")._lora._parts] == [[1, 0], [1, 0]]


def test_an_adapter_that_a_later_stage_refuses_is_in_none(engine, oracle, monkeypatch):
    llm = engine(**{"parallel.pipeline": ("cpu",) * 2})
    first, last = (part.lora for part in llm.engine.extension("adapters")._lora._parts)

    def refuses(name: str, path: str) -> int:
        raise RequestError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(last, "load", refuses)
        with pytest.raises(RequestError, match="no room"):
            llm.add_lora(oracle.request("plain"))
    assert first._slots == last._slots == {}
    assert llm.list_loras() == set()
    check(llm, oracle, ["plain", None], length=3)


def test_an_adapter_is_merged_over_stages(engine, embedded):
    llm = engine(**EMBEDDED, **{"lora.merge": True, "parallel.pipeline": ("cpu",) * 2})
    check(llm, embedded, ["both"])
    assert llm.remove_lora(embedded.request("both").lora_int_id)
    check(llm, embedded, [None])


def replaced_in_place(folder: Path, factor: float) -> None:
    """Write other weights into an adapter's file; its size and its time of change stay as they were."""
    file = folder / "adapter_model.safetensors"
    before = file.stat()
    tensors = {name: x * factor if "lora_B" in name else x for name, x in load_file(file).items()}
    file.write_bytes(save(tensors, {"format": "pt"}))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("way", ["removed", "removed before it had a slot", "pushed out", "merged", "over stages"])
@pytest.mark.parametrize("blind", [False, True], ids=["by inode", "by nothing but the removal"])
def test_an_adapter_that_is_loaded_again_from_files_of_equal_size_and_time_has_the_new_weights(
    way, blind, engine, oracle, tmp_path, monkeypatch
):
    if blind:  # as on a file system that keeps no times of inodes
        monkeypatch.setattr("slotline.plugins.lora.slots.signature", lambda path: ())
        monkeypatch.setattr("slotline.plugins.lora.manager.slot_manager.files_of", lambda request: "")
    shutil.copytree(oracle.folder / "plain", tmp_path / "mine")
    mine = LoRARequest("mine", 9, str(tmp_path / "mine"))
    settings = {"merged": {"lora.merge": True}, "over stages": {"parallel.pipeline": ("cpu",) * 2}}.get(way, {})
    if way == "pushed out":
        settings = {"lora.max_adapters": 1, "lora.max_cpu_adapters": 1}
    llm, prompt = engine(**settings), prompts_of(2)[1]

    def text(request: LoRARequest) -> tuple[list[int], int]:
        (output,) = llm.generate(prompt, greedy(6), lora_request=request)
        return list(output.outputs[0].token_ids), output.metrics.num_cached_tokens

    def let_go() -> None:
        if way == "pushed out":
            for name in ("queries", "stabilised"):
                llm.generate(prompt, greedy(1), lora_request=oracle.request(name))
            assert 9 not in llm.list_loras()
        else:
            assert llm.remove_lora(9)

    if way == "removed before it had a slot":
        llm.add_lora(mine)
        llm.remove_lora(9)
    old, _ = text(mine)
    let_go()
    replaced_in_place(tmp_path / "mine", -4)
    new, cached = text(mine)
    assert cached == 0
    let_go()
    shutil.copytree(tmp_path / "mine", tmp_path / "elsewhere")
    assert new == text(LoRARequest("elsewhere", 10, str(tmp_path / "elsewhere")))[0] != old
    llm.remove_lora(10)
    if way == "merged":
        assert text(None)[0] == oracle.greedy(None, prompt["prompt_token_ids"], 6)


def test_files_replaced_with_equal_size_and_time_before_a_swap_fail_their_request(engine, oracle, tmp_path):
    shutil.copytree(oracle.folder / "plain", tmp_path / "mine")
    llm, mine = engine(**{"lora.max_adapters": 1}), LoRARequest("mine", 9, str(tmp_path / "mine"))
    llm.add_lora(mine)
    check(llm, oracle, ["queries"], length=2)
    replaced_in_place(tmp_path / "mine", -4)
    (output,) = llm.generate(prompts_of(1), greedy(3), lora_request=mine)
    assert output.outputs[0].finish_reason == "error"
    assert "no longer those of its first use" in output.outputs[0].stop_reason


# --- one adapter in the weights


@pytest.mark.parametrize("optimize", [False, True], ids=["plain", "passes"])
def test_one_adapter_is_merged_into_the_weights_and_taken_out_again(engine, oracle, optimize):
    llm = engine(optimize=optimize, **{"lora.merge": True})
    check(llm, oracle, [None, None], length=4)
    check(llm, oracle, ["patterns", "patterns"])
    with pytest.raises(RequestError, match="the weights hold 'patterns'"):
        llm.generate([[3, 4]], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match=r"the weights hold 'patterns', and lora.merge = true"):
        llm.generate([[3, 4]], SamplingParams(max_tokens=1), lora_request=oracle.request("plain"))
    llm.reload_weights()
    check(llm, oracle, ["patterns"])
    assert llm.remove_lora(4)
    check(llm, oracle, [None, None], length=4)
    check(llm, oracle, ["stabilised"])


def test_an_adapter_that_cannot_be_merged_again_is_not_taken_for_merged(engine, oracle, tmp_path):
    llm, folder = engine(**{"lora.merge": True}), tmp_path / "patterns"
    shutil.copytree(oracle.request("patterns").lora_path, folder)
    llm.generate(prompts_of(2), greedy(4), lora_request=LoRARequest("patterns", 4, folder))
    shutil.rmtree(folder)
    with pytest.raises(RequestError, match=r"cannot read adapter_config.json"):
        llm.reload_weights()
    assert llm.list_loras() == set()
    check(llm, oracle, [None, None], length=4)
    check(llm, oracle, ["stabilised"])


def test_a_merge_that_fails_half_way_leaves_the_base_weights(engine, oracle, monkeypatch):
    llm, left = engine(**{"lora.merge": True}), 3
    model = llm.engine.runner.model
    add_to_weight = model.add_to_weight

    def fails(name: str, delta: torch.Tensor) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("out of memory")
        add_to_weight(name, delta)

    monkeypatch.setattr(model, "add_to_weight", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.add_lora(oracle.request("patterns"))
    assert left == 0
    assert llm.list_loras() == set()
    check(llm, oracle, [None, None], length=4)
    check(llm, oracle, ["stabilised"])


# --- what is refused


def changed(folder: Path, to: Path, **settings: Any) -> Path:
    """A copy of an adapter with another configuration."""
    shutil.copytree(folder, to)
    config = json.loads((to / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    return to


def without_matrices(folder: Path, to: Path) -> Path:
    """A copy of an adapter whose file of weights holds none."""
    shutil.copytree(folder, to)
    save_file({}, to / "adapter_model.safetensors")
    return to


FAULTS: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "missing": (lambda folder, to: to / "nothing", "cannot read adapter_config.json"),
    "dora": (lambda folder, to: changed(folder, to / "x", use_dora=True), "use_dora = True is not supported: DoRA"),
    "rank": (lambda folder, to: changed(folder, to / "x", r=64), "rank 64 .* above the highest, 8"),
    "bias": (lambda folder, to: changed(folder, to / "x", bias="all"), "biases are not adapted"),
    "modules": (lambda folder, to: changed(folder, to / "x", modules_to_save=["lm_head"]), "modules_to_save"),
    "an alpha that is no number": (
        lambda folder, to: changed(folder, to / "x", lora_alpha=float("nan")),
        "alpha = nan",
    ),
    "an infinite alpha": (
        lambda folder, to: changed(folder, to / "x", alpha_pattern={"q_proj": float("inf")}),
        "alpha_pattern has inf for 'q_proj'",
    ),
    "a rank that is no number": (
        lambda folder, to: changed(folder, to / "x", rank_pattern={"q_proj": "four"}),
        "rank_pattern has 'four' for 'q_proj'",
    ),
    "patterns that are none": (lambda folder, to: changed(folder, to / "x", rank_pattern=[4]), r"rank_pattern = \[4\]"),
    "a wrong pattern": (lambda folder, to: changed(folder, to / "x", rank_pattern={"(": 4}), "rank_pattern has '\\('"),
    "other weights": (
        lambda folder, to: changed(folder, to / "x", init_lora_weights="pissa_niter_4"),
        "init_lora_weights = 'pissa_niter_4': the adapter belongs to weights that PEFT changes",
    ),
    "blocks": (lambda folder, to: changed(folder, to / "x", use_bdlora={"nblocks": 2}), "use_bdlora"),
    "nothing": (lambda folder, to: without_matrices(folder, to / "x"), "has no matrices of an adapter"),
    "other kind": (lambda folder, to: changed(folder, to / "x", peft_type="IA3"), "IA3"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_adapter_that_cannot_be_held_fails_its_request_and_nothing_else(fault, engine, oracle, tmp_path):
    llm, (make, message) = engine(), FAULTS[fault]
    path = make(oracle.folder / "plain", tmp_path)
    llm.engine.add("other", [3, 4], SamplingParams(max_tokens=3))
    llm.engine.step()
    with pytest.raises(RequestError, match=message):
        llm.engine.add("bad", [3, 4], SamplingParams(max_tokens=3), lora_request=LoRARequest("bad", 9, str(path)))
    while llm.engine.has_work:
        finished = llm.engine.step().finished
    assert [(request.request_id, request.finish_reason) for request in finished] == [("other", "length")]
    assert llm.list_loras() == set()
    check(llm, oracle, ["plain", None], length=3)


def test_an_adapter_of_another_model_is_refused_with_the_shapes(engine, tiny, tmp_path):
    wide = PeftOracle(tiny("llama_deep", hidden_size=128), tmp_path, {"wide": {}})
    with pytest.raises(RequestError, match=r"has the shapes .*\(128, 4\)}, wanted .*\(64, 4\)}"):
        engine(tiny("llama_deep")).add_lora(wide.request("wide"))
    other = PeftOracle(tiny("starcoder2"), tmp_path / "s", {"code": {}})
    with pytest.raises(RequestError, match=r"no module that may carry an adapter; those are q_proj \(4\)"):
        engine(tiny("llama_deep")).add_lora(other.request("code"))


def test_the_output_projection_is_refused_with_the_key_that_allows_it(engine, oracle):
    with pytest.raises(RequestError, match=r"lm_head.* belongs to no module .*\n.*lora.target_modules"):
        engine().add_lora(oracle.request("head"))


def test_names_and_numbers_are_kept_apart(engine, oracle):
    llm = engine()
    llm.add_lora(oracle.request("plain"))
    with pytest.raises(RequestError, match="lora_int_id=1 is 'plain'"):
        llm.add_lora(LoRARequest("other", 1, str(oracle.folder / "queries")))
    with pytest.raises(RequestError, match="'plain' is known as number 1"):
        llm.add_lora(LoRARequest("plain", 2, str(oracle.folder / "queries")))
    with pytest.raises(RequestError, match=r"'plain' is no adapter"):
        llm.add_lora("plain")
    with pytest.raises(RequestError, match=r"lora_int_id=0 is not allowed"):
        LoRARequest("a", 0, "somewhere")
    with pytest.raises(RequestError, match="there is no adapter 'unknown'"):
        llm.generate([[3]], lora_request="unknown")
    with pytest.raises(RequestError, match="2 adapters for 1 prompts"):
        llm.generate([[3]], lora_request=[None, None])


def test_files_that_vanish_or_change_before_a_swap_fail_their_request_alone(engine, oracle, tmp_path):
    shutil.copytree(oracle.folder / "plain", tmp_path / "mine")
    llm, mine = engine(**{"lora.max_adapters": 1}), LoRARequest("mine", 9, str(tmp_path / "mine"))
    llm.add_lora(mine)
    check(llm, oracle, ["queries"], length=2)
    changed(oracle.folder / "stabilised", tmp_path / "new")
    shutil.copy(tmp_path / "new" / "adapter_model.safetensors", tmp_path / "mine" / "adapter_model.safetensors")
    prompts = prompts_of(2)
    outputs = llm.generate(prompts, greedy(3), lora_request=[mine, None])
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "no longer those of its first use" in outputs[0].outputs[0].stop_reason
    assert list(outputs[1].outputs[0].token_ids) == oracle.greedy(None, prompts[1]["prompt_token_ids"], 3)
    check(llm, oracle, ["plain", "queries"], length=2)


def test_a_configuration_that_cannot_hold_is_refused(llama, tiny):
    with pytest.raises(NegotiationError, match="without a LoRA plugin"):
        LLM(llama, **{"lora.adapters": {"a": "b"}})
    narrow = {"lora.name": "narrow_lora", "plugins.inline": (INLINE,)}
    with pytest.raises(NegotiationError, match=r"'narrow_lora' cannot be used: .*batch_invariant"):
        LLM(llama, batch_invariant=True, **narrow)
    plain = {
        "plugins.inline": (INLINE.replace("narrow_lora", "plain_family"),),
        "plugins.block": ("transformers_decoder",),
    }
    for others, lacks in ((narrow, "staged"), ({"lora.name": "torch", **plain}, "'plain_decoder'.*staged_adapters")):
        with pytest.raises(NegotiationError, match=rf"{lacks}.*") as refused:
            LLM(llama, **others, **{"parallel.pipeline": ("cpu",) * 2})
        assert "2 pipeline stages" in str(refused.value)
    with pytest.raises(NegotiationError, match="N134"):
        LLM(llama, **narrow, **{"lora.max_rank": 512})
    with pytest.raises(ConfigError, match=r"the model has no x_proj to adapt"):
        LLM(llama, memory="4MiB", max_model_len=64, **{"lora.name": "torch", "lora.target_modules": ("x_proj",)})
    with pytest.raises(RequestError, match="an engine without adapters"):
        LLM(llama, memory="4MiB", max_model_len=64).generate([[3]], lora_request=LoRARequest("a", 1, "b"))


INLINE = f"{SUPPORT / 'narrow_lora.py'}:descriptor"


def counted(llm: LLM, method: str) -> list[str]:
    """The adapters for which the plugin's method is called from now on."""
    plugin, names = llm.engine.extension("adapters")._lora, list[str]()
    original = type(plugin).load

    def call(name: str, *rest: Any) -> Any:
        names.append(name)
        return original(plugin, name, *rest)

    setattr(plugin, method, call)
    return names
