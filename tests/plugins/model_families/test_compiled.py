"""Models whose forward passes torch.compile takes whole: transformers' tokens, and refusals with their reasons."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import GREEDY, random_prompts, tokens_of

from slotline.core import LLM, SamplingParams
from slotline.planner.plan import make_plan
from slotline.plugins.model_families import binding
from slotline.plugins.model_families.binding import AttentionSlot
from slotline.plugins.model_families.compiled import compiled
from slotline.registry.config import load_config
from slotline.registry.errors import ConfigError, ModelError, NegotiationError

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts([3, 33, 17, 1])
STOCK: dict[str, Any] = {"compile.mode": "stock", "compile.backend": "eager"}
SETTINGS: dict[str, Any] = {"block_size": 4, "max_num_batched_tokens": 24, **STOCK}


@pytest.mark.spread(1, slow=1)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v2", "qwen3_moe", "qwen2_sliding"])
def test_chunks_hits_and_decodes_are_those_of_transformers(
    family: str, tiny: Callable[..., Path], engines: Callable[..., LLM], greedy: Callable[..., list[int]]
) -> None:
    path = tiny(family)
    llm = engines(path, **SETTINGS)
    for _ in range(2):  # the second time with prefixes that are cached
        assert tokens_of(llm, PROMPTS, GREEDY) == [greedy(path, prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    assert any("torch.compile with 'eager'" in note for note in llm.engine.runner.model.notes)


@pytest.mark.behaviour(130)
def test_every_forward_pass_runs_compiled(
    tiny: Callable[..., Path], engines: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, calls, original = engines(tiny("llama"), **SETTINGS), list[int](), AttentionSlot.attend

    def attend(slot: AttentionSlot, query: torch.Tensor, *rest: Any, **said: Any) -> torch.Tensor:
        assert not torch.compiler.is_compiling()  # the compiler knows the operation, and does not look into it
        calls.append(len(query))
        return original(slot, query, *rest, **said)

    monkeypatch.setattr(AttentionSlot, "attend", attend)
    monkeypatch.setattr(binding, "slot_attention", None)  # what modules call that are not compiled
    prompt = PROMPTS[2]
    llm.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True))
    layers = len(llm.engine.runner.model.facts.layers)
    assert calls == [len(prompt)] * layers + [1] * 2 * layers


def test_what_cannot_be_traced_is_an_error_that_says_why() -> None:
    def loop(tokens: torch.Tensor, *_: Any) -> torch.Tensor:
        torch._dynamo.graph_break()
        return tokens

    run, _ = compiled(torch.nn.Linear(1, 1), loop, "eager")
    with pytest.raises(ModelError, match=r"(?s)Linear cannot be compiled by 'eager': .*compile\.mode = 'none'"):
        run(torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("mamba2", {}, "keeps states"),
        ("llama", {"batch_invariant": True}, "for other numbers of tokens"),
        ("llama", {"offload_gib": 1.0}, "weights come when their layer runs"),
        ("llama", {"parallel.pipeline": ["cpu", "cpu"]}, "the model is divided"),
    ],
)
def test_what_is_not_compiled_is_refused_with_its_reason(
    family: str, settings: dict[str, Any], why: str, tiny: Callable[..., Path]
) -> None:
    given = [f"{key}={json.dumps(value)}" for key, value in (STOCK | settings).items()]
    with pytest.raises(NegotiationError, match=why) as raised:
        make_plan(load_config(None, overrides=[f"model={tiny(family)}", *given]))
    assert "compile.mode = 'none'" in raised.value.fix


def test_a_backend_that_torch_has_not_is_refused(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)'inductr' is no backend of torch\.compile.*inductor"):
        LLM(tiny("llama"), **{"compile.mode": "stock", "compile.backend": "inductr"})


def test_explain_says_that_nothing_is_captured_and_what_takes_the_place_of_the_passes(
    tiny: Callable[..., Path],
) -> None:
    given = [f"{key}={value}" for key, value in STOCK.items()]
    plan = make_plan(load_config(None, overrides=[f"model={tiny('llama')}", *given])).plan
    setting = next(one for one in plan.settings if one.key == "compile.mode")
    assert setting.resolved == "stock"
    assert "in place of the optimising passes" in setting.origin


@pytest.mark.exhaustive
def test_inductor_gives_the_text_of_the_passes() -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    texts = [
        [one.outputs[0].text for one in LLM(**settings).generate(["def main(", "import "], params)]
        for settings in ({}, {"compile.mode": "stock"})
    ]
    assert texts[0] == texts[1]
