"""Features over stages of ranks: what one rank alone has of a step reaches the others, and answers are one process's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as forms
import tiny_models
from engine_driver import random_prompts
from lora_cases import PeftOracle
from quantized_engines import answer, engine, expected, same
from thread_ranks import ThreadRanks
from tiny_engines import DEFAULTS

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
PROMPTS = random_prompts([5, 30, 17, 1, 9, 12])
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)

# --- adapters

LORA = {
    "lora.name": "torch",
    "lora.max_adapters": 2,
    "lora.max_rank": 8,
    "lora.target_modules": (
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("embed_tokens", "lm_head"),
    ),
}


@pytest.fixture(scope="module")
def oracle(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> PeftOracle:
    adapters = {
        "plain": {},
        "stabilised": {"r": 8, "use_rslora": True, "rank_pattern": {"q_proj": 3}},
        "ends": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
        "head": {"target_modules": ["lm_head"]},
    }
    return PeftOracle(tiny("llama"), tmp_path_factory.mktemp("adapters"), adapters)


def adapted(oracle: PeftOracle, names: list[str | None]) -> Callable[[LLM], list[list[int]]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[: len(names)]]
    adapters = [oracle.request(name) for name in names]
    return lambda llm: [list(one.outputs[0].token_ids) for one in llm.generate(prompts, GREEDY, lora_request=adapters)]


@pytest.mark.parametrize(
    "ranks",
    [
        {"pipeline": 2, "tensor": 1, "scheduler.async": True},
        {"pipeline": 2, "tensor": 1, "optimize": False, "max_num_batched_tokens": 16},
        pytest.param({"pipeline": 2, "tensor": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=["async", "chunks", "with tensor"],
)
def test_adapters_of_a_batch_are_those_of_peft(tiny: Tiny, oracle: PeftOracle, ranks: dict[str, Any]) -> None:
    """Three adapters in two slots, one of them of the output projection alone, which one stage has."""
    engines = ThreadRanks(tiny("llama"), **LORA, **ranks)
    for names in (["plain", None, "ends", "stabilised", "plain", "head"], ["head", None]):
        found = engines.same(adapted(oracle, names))
        assert found == [oracle.greedy(name, ids, 6) for name, ids in zip(names, PROMPTS, strict=False)]
    one = oracle.request("plain")
    assert one is not None
    assert engines.same(lambda llm: (llm.remove_lora(1), llm.add_lora(one), llm.pin_lora(1)))
    engines.close()


def test_a_merged_adapter_is_part_of_each_stages_weights(tiny: Tiny, oracle: PeftOracle) -> None:
    settings = {**LORA, "lora.max_adapters": 1, "lora.merge": True}
    engines = ThreadRanks(tiny("llama"), tensor=1, pipeline=2, **settings)
    for name in ("ends", "plain"):
        assert engines.same(adapted(oracle, [name])) == [oracle.greedy(name, PROMPTS[0], 6)]
        number = oracle.names.index(name) + 1
        assert engines.same(lambda llm, number=number: llm.remove_lora(number))  # type: ignore[misc]
    assert engines.same(adapted(oracle, [None])) == [oracle.greedy(None, PROMPTS[0], 6)]
    engines.close()


def test_a_layer_that_no_stage_has_is_named(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"the model has no w9 to adapt"):
        ThreadRanks(tiny("llama"), tensor=1, pipeline=2, **{**LORA, "lora.target_modules": ("w9", "lm_head")})


# --- quantized weights


def over_stages(path: Path, **settings: Any) -> tuple[list[int], list[float]]:
    given = {**DEFAULTS, "weights.activation": "none", "optimize": True, "tensor": 1, "pipeline": 2, **settings}
    ranks = ThreadRanks(path, **given)
    found = ranks.same(answer)
    ranks.close()
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_hidden_layers": 2, "intermediate_size": 128}
    return tiny_models.build("llama", tmp_path_factory.mktemp("plain") / "model", **sizes)


@pytest.mark.parametrize(
    "form",
    [
        "AWQ",
        pytest.param("compressed-tensors FP8 block", marks=pytest.mark.slow),
        pytest.param("GPTQ with act order", marks=pytest.mark.slow),
    ],
)
def test_a_stage_packs_its_own_quantized_weights(form: str, plain: Path, tmp_path: Path) -> None:
    forms.write(forms.FORMS[form], plain, tmp_path / "quantized", tmp_path / "meant")
    same(over_stages(tmp_path / "quantized"), expected(tmp_path / "meant"))


@pytest.mark.parametrize(
    "ranks", [{}, pytest.param({"tensor": 2}, marks=pytest.mark.exhaustive)], ids=["stages", "with tensor"]
)
def test_plain_weights_are_quantized_by_their_stage(ranks: dict[str, Any], plain: Path) -> None:
    settings = {"weights.quantize": "int8"}
    same(over_stages(plain, **settings, **ranks), answer(engine(plain, optimize=True, **settings)))


def test_quantized_experts_are_those_of_a_stage(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "intermediate_size": 128}
    plain = tiny_models.build("gpt_oss", tmp_path / "plain", **sizes)
    forms.gpt_oss(plain, tmp_path / "quantized", tmp_path / "meant")
    same(over_stages(tmp_path / "quantized"), expected(tmp_path / "meant"))
