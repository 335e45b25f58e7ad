"""Engines that share the experts of their mixtures, with ranks as threads: the text of one engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as forms
import tiny_models
from quantized_engines import answer, expected, same
from thread_ranks import ThreadRanks
from tiny_engines import DEFAULTS

from slotline.core import LLM, SamplingParams
from slotline.planner.plan import make_plan
from slotline.ranks.expert_balance import build_expert_balance
from slotline.registry.errors import NegotiationError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(115, 129)]

PROMPTS = ("def main(", "class Row:\n    def", "import os, sys\n", "for word in argv: print(word)")
GREEDY = SamplingParams(temperature=0, max_tokens=10)
SLOW = ("qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3", "qwen3_next")


def shared(path: Path, ranks: int = 2, **settings: Any) -> ThreadRanks:
    return ThreadRanks(path, tensor=ranks, **{**DEFAULTS, "parallel.expert": ranks, **settings})


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, progress=False)]


@pytest.mark.parametrize("family", ["mixtral", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SLOW)])
def test_the_text_is_that_of_one_engine(family: str, tmp_path: Path) -> None:
    path = tiny_models.build(family, tmp_path / "model")
    ranks = shared(path, **{"parallel.redundant_experts": 2} if family == "mixtral" else {})
    model = ranks.llms[1].engine.runner.model
    assert len(model.expert_placements()) == len(model.facts.mixtures) > 0  # type: ignore[attr-defined]
    assert ranks.same(tokens) == tokens(LLM(model=path, **DEFAULTS))
    ranks.close()


def test_the_text_stays_when_experts_move_between_steps(tmp_path: Path) -> None:
    path = tiny_models.build("mixtral", tmp_path / "model", num_local_experts=8)
    ranks = shared(path, **{"parallel.rebalance_steps": 4})

    def balanced(llm: LLM) -> None:
        engine: Any = llm.engine
        planned = make_plan(llm.loaded, place=engine.group.place)
        engine.balance = build_expert_balance(planned, engine.runner.model)

    def skew(llm: LLM) -> None:
        for name, weight in llm.engine.runner.model.hf_model.named_parameters():  # type: ignore[attr-defined]
            if name.endswith("mlp.gate.weight"):
                weight[2:] *= 0.2  # so that few experts are chosen often

    ranks.each(balanced)
    ranks.each(skew)
    wanted = ranks.same(tokens)
    reports = ranks.each(lambda llm: llm.engine.balance.last)  # type: ignore[attr-defined]
    assert {(one.tokens, one.before, one.after) for one in reports} == {
        (reports[0].tokens, reports[0].before, reports[0].after)
    }
    assert sum(one.moved for one in reports) > 0
    assert ranks.same(tokens) == wanted
    first, second = (ranks.each(lambda llm: llm.rebalance_experts()) for _ in range(2))
    assert first[0].after <= first[0].before
    assert second[0].tokens == 0
    assert ranks.same(tokens) == wanted
    ranks.each(lambda llm: llm.reload_weights())  # which places the experts, and makes the router, as at first
    assert ranks.same(tokens) == tokens(LLM(model=path, **DEFAULTS))
    ranks.close()


def test_quantized_experts_are_shared_whole(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"weights.activation": "none", "optimize": True}
    plain = forms.two_layers(tmp_path / "plain", "mixtral")
    form = forms.Form(
        config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4], "activation_scheme": "dynamic"},
        write=forms.fp8((4, 4), "weight_scale_inv"),
    )
    forms.write(form, plain, tmp_path / "quantized", tmp_path / "meant")
    ranks = shared(tmp_path / "quantized", **settings)
    same(ranks.same(answer), expected(tmp_path / "meant"))
    ranks.close()
    with pytest.raises(NegotiationError, match="experts with quantized weights do not move"):
        shared(tmp_path / "quantized", **settings, **{"parallel.expert_loads": True})


@pytest.mark.exhaustive
def test_quantized_experts_that_are_stored_together_are_shared_with_their_biases(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "intermediate_size": 128}
    plain = tiny_models.build("gpt_oss", tmp_path / "plain", **sizes)
    forms.gpt_oss(plain, tmp_path / "quantized", tmp_path / "meant")
    more = {"weights.activation": "none", "optimize": True, "parallel.redundant_experts": 2}
    ranks = shared(tmp_path / "quantized", **more)
    same(ranks.same(answer), expected(tmp_path / "meant"))
    ranks.close()
