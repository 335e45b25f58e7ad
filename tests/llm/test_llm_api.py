"""`LLM` as its users meet it: every form of prompt, every kind of mistake, and that mistakes leave nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pluggy
import pytest
import tiny_models
import torch
from engine_driver import GREEDY, add, random_prompts, run_all, tokens_of
from tiny_engines import DEFAULTS, everything_returned

from slotline.builder.sizing import size_pool
from slotline.core import LLM, SamplingParams
from slotline.core.batch.request import Status
from slotline.core.device.transfer_buffer import CpuTransferBuffer, reserved_bytes
from slotline.core.engine.engine import Engine
from slotline.core.scheduler.integrity import check_integrity
from slotline.registry import hookimpl
from slotline.registry.engine_reports import DeviceMemory
from slotline.registry.errors import (
    CapacityError,
    ConfigError,
    IntegrityError,
    ModelError,
    NegotiationError,
    PluginNotFoundError,
    RequestError,
    SlotlineError,
)
from slotline.registry.hooks import HookHost

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def llm(tiny: Tiny, engines: Engines) -> LLM:
    return engines(tiny("llama"))


# ---- prompts


def test_a_prompt_may_be_text_tokens_an_array_or_a_mapping(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("def main(")
    forms: list[Any] = [
        "def main(",
        tokens,
        tuple(tokens),
        np.array(tokens),
        {"prompt": "def main("},
        {"prompt_token_ids": tokens},
        {"prompt": "shown", "prompt_token_ids": tokens, "request_id": "mine", "cache_salt": "s", "priority": 0},
    ]
    alone = [llm.generate(form, SHORT)[0] for form in forms]
    together = llm.generate(forms, SHORT)
    assert {tuple(o.outputs[0].token_ids) for o in [*alone, *together]} == {tuple(alone[0].outputs[0].token_ids)}
    assert {tuple(o.prompt_token_ids) for o in together} == {tuple(tokens)}
    assert [o.prompt for o in together] == ["def main(", None, None, None, "def main(", None, "shown"]
    assert together[-1].request_id == "mine"
    assert all(o.finished for o in together)


def test_outputs_come_in_the_order_of_the_prompts_and_take_their_own_parameters(llm: LLM) -> None:
    prompts = random_prompts([9, 3, 30, 1])
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (7, 2, 5, 1)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [7, 2, 5, 1]
    assert len({o.request_id for o in outputs}) == 4


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_id_is_given_back_whatever_the_number_of_outputs(llm: LLM, n: int) -> None:
    prompt = {"prompt_token_ids": [5, 6], "request_id": "mine"}
    (output,) = llm.generate(prompt, SamplingParams(n=n, max_tokens=2, ignore_eos=True))
    assert output.request_id == "mine"
    assert [o.index for o in output.outputs] == list(range(n))


def test_without_parameters_the_fields_defaults_hold(llm: LLM) -> None:
    (output,) = llm.generate("def main(")
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_greedy_outputs_of_one_prompt_are_equal(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6]], SamplingParams(n=2, temperature=0, max_tokens=4, ignore_eos=True))
    assert output.outputs[0].token_ids == output.outputs[1].token_ids


def test_chat_uses_the_template_of_the_tokenizer() -> None:
    llm = LLM(**{**DEFAULTS, "max_model_len": 128})
    messages = [{"role": "user", "content": "Return the sum."}]
    (output,) = llm.chat(messages, SHORT)
    text = llm.tokenizer.decode(output.prompt_token_ids)
    assert text.endswith("<|im_start|>assistant\n")
    assert "Return the sum." in text
    two = llm.chat([messages, [{"role": "user", "content": "Other"}]], SHORT)
    assert two[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert two[1].prompt_token_ids != two[0].prompt_token_ids


def test_a_tokenizer_without_template_cannot_chat_and_says_so(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"no chat template[\s\S]*generate\(\)"):
        llm.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(RequestError, match="no messages"):
        llm.chat([])


def test_metrics_tell_times_and_counts(llm: LLM) -> None:
    (prompt,) = random_prompts([40], seed=60)
    llm.generate([prompt], SHORT)
    metrics = llm.generate([prompt], SHORT)[0].metrics
    assert metrics.time_to_first_token is not None
    assert metrics.time_in_all is not None
    assert 0 < metrics.time_to_first_token <= metrics.time_in_all
    assert (metrics.num_cached_tokens, metrics.num_preemptions, metrics.num_nans) == (32, 0, 0)


# ---- requests that are wrong


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "too long": ([5] * 64, r"64 tokens[\s\S]*max_model_len=64"),
    "empty text": ("", "empty"),
    "no prompts": ([], "no prompt"),
    "empty tokens": ([[]], "empty"),
    "token out of range": ([5, 384], r"384[\s\S]*vocabulary of 384"),
    "negative token": ([[5, -1]], "-1"),
    "fractions": ([[1.5, 2.5]], "1.5"),
    "words in a list of tokens": ([["a", "b"]], "'a'"),
    "a number": (5, "5"),
    "nothing": (None, "None"),
    "a list of nothing": ([None], "None"),
    "unknown key": ({"promt": "x"}, "promt"),
    "text that is none": ({"prompt": 7}, "7"),
    "priority without the policy": ({"prompt_token_ids": [5], "priority": 3}, r"priority=3[\s\S]*scheduler.policy"),
    "priority of the wrong type": ({"prompt_token_ids": [5], "priority": "high"}, "high"),
    "salt of the wrong type": ({"prompt_token_ids": [5], "cache_salt": 3}, "cache_salt=3"),
    "priority that is none": ({"prompt_token_ids": [5], "priority": None}, "priority=None"),
    "id of the wrong type": ({"prompt_token_ids": [5], "request_id": [7]}, r"request_id=\[7\]"),
    "keys of two types": ({5: 1, "prompt": "x"}, "5, 'prompt'"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_by_name_and_the_next_request_is_served(name: str, llm: LLM) -> None:
    prompt, message = BAD_PROMPTS[name]
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(prompt, SHORT)
    assert caught.value.fix
    everything_returned(llm)
    assert len(tokens_of(llm, [[5, 6, 7]], SHORT)[0]) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"temperature": None},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"top_k": 1.0},
        {"min_p": -0.1},
        {"min_p": 2},
        {"n": 0},
        {"n": 10**6},
        {"top_k": 2**70},
        {"min_tokens": -(2**70)},
        {"temperature": True},
        {"temperature": 10**400},
        {"temperature": 1e39},
        {"top_p": True},
        {"presence_penalty": True},
        {"repetition_penalty": 1e39},
        {"repetition_penalty": 1e-50},
        {"guidance_scale": 1e39},
        {"presence_penalty": 3},
        {"frequency_penalty": -2.5},
        {"repetition_penalty": 0},
        {"seed": 2**63},
        {"seed": "x"},
        {"stop": [""]},
        {"stop": 5},
        {"stop": [5]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": 5},
        {"stop_token_ids": ["a"]},
        {"min_tokens": -1},
        {"logprobs": -1},
        {"prompt_logprobs": "all"},
        {"logit_bias": [1, 2]},
        {"extra_args": "x"},
    ],
    ids=str,
)
def test_a_bad_sampling_parameter_is_refused_with_its_name_and_value(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong)
    assert name in str(caught.value)
    assert (repr(value[0]) if isinstance(value, list) else repr(value)[:80]) in str(caught.value)
    assert caught.value.fix


def test_extra_arguments_cannot_replace_checked_parameters() -> None:
    with pytest.raises(RequestError, match=r"'presence_penalty'[\s\S]*SamplingParams\(presence_penalty="):
        SamplingParams(extra_args={"presence_penalty": 100})


def test_a_minimum_above_the_maximum_is_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens=5 is above max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 21}, r"logprobs=21[\s\S]*sampling.max_logprobs"),
        ({"prompt_logprobs": 50}, "prompt_logprobs=50"),
        ({"logit_bias": {384: 1.0}}, "384"),
        ({"logit_bias": {"5": 1.0}}, "'5'"),
        ({"logit_bias": {5: 101.0}}, "101"),
        ({"logit_bias": {5: True}}, r"logit_bias\[5\]=True"),
        ({"logit_bias": {True: 5}}, "logit_bias names token True"),
        ({"stop_token_ids": [5, 384]}, r"stop_token_ids names token 384[\s\S]*0 to 383"),
        ({"min_tokens": 2000, "max_tokens": None}, r"min_tokens=2000 does not fit[\s\S]*max_model_len"),
        ({"extra_args": {"colour": 3}}, r"'colour'[\s\S]*logits_processors"),
    ],
)
def test_parameters_that_this_engine_cannot_honour_are_refused(params: dict[str, Any], message: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([[5]], SamplingParams(**params))
    everything_returned(llm)
    assert len(tokens_of(llm, [[5, 6, 7]], SHORT)[0]) == 4


def test_parameters_of_the_wrong_number_or_type_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling parameters for 3 prompts"):
        llm.generate([[5], [6], [7]], [SHORT, SHORT])
    for wrong in ({"temperature": 0}, ["greedy"], [None], 5):
        with pytest.raises(RequestError, match="SamplingParams"):
            llm.generate([[5]], wrong)  # type: ignore[arg-type]
    everything_returned(llm)


def test_one_bad_prompt_among_many_is_named_and_none_of_them_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompt 2: .*384"):
        llm.generate([[5], [6], [384], [7]], SHORT)
    everything_returned(llm)


def test_an_id_in_use_is_refused_and_free_again_afterwards(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [5], "request_id": "x"}] * 2
    with pytest.raises(RequestError, match="'x' is in use"):
        llm.generate(prompts, SHORT)
    everything_returned(llm)
    assert [llm.generate(prompts[0], SHORT)[0].request_id for _ in range(2)] == ["x", "x"]


def test_a_model_without_tokenizer_serves_tokens_and_refuses_text(tiny: Tiny, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny("llama"), tmp_path / "model"))
    for file in path.glob("tokenizer*"):
        file.unlink()
    llm = LLM(path, **DEFAULTS)
    assert llm.generate([[5, 6]], SHORT)[0].outputs[0].text == ""
    assert llm.generate([[5, 6]], SamplingParams(logprobs=2, max_tokens=2))[0].outputs[0].logprobs
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("text", SHORT)
    with pytest.raises(RequestError, match=r"needs a tokenizer[\s\S]*stop_token_ids"):
        llm.generate([[5]], SamplingParams(stop="x"))
    everything_returned(llm)


def test_without_chunked_prefill_a_prompt_longer_than_a_step_is_refused(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **{"scheduler.max_batched_tokens": 8, "scheduler.chunked_prefill": False})
    with pytest.raises(RequestError, match=r"9 tokens and a step takes 8[\s\S]*chunked_prefill"):
        llm.generate([[5] * 9], SHORT)
    assert len(tokens_of(llm, [[5] * 8], SHORT)[0]) == 4


# ---- configurations that are wrong


BAD_SETTINGS: dict[str, tuple[dict[str, Any], type[SlotlineError], str]] = {
    "unknown backend": ({"backend": "troch"}, PluginNotFoundError, r"troch[\s\S]*torch"),
    "impossible backend": ({"backend": "cpu", "cache.dtype": "float8_e5m2"}, NegotiationError, r"cpu[\s\S]*float8"),
    "unknown key": ({"scheduler.max_request": 3}, ConfigError, r"max_request[\s\S]*max_requests"),
    "wrong type": ({"max_model_len": "long"}, ConfigError, r"max_model_len[\s\S]*long"),
    "zero rows": ({"max_num_seqs": 0}, ConfigError, "max_requests"),
    "longer than the model": ({"max_model_len": 9999}, NegotiationError, r"9999[\s\S]*512"),
    "too little memory for one request": ({"memory": "32KiB"}, CapacityError, r"2 blocks[\s\S]*64 tokens needs 4"),
    "too little memory for one block": ({"memory": "1KiB"}, CapacityError, "one block takes 16384"),
    "size without unit": ({"memory": "12"}, ConfigError, "'12'"),
    "unknown device": ({"device": "tpu"}, ConfigError, "tpu"),
    "unknown processor": ({"logits_processors": {"penaltis": {}}}, ConfigError, r"penaltis[\s\S]*penalties"),
    "unknown mode": ({"sampling.logprobs_mode": "cooked"}, ConfigError, r"cooked[\s\S]*raw_logprobs"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_a_bad_setting_is_refused_with_its_value_and_a_way_out(name: str, tiny: Tiny) -> None:
    settings, kind, message = BAD_SETTINGS[name]
    with pytest.raises(kind, match=message):
        LLM(tiny("llama"), **{**DEFAULTS, **settings})


def test_a_named_backend_that_cannot_run_lists_every_reason(tiny: Tiny) -> None:
    settings = {"backend": "cpu", "dtype": "float16", "cache.dtype": "float8_e5m2"}
    with pytest.raises(NegotiationError) as caught:
        LLM(tiny("gpt_oss"), **{**DEFAULTS, **settings})
    assert caught.value.reasons
    for reason in caught.value.reasons:
        assert reason.code in str(caught.value)


def test_a_missing_broken_or_unknown_checkpoint_is_a_model_error(tiny: Tiny, tmp_path: Path) -> None:
    def attempt(path: Path, message: str) -> None:
        with pytest.raises(ModelError, match=message) as caught:
            LLM(**{**DEFAULTS, "model": str(path)})
        assert caught.value.fix

    attempt(tmp_path / "nowhere", "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    attempt(empty, "config.json")
    path = Path(shutil.copytree(tiny("llama"), tmp_path / "copy"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausaLM"]}))
    attempt(path, r"LlamaForCausaLM[\s\S]*LlamaForCausalLM")
    (path / "config.json").write_text("{")
    attempt(path, "JSON")
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").unlink()
    attempt(path, "copy")


# ---- what goes wrong in the middle


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, torch.OutOfMemoryError])
@pytest.mark.parametrize("part", ["forward", "sample", "gather"])
def test_an_interruption_in_a_step_leaves_no_request_behind(
    error: type[BaseException], part: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts([40, 3, 9], seed=70)
    expected, calls = tokens_of(llm, prompts), 0
    scope = llm.engine.profiler.scope

    def failing(name: str) -> Any:
        nonlocal calls
        calls += name == part
        if calls == 3:
            raise error("now")
        return scope(name)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.profiler, "scope", failing)
        with pytest.raises(CapacityError if error is torch.OutOfMemoryError else error):
            llm.generate(prompts, GREEDY)
    everything_returned(llm)
    assert tokens_of(llm, prompts) == expected


@pytest.mark.behaviour(31)
@pytest.mark.parametrize("status", [Status.WAITING, Status.RUNNING, Status.PREEMPTED])
def test_a_request_can_be_aborted_wherever_it_stands(status: Status, tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), block_size=4, memory="64KiB", max_num_seqs=2, **{"cache.prefix_caching": False})
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, presence_penalty=0.5)
    requests = [add(llm, name, prompt, long) for name, prompt in zip("abc", random_prompts([30, 26, 9]), strict=True)]
    for _ in range(200):
        llm.engine.step()
        if any(r.status is Status.PREEMPTED for r in requests):
            break
    victim = next(r for r in requests if r.status is status)
    sampled = len(llm.engine.rows.output_token_ids(victim.row)) if victim.row >= 0 else 0
    assert llm.engine.abort(victim.request_id) is victim
    assert llm.engine.abort(victim.request_id) is None
    assert (victim.finish_reason, len(victim.output_token_ids)) == ("abort", sampled)
    again = add(llm, victim.request_id, victim.prompt_token_ids, long)
    run_all(llm)
    assert {len(r.output_token_ids) for r in [*requests, again] if r is not victim} == {20}
    everything_returned(llm)


@pytest.mark.behaviour(89)
def test_a_step_without_requests_does_nothing(llm: LLM) -> None:
    result = llm.engine.step()
    assert len(result.rows) == len(result.token_ids) == len(result.finished) == 0


def test_priorities_decide_who_runs_first(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), max_num_seqs=1, **{"scheduler.policy": "priority"})
    for name, priority in (("last", 2), ("first", -1), ("second", 0)):
        add(llm, name, [5, 6], SHORT, priority=priority)
    ended = []
    while llm.engine.has_work:
        ended += [r.request_id for r in llm.engine.step().finished]
    assert ended == ["first", "second", "last"]


# ---- what can be seen


class _Reviewer:
    @hookimpl
    def slotline_review_plan(self) -> None:
        """Says nothing."""


def test_no_hook_is_called_between_two_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for kind in (pluggy._hooks.HookCaller, pluggy._hooks._SubsetHookCaller):
        original = kind.__call__

        def counted(self: Any, *, _original: Any = original, **arguments: Any) -> Any:
            if self.name.startswith("slotline_"):  # pytest has hooks of its own
                calls.append(self.name)
            return _original(self, **arguments)

        monkeypatch.setattr(kind, "__call__", counted)
    host = HookHost()
    host.add(_Reviewer(), "reviewer")
    host.review_plan(None, None)
    assert calls == ["slotline_review_plan"]  # a call would be seen
    everything = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=6, logprobs=1, presence_penalty=0.2, stop="zz")
    llm.generate(random_prompts([5, 30]), everything)
    list(llm.stream([5, 6], everything))
    assert calls == ["slotline_review_plan"]


@pytest.mark.behaviour(122)
def test_the_parts_of_a_step_are_timed_when_asked_for(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **{"observability.profile": True})
    profiler = llm.engine.profiler
    profiler.reset()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        llm.generate([[5, 6, 7]], SHORT)
    scopes = {"schedule", "gather", "plan", "forward", "logits", "process", "sample", "output", "wait", "hand_out"}
    assert set(profiler.counts) == scopes
    assert set(profiler.counts.values()) == {4}
    assert all(seconds > 0 for seconds in profiler.seconds.values())
    assert {f"slotline.{name}" for name in scopes} <= {event.key for event in trace.key_averages()}


@pytest.mark.behaviour(122)
def test_nothing_is_timed_unless_asked_for(llm: LLM) -> None:
    llm.generate([[5, 6, 7]], SHORT)
    assert not llm.engine.profiler.counts


@pytest.mark.behaviour(122)
def test_nothing_is_timed_once_timing_is_switched_off(llm: LLM) -> None:
    profiler = llm.engine.profiler
    profiler.enable()
    with pytest.raises(AttributeError):
        profiler.enabled = False  # type: ignore[misc]  # which would leave the scopes timed
    assert profiler.enabled
    profiler.disable()
    llm.generate([[5, 6, 7]], SHORT)
    assert not profiler.counts


@pytest.mark.behaviour(132)
def test_reloaded_weights_are_used_by_the_next_request_and_old_prefixes_are_forgotten(llm: LLM) -> None:
    prompts = random_prompts([40, 4], seed=80)
    expected = tokens_of(llm, prompts)
    model: Any = llm.engine.runner.model
    with torch.no_grad():
        for parameter in model.hf_model.parameters():
            parameter.neg_()
    llm.engine.scheduler.cache.reset()
    assert tokens_of(llm, prompts) != expected
    llm.engine.reload_weights()
    assert tokens_of(llm, prompts) == expected


@pytest.mark.behaviour(132)
def test_weights_are_not_reloaded_under_a_running_request(llm: LLM) -> None:
    add(llm, "running", [5, 6])
    with pytest.raises(RequestError, match="1 requests are unfinished"):
        llm.engine.reload_weights()
    llm.engine.abort("running")


@pytest.mark.behaviour(125, 132)
def test_another_checkpoint_of_the_same_shapes_can_be_loaded_in_place(tiny: Tiny, tmp_path: Path) -> None:
    other = tiny_models.build("llama", tmp_path / "other", seed=1)
    prompts = random_prompts([40, 4], seed=80)
    expected = tokens_of(LLM(other, backend="torch", max_model_len=64, memory="4MiB"), prompts)
    llm = LLM(tiny("llama"), backend="torch", max_model_len=64, memory="4MiB")
    before = tokens_of(llm, prompts)
    llm.update_config(model=other)
    assert tokens_of(llm, prompts) == before  # nothing happens until the weights are read again
    llm.reload_weights()
    assert tokens_of(llm, prompts) == expected != before
    llm.reload_weights()
    assert tokens_of(llm, prompts) == expected


@pytest.mark.behaviour(125)
def test_only_the_model_can_change_while_the_engine_runs(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache.block_size cannot change while the engine runs"):
        llm.update_config(**{"model": tmp_path, "cache.block_size": 32})
    prompts = random_prompts([4], seed=80)
    expected = tokens_of(llm, prompts)
    llm.reload_weights()  # the model's own: a refused call changes nothing
    assert tokens_of(llm, prompts) == expected
    llm.update_config(model=tmp_path)
    with pytest.raises(ModelError):
        llm.reload_weights()
    assert tokens_of(llm, prompts) == expected
    llm.update_config(model=llm.loaded.config.model)


@pytest.mark.behaviour(142)
def test_the_memory_report_adds_up(llm: LLM) -> None:
    report = llm.engine.memory
    assert report is not None
    layers = llm.plan.cache_groups[0].layers
    assert report.block == len(layers) * 16 * 2 * (32 + 32) * 4
    assert report.cache == report.num_blocks * report.block
    assert report.num_blocks == 8 * 4 + 1  # eight requests of four blocks, and the null block
    assert report.num_blocks == llm.engine.scheduler.cache.pool.num_blocks
    assert 0 <= report.activations < report.total


@pytest.mark.behaviour(142)
def test_the_pool_holds_what_was_asked_and_no_more_than_can_be_used() -> None:
    def pool(asked: float | str, useful: int = 10**9) -> int:
        return size_pool(
            asked,
            explicit=True,
            devices=[DeviceMemory(device="cpu", total=2**40, block=1024)],
            useful_blocks=useful,
            profile=lambda: 1.0,
        ).num_blocks

    assert pool("10KiB") == 11
    assert pool("10.9KiB") == 11
    assert pool("1GiB", useful=7) == 8
    with pytest.raises(CapacityError, match="1000 bytes for the cache and one block takes 1024"):
        pool("1KB")


class FixedBuffers(CpuTransferBuffer):
    """Staging as on a GPU, in host memory: one buffer of the reserved size, which `flush` fills."""

    def reserve(self, num_bytes: int) -> None:
        self.device = torch.zeros(num_bytes, dtype=torch.uint8)
        self.waiting: list[tuple[torch.Tensor, np.ndarray]] = []
        self.used = 0

    def begin(self) -> None:
        self.used = 0

    def upload(self, array: np.ndarray) -> torch.Tensor:
        start, self.used = self.used, self.used + reserved_bytes(array.shape, array.dtype.type)
        assert self.used <= len(self.device)
        view = self.device[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        self.waiting.append((view, array.copy()))
        return view

    def flush(self) -> None:
        for view, array in self.waiting:
            view.copy_(torch.from_numpy(array))
        self.waiting.clear()


@pytest.mark.behaviour(142)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 1},
        {"max_num_seqs": 1, "max_num_batched_tokens": 8192, "max_model_len": 32},
        {"max_num_seqs": 3, "max_num_batched_tokens": 95, "max_model_len": 32},
        {"max_num_seqs": 3, "max_num_batched_tokens": 500, "max_model_len": 33, "block_size": 4},
    ],
    ids=str,
)
@pytest.mark.behaviour(7, 23, 142)
def test_buffers_of_fixed_size_hold_every_step_the_profiling_one_included(
    settings: dict[str, Any], tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts([28, 3, 17, 9])
    expected = tokens_of(engines(tiny("llama")), prompts, SHORT)
    monkeypatch.setattr("slotline.builder.engine_builder.transfer_buffer_for", lambda _: FixedBuffers())
    assert tokens_of(LLM(tiny("llama"), **{**DEFAULTS, **settings}), prompts, SHORT) == expected


def test_a_step_larger_than_the_longest_request_still_builds(tiny: Tiny) -> None:
    settings = {"max_num_seqs": 1, "max_model_len": 32, "max_num_batched_tokens": 8192}
    assert len(tokens_of(LLM(tiny("llama"), **{**DEFAULTS, **settings}), [[5]], SHORT)[0]) == 4


# ---- the integrity checker


def _row_of_another(engine: Engine) -> None:
    engine.rows.requests[0].row = 1  # type: ignore[union-attr]


def _lost_request(engine: Engine) -> None:
    engine.rows.requests[0] = None


def _lost_row(engine: Engine) -> None:
    engine.rows._free.pop()


def _wrong_status(engine: Engine) -> None:
    engine.scheduler.running[0].status = Status.WAITING


def _not_running(engine: Engine) -> None:
    engine.scheduler.running.pop()


def _too_many_computed(engine: Engine) -> None:
    engine.rows.num_computed_tokens[0] = engine.rows.num_tokens[0] + 1


def _too_many_tokens(engine: Engine) -> None:
    engine.rows.num_tokens[0] = engine.rows.max_model_len + 1


def _computed_beyond_blocks(engine: Engine) -> None:
    engine.scheduler.cache.groups[0].capacity[0] = 1


def _wrong_table(engine: Engine) -> None:
    engine.scheduler.cache.groups[0].table[0, 0] += 1


def _stale_table(engine: Engine) -> None:
    engine.scheduler.cache.groups[0].table[0, -1] = 3


def _blocks_of_a_free_row(engine: Engine) -> None:
    group = engine.scheduler.cache.groups[0]
    group.extend(7, [engine.scheduler.cache.pool.allocate(1)[0]])


def _lost_block(engine: Engine) -> None:
    engine.scheduler.cache.pool.allocate(1)


def _shared_without_counting(engine: Engine) -> None:
    group = engine.scheduler.cache.groups[0]
    group.blocks[1][0] = group.blocks[0][0]
    group.table[1, 0] = group.table[0, 0]


def _lost_reference(engine: Engine) -> None:
    engine.scheduler.cache.pool.ref_count[engine.scheduler.cache.groups[0].blocks[0][0]] = 0


def _stale_hash(engine: Engine) -> None:
    engine.scheduler.cache.pool._hash_of[5] = (0, b"ghost")


@pytest.mark.parametrize(
    "damage",
    [
        _row_of_another,
        _lost_request,
        _lost_row,
        _wrong_status,
        _not_running,
        _too_many_computed,
        _too_many_tokens,
        _computed_beyond_blocks,
        _wrong_table,
        _stale_table,
        _blocks_of_a_free_row,
        _lost_block,
        _shared_without_counting,
        _lost_reference,
        _stale_hash,
    ],
)
def test_the_integrity_checker_finds_every_kind_of_damage(damage: Callable[[Engine], None], tiny: Tiny) -> None:
    llm = LLM(tiny("llama"), **{**DEFAULTS, "optimize": False})
    for name, prompt in zip("ab", random_prompts([20, 20]), strict=True):
        add(llm, name, prompt)
    llm.engine.step()
    check_integrity(llm.engine.scheduler)
    damage(llm.engine)
    with pytest.raises(IntegrityError):
        check_integrity(llm.engine.scheduler)


def test_a_request_that_a_processor_fails_on_ends_alone(tiny: Callable[..., Path], engines: Callable[..., LLM]) -> None:
    llm = engines(tiny("llama"))
    slot = next(slot for slot in llm.engine.pipeline.slots if slot.name == "logit_bias")
    original = slot.processor.admit

    def admit(row: int, params: Any, prompt_token_ids: list[int]) -> bool:
        if prompt_token_ids == [7, 7]:
            raise RuntimeError("the plugin broke")
        return original(row, params, prompt_token_ids)

    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    alone = llm.generate([[3, 4, 5]], params)[0].outputs[0].token_ids
    slot.processor.admit = admit  # type: ignore[method-assign]
    try:
        first, broken, last = llm.generate([[3, 4, 5], [7, 7], [3, 4, 5]], params)
        (only,) = llm.generate([[7, 7]], params)
    finally:
        slot.processor.admit = original  # type: ignore[method-assign]
    assert first.outputs[0].token_ids == last.outputs[0].token_ids == alone
    for output in (broken, only):
        assert output.finished
        assert output.outputs[0].finish_reason == "error"
        assert output.outputs[0].stop_reason == "RuntimeError: the plugin broke"
        assert output.outputs[0].token_ids == []


def test_a_stream_refuses_a_mistake_when_it_is_asked_for(
    tiny: Callable[..., Path], engines: Callable[..., LLM]
) -> None:
    with pytest.raises(RequestError, match="empty"):
        engines(tiny("llama")).stream([])
