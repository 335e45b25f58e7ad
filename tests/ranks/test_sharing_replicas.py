"""Replicas with requests of their own that share the experts of mixtures: the text of one engine.

Replicas run as threads here. `test_sharing_processes.py` has processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import quantized_checkpoints as forms
import tiny_models
from engine_driver import GREEDY
from running_server import running_server
from sharing_threads import Replicas, sharing_replicas
from tiny_engines import DEFAULTS

from slotline.core import LLM, SamplingParams
from slotline.core.engine.engine import Engine
from slotline.core.scheduler.integrity import check_integrity
from slotline.ranks.replicas.sharing_engine import SharingEngine

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(60)]
PROMPTS = ["def main(", "class A:\n    def", "import numpy as np\n", "for i in range(", "x = [", "# a comment\n"]
MIXED = [
    SamplingParams(max_tokens=12, temperature=0),
    SamplingParams(max_tokens=8, logprobs=2, temperature=0.7),
    SamplingParams(max_tokens=9, n=3, temperature=1.2),
    SamplingParams(max_tokens=20, stop=["\n"], temperature=0.5),
    SamplingParams(max_tokens=6, seed=7, n=2, top_k=5),
    SamplingParams(max_tokens=16, temperature=0.9, min_p=0.05, logit_bias={7: 3.0}),
]
SERVED: dict[str, Any] = {
    "dtype": "float32",
    "cache.memory": "4MiB",
    "scheduler.max_model_len": 64,
    "observability.progress": False,
    "parallel.data": 2,
    "parallel.expert": 2,
}
SLOW = ("qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3", "qwen3_next")


@pytest.fixture(scope="module")
def mixtral(tiny: Callable[..., Path]) -> Path:
    return tiny("mixtral")


@pytest.fixture(scope="module")
def shared(mixtral: Path) -> Iterator[tuple[LLM, Replicas]]:
    with sharing_replicas() as (replicas, settings):
        llm = LLM(mixtral, data=2, expert=2, **{**DEFAULTS, **settings})
        yield llm, replicas
        llm.close()


@pytest.fixture(scope="module")
def one(mixtral: Path) -> LLM:
    return LLM(mixtral, **DEFAULTS)


def tokens(llm: LLM, prompts: Any = PROMPTS, params: Any = GREEDY) -> list[list[tuple[int, ...]]]:
    outputs = llm.generate(prompts, params, progress=False)
    return [[tuple(part.token_ids) for part in output.outputs] for output in outputs]


def passes(replicas: Replicas) -> set[int]:
    """Return the numbers of forward passes, once all replicas have come to the last."""
    for _ in range(1000):
        found = {engine.meetings.passes for engine in replicas.engines.values()}  # type: ignore[union-attr]
        if len(found) == 1 and not any(engine.is_awaited for engine in replicas.engines.values()):
            break
        time.sleep(0.001)
    return found


def test_mixed_requests_have_the_text_of_one_engine(shared: tuple[LLM, Replicas], one: LLM) -> None:
    llm, replicas = shared
    for prompts, params in ((PROMPTS, MIXED), (PROMPTS * 4, SamplingParams(max_tokens=7, temperature=1))):
        assert tokens(llm, prompts, params) == tokens(one, prompts, params)
    mixtures = [e.runner.model.hf_model.model.layers[0].mlp.experts for e in replicas.engines.values()]  # type: ignore[attr-defined]
    assert [(mixture.num_experts, len(mixture.down_proj)) for mixture in mixtures] == [(2, 2), (2, 2)]


def test_a_replica_without_requests_runs_its_experts_and_none_runs_without_work(
    shared: tuple[LLM, Replicas], one: LLM
) -> None:
    llm, replicas = shared
    (before,) = passes(replicas)
    steps = [0, 0]
    for number, engine in replicas.engines.items():
        counted(engine, steps, number)
    assert tokens(llm, PROMPTS[:1]) == tokens(one, PROMPTS[:1])
    for engine in replicas.engines.values():
        del engine._launch
    assert sorted(steps)[0] == 0
    (after,) = passes(replicas)
    assert after - before == sum(steps)
    time.sleep(0.05)
    assert passes(replicas) == {after}


def counted(engine: Any, steps: list[int], number: int) -> None:
    """Count the forward passes with tokens of an engine."""

    def launch(schedule: Any) -> Any:
        steps[number] += 1
        return type(engine)._launch(engine, schedule)

    engine._launch = launch


def test_long_prompts_in_chunks_preempted_and_aborted_requests(shared: tuple[LLM, Replicas], one: LLM) -> None:
    llm, replicas = shared
    prompts = [{"prompt_token_ids": [5 + (7 * i + j) % 300 for j in range(20 + 4 * i)]} for i in range(6)]
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=1, ignore_eos=True)
    expected = tokens(one, prompts, params)
    llm.front.ask_first(slow_steps)
    long = SamplingParams(max_tokens=30, ignore_eos=True)
    aborted = llm.front.add("aborted", list(range(9, 40)), long, stream=True)
    while not aborted.output_token_ids:
        llm.front.step()
    llm.front.abort("aborted")
    assert tokens(llm, prompts, params) == expected
    assert aborted.finish_reason == "abort"
    llm.front.ask_first(preempt_soon)
    assert tokens(llm, prompts, params) == expected
    for engine in replicas.engines.values():
        check_integrity(engine.scheduler)


def slow_steps(engine: Engine) -> None:
    """Have an engine's next steps take a while."""
    plain, left = engine.scheduler.schedule, [30]

    def schedule() -> Any:
        left[0] -= 1
        if not left[0]:
            del engine.scheduler.schedule
        time.sleep(0.01)
        return plain()

    engine.scheduler.schedule = schedule  # type: ignore[method-assign]


