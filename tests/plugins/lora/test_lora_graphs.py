"""Adapters in captured steps without a GPU: on a device of another distribution, whose graphs are recorded calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from cli_cases import pretend_project_installed
from engine_driver import random_prompts
from lora_cases import PeftOracle
from repository import SUPPORT, TESTS

from slotline.core import LLM, SamplingParams
from slotline.plugins.lora.manager.adapter_use import AdapterUse

PROMPTS = random_prompts([5, 20, 1, 9], seed=1)
NAMES = ["first", None, "second", "first"]
ALONE = ["first", None, None, "first"]


@pytest.fixture(autouse=True)
def acme_is_installed(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme_device"]:
            monkeypatch.delitem(sys.modules, name)
        pretend_project_installed(monkeypatch, tmp_path / "site", TESTS / "third_party" / "acme-device")
        yield


def tokens(llm: LLM, oracle: PeftOracle, names: list[str | None]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, lora_request=[oracle.request(name) for name in names], progress=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("targets", "specialize"), [((), True), ((), False), (("embed_tokens", "lm_head", "v_proj"), True)]
)
def test_captured_steps_give_peft_s_text_in_the_graphs_of_their_variant(
    targets: tuple[str, ...], specialize: bool, tmp_path: Path
) -> None:
    path = tiny_models.build("llama", tmp_path / "model", 0)
    changes = {"target_modules": list(targets)} if targets else {}
    oracle = PeftOracle(path, tmp_path / "adapters", {"first": changes, "second": {**changes, "r": 8}})
    settings: dict[str, Any] = {
        "lora.name": "gathered_lora", "plugins.inline": (f"{SUPPORT / 'gathered_lora.py'}:descriptor",),
        "lora.max_adapters": 2, "lora.max_rank": 8, "lora.target_modules": targets,
        "lora.specialize_graphs": specialize, "graphs.sizes": (1, 2, 4), "observability.check_integrity": True,
    }  # fmt: skip
    llm = LLM(path, device="acme:0", dtype="float32", memory="16MiB", max_model_len=64, max_num_seqs=4, **settings)
    assert llm.engine.graphs is not None
    used, original = set(), llm.engine.graphs.replay

    def remember(inputs: Any) -> Any:
        used.add(inputs.shape.variant)
        return original(inputs)

    llm.engine.graphs.replay = remember  # type: ignore[method-assign]
    none, one, many = AdapterUse if specialize else [AdapterUse.MANY] * 3
    assert {shape.variant for shape in llm.engine.graphs.shapes.largest_first} == {none, one, many}
    for names, variant in ((NAMES, many), (ALONE, one), ([None] * 4, none)):
        used.clear()
        wanted = [oracle.greedy(name, prompt, 6) for prompt, name in zip(PROMPTS, names, strict=True)]
        assert tokens(llm, oracle, names) == wanted, names
        assert variant in used
