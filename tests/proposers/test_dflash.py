"""DFlash heads: what they draft, from which cache, and which folders do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dflash_folders
import pytest
from dflash_folders import expected_of
from engine_driver import add, random_prompts, run_all, tokens_of

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import ModelError
from tests.llm.test_small_model_files import HELD_OUT
from tests.proposers.test_eagle import agree, watch

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
LENGTHS = (5, 40, 17, 2, 30, 12)
LEAST = 1.4
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Callable[..., Path]:
    """The folder of a head for a tiny model."""
    root, made = tmp_path_factory.mktemp("heads"), dict[str, Path]()

    def get(family: str, **changes: Any) -> Path:
        key = f"{family} {len(changes)}"
        made[key] = made.get(key) or dflash_folders.build(root / key, tiny(family), **changes)
        return made[key]

    return get


def settings_of(path: Path, tokens: int = 4) -> dict[str, Any]:
    return {
        "drafter.name": "dflash",
        "drafter.path": str(path),
        "drafter.tokens": tokens,
        "drafter.adaptive": False,
        "memory": "8MiB",
    }


@pytest.mark.spread(2)
@pytest.mark.parametrize("family", ["llama_deep", "qwen3"])
@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 16}, {"backend": "torch"}], ids=["whole", "chunks", "torch"]
)
def test_a_head_drafts_from_its_cache_what_it_drafts_without(
    tiny: Tiny, engines: Engines, folder: Any, family: str, settings: dict[str, Any]
) -> None:
    path, head = tiny(family), folder(family)
    llm = engines(path, **{**settings_of(head), **settings})
    prompts, seen = random_prompts(LENGTHS, seed=3), watch(llm)
    assert tokens_of(llm, prompts) == tokens_of(engines(path), prompts)
    counts = llm.engine.extension("drafts").drafting.counts
    assert counts.failures == 0, counts.last_failure
    assert len(seen) > 50
    assert agree(seen, expected_of(head, path), length=60) == 1  # the block has no place behind the longest text


def test_layers_with_windows_see_the_last_tokens_and_the_block(tiny: Tiny, engines: Engines, folder: Any) -> None:
    path, head = tiny("llama_deep"), folder("llama_deep", **SLIDING)
    llm, prompts = engines(path, **settings_of(head)), random_prompts(LENGTHS, seed=3)
    seen = watch(llm)
    assert tokens_of(llm, prompts) == tokens_of(engines(path), prompts)
    expected = expected_of(head, path)
    assert agree(seen, expected, length=60) == 1
    expected.windows, kept = [None, None], expected.windows
    assert agree(seen, expected, length=60) < 1
    expected.windows = kept


@pytest.mark.parametrize("memory", ["220KiB", "8MiB"])
def test_cached_prefixes_and_preempted_requests(tiny: Tiny, engines: Engines, folder: Any, memory: str) -> None:
    path, head = tiny("llama_deep"), folder("llama_deep")
    llm = engines(path, **{**settings_of(head), "memory": memory, "max_num_batched_tokens": 24})
    prompts, seen = random_prompts((30, 25, 40, 10, 33, 28), seed=8), watch(llm)
    for _ in range(2):
        requests = [add(llm, str(i), prompt) for i, prompt in enumerate(prompts)]
        run_all(llm)
        assert [r.output_token_ids for r in requests] == tokens_of(engines(path), prompts)
    found = [sum(r.metrics.num_preemptions for r in requests), sum(r.metrics.num_cached_tokens for r in requests)]
    assert found[memory == "8MiB"] > 0
    assert agree(seen, expected_of(head, path), length=60) > 0.9  # where blocks are short, the last drafts see a hole


@pytest.mark.parametrize("tokens", [1, 7])
def test_steps_that_overlap_and_sampled_texts(tiny: Tiny, engines: Engines, folder: Any, tokens: int) -> None:
    path = tiny("llama_deep")
    settings = {**settings_of(folder("llama_deep"), tokens), "max_num_batched_tokens": 24}
    llm, prompts = engines(path, **settings, **{"scheduler.async": True}), random_prompts((50, 60, 63, 9), seed=6)
    for params in (
        SamplingParams(temperature=0, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=20, ignore_eos=True),
    ):
        assert tokens_of(llm, prompts, params) == tokens_of(engines(path), prompts, params)
    counts = llm.engine.extension("drafts").drafting.counts
    assert counts.failures == 0, counts.last_failure
    assert counts.proposed > 50


@pytest.mark.spread(1)
def test_the_shipped_head_needs_no_path_and_drafts_well() -> None:
    """On code that no training saw; figures are in training/README.md."""
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "memory": "16MiB", "max_model_len": 512}
    lines = HELD_OUT.splitlines(keepends=True)
    prompts = ["".join(lines[:count]) for count in (6, 12, 18, 24)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    plain, llm = (
        LLM(**settings),
        LLM(**settings, **{"drafter.name": "dflash", "drafter.tokens": 4, "drafter.adaptive": False}),
    )
    texts = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == texts
    assert llm.engine.extension("drafts").drafting.counts.acceptance_length >= LEAST


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 500}, "vocab_size 500, LlamaForCausalLM .* has 384"),
        ({"hidden_size": 32}, "hidden_size 32, LlamaForCausalLM .* has 64"),
        ({"num_target_layers": 5}, "num_target_layers 5, LlamaForCausalLM .* has 4"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"draft_vocab_size": 100}, "draft_vocab_size is 100"),
        ({"block_size": 4}, "drafter.tokens = 4, and the head in .* was trained with block_size = 4"),
        ({"block_size": None}, "block_size is None"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types are"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is None"),
        ({"num_hidden_layers": 3}, r"layers.2.self_attn.q_proj.weight is not there"),
        ({"intermediate_size": 50}, r"mlp.gate_proj.weight is \[48, 64\], its config.json asks for \[50, 64\]"),
        ({"dflash_config": {"mask_token_id": 384, "target_layer_ids": [0]}}, "mask_token_id 384 of 384"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [3]}}, r"outputs of target_layer_ids = \[3\]"),
        ({"dflash_config": {"mask_token_id": 1, "fc_layernorm": True}}, "dflash_config has fc_layernorm = True"),
        ({"dflash_config": None}, "dflash_config missing"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tiny: Tiny, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tiny("llama_deep")
    head = dflash_folders.build(tmp_path / "head", path)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=words):
        LLM(path, device="cpu", **settings_of(head))


def test_layers_to_read_are_spread_where_none_are_named(tiny: Tiny, tmp_path: Path) -> None:
    """The authors' rule: from the second layer to the third last."""
    from slotline.proposers.dflash.network import read_config

    changes = {"dflash_config": {"mask_token_id": 1}, "num_target_layers": 36}
    head = dflash_folders.build(tmp_path / "head", tiny("llama_deep"), layers=5, **changes)
    assert read_config(head).layer_ids == (1, 9, 17, 25, 33)


def test_without_a_folder_the_fix_is_named(tiny: Tiny) -> None:
    with pytest.raises(ModelError, match=r"no head is named(.|\n)*drafter.path"):
        LLM(tiny("llama"), device="cpu", **{"drafter.name": "dflash"})