def preempt_soon(engine: Engine) -> None:
    """Have an engine preempt a request before its fourth step from now."""
    plain, left = engine.scheduler.schedule, [4]

    def schedule() -> Any:
        left[0] -= 1
        if not left[0]:
            del engine.scheduler.schedule
            engine.scheduler.recompute(engine.scheduler.running[:1])
        return plain()

    engine.scheduler.schedule = schedule  # type: ignore[method-assign]


def test_an_error_before_a_forward_pass_is_raised_and_the_replicas_go_on(
    shared: tuple[LLM, Replicas], one: LLM
) -> None:
    llm, replicas = shared
    llm.front.ask_first(break_next_step)
    with pytest.raises(ValueError, match="on purpose"):
        tokens(llm, PROMPTS)
    assert tokens(llm) == tokens(one)
    assert len(passes(replicas)) == 1


def break_next_step(engine: Engine) -> None:
    """Have an engine's next step fail."""

    def schedule() -> None:
        del engine.scheduler.schedule
        raise ValueError("on purpose")

    engine.scheduler.schedule = schedule  # type: ignore[assignment, method-assign]


def test_grammars_are_waited_for_only_while_no_other_replica_waits(
    shared: tuple[LLM, Replicas], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = shared[1].engines[0], list[bool]()

    def collect(*, idle: bool, gives_way: Callable[[], bool]) -> tuple[list[Any], list[Any]]:
        seen.append(gives_way())
        return [], []

    ways = tuple(each.func for each in engine.extensions.collect_ready)  # type: ignore[attr-defined]
    assert set(ways) <= {engine._giving_way}
    engine._giving_way(collect, idle=True, gives_way=lambda: False)
    monkeypatch.setattr(SharingEngine, "is_awaited", True)
    engine._giving_way(collect, idle=True, gives_way=lambda: False)
    assert seen == [False, True]


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.exhaustive) for name in SLOW])
def test_the_text_of_other_families(family: str, tmp_path: Path) -> None:
    path = tiny_models.build(family, tmp_path / "model")
    with sharing_replicas() as (_, settings):
        llm = LLM(path, data=2, expert=2, **{**DEFAULTS, **settings})
        found = tokens(llm, PROMPTS, MIXED)
        llm.close()
    assert found == tokens(LLM(path, **DEFAULTS), PROMPTS, MIXED)


@pytest.mark.slow
def test_experts_with_copies_move_between_forward_passes(tmp_path: Path) -> None:
    path = tiny_models.build("mixtral", tmp_path / "model", num_local_experts=8)
    with sharing_replicas() as (replicas, settings):
        more = {"parallel.redundant_experts": 1, "parallel.rebalance_steps": 5}
        llm = LLM(path, data=3, expert=3, **{**DEFAULTS, **settings, **more})
        for engine in replicas.engines.values():
            for name, weight in engine.runner.model.hf_model.named_parameters():  # type: ignore[attr-defined]
                if name.endswith("mlp.gate.weight"):
                    weight[2:] *= 0.2  # so that few experts are chosen often
        first, second = tokens(llm, PROMPTS, MIXED[0]), tokens(llm, PROMPTS, MIXED[0])
        llm.close()
    reports = [engine.balance.last for engine in replicas.engines.values()]  # type: ignore[union-attr]
    assert all(report is not None and report.tokens == reports[0].tokens for report in reports)
    assert first == second


@pytest.mark.exhaustive
def test_quantized_experts_and_drafts(tmp_path: Path) -> None:
    plain = forms.two_layers(tmp_path / "plain", "mixtral")
    form = forms.Form(
        config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4], "activation_scheme": "dynamic"},
        write=forms.fp8((4, 4), "weight_scale_inv"),
    )
    forms.write(form, plain, tmp_path / "quantized", tmp_path / "meant")
    with sharing_replicas() as (_, settings):
        more = {"weights.activation": "none", "optimize": True, "drafter.name": "ngram", "drafter.tokens": 3}
        llm = LLM(tmp_path / "quantized", data=2, expert=2, **{**DEFAULTS, **settings, **more})
        prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9, 5, 6, 7, number]} for number in range(6)]
        found = tokens(llm, prompts)
        llm.close()
    assert found == tokens(LLM(tmp_path / "meant", **DEFAULTS), prompts)


@pytest.mark.exhaustive
def test_embeddings_are_those_of_one_engine(mixtral: Path) -> None:
    with sharing_replicas() as (_, settings):
        llm = LLM(mixtral, data=2, expert=2, task="embed", **{**DEFAULTS, **settings})
        found = [each.outputs.embedding for each in llm.embed(PROMPTS)]
        llm.close()
    expected = [each.outputs.embedding for each in LLM(mixtral, task="embed", **DEFAULTS).embed(PROMPTS)]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.exhaustive
def test_a_server_of_replicas_gives_the_text_of_one_engine(mixtral: Path, one: LLM) -> None:
    prompts = [[5, 6, 7, 8 + number] for number in range(4)]
    with sharing_replicas() as (_, settings), running_server(model=mixtral, **SERVED, **settings) as running:
        body = {"prompt": prompts, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        plan = httpx.get(f"{running.url}/v1/plan").json()["settings"]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    expected = one.generate(prompts, params, progress=False)
    assert [each["text"] for each in choices] == [each.outputs[0].text for each in expected]
    assert {each["resolved"] for each in plan if each["key"] == "parallel.expert"} == {"2"}
