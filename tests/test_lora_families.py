"""Adapters on everything that may carry one, in every family of docs/model-families.md, against PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_driver import random_prompts
from family_table import FAMILIES
from lora_cases import PeftOracle

from slotline.core import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS = {"dtype": "float32", "backend": "torch", "max_model_len": 64, "max_num_seqs": 4, "memory": "8MiB"}
CHUNKS = {"scheduler.max_batched_tokens": 24, "observability.check_integrity": True, "observability.progress": False}
LORA = {"lora.name": "torch", "lora.max_adapters": 2, "lora.max_rank": 4}
PROMPTS, LENGTH = random_prompts([5, 33, 1, 17]), 4
NO_OUT_PROJ = frozenset({"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"})
FUSED_EXPERTS = frozenset({"glm4_moe", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "qwen3_next"})


def trainable(family: str, modules: list[str]) -> list[str]:
    """Those of the modules that PEFT adapts: no `out_proj` of some state layers, and in some mixtures no MLP, shared
    experts included, since it takes the name for that of the experts."""
    left_out: tuple[str, ...] = (".out_proj",) if family in NO_OUT_PROJ else ()
    left_out += (".gate_proj", ".up_proj", ".down_proj") if family in FUSED_EXPERTS else ()
    return [module for module in modules if not module.endswith(left_out)]


@pytest.mark.behaviour(75)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_with_adapters_on_all_that_may_carry_one_equals_peft(
    family: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path, oracle = tiny(family), None
    names = ["first", None, "second", "first"]
    for optimize in (False, True):
        llm = LLM(path, **SETTINGS, **CHUNKS, **LORA, optimize=optimize)
        modules = trainable(family, list(llm.engine.adapters._modules))
        assert modules
        if oracle is None:
            targets = {"target_modules": modules}
            oracle = PeftOracle(path, tmp_path, {"first": targets, "second": {**targets, "r": 3, "use_rslora": True}})
            wanted = [oracle.greedy(name, prompt, LENGTH) for name, prompt in zip(names, PROMPTS, strict=True)]
            apart = oracle.logits("first", PROMPTS[0]) - oracle.logits(None, PROMPTS[0])
            assert float(apart.abs().max()) > 0.1
        params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, lora_request=[oracle.request(name) for name in names])
        assert [list(output.outputs[0].token_ids) for output in outputs] == wanted, optimize
