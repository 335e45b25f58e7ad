"""Multi-token-prediction layers of the model's own checkpoint: what they draft, their names, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtp_checkpoints
import pytest
import torch
from engine_driver import add, random_prompts, run_all, tokens_of
from mtp_checkpoints import FAMILIES, expected_of
from safetensors.torch import load_file, save_file

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import ModelError
from tests.proposers.test_eagle import agree, watch

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
LENGTHS = (5, 40, 17, 2, 30, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Callable[[str], Path]:
    """The checkpoint of a tiny model with such a layer."""
    root, made = tmp_path_factory.mktemp("mtp"), dict[str, Path]()

    def get(family: str) -> Path:
        if family not in made:
            made[family] = mtp_checkpoints.build(root / family, tiny(family), family)
        return made[family]

    return get


def settings_of(tokens: int = 4) -> dict[str, Any]:
    return {"drafter.name": "mtp", "drafter.tokens": tokens, "drafter.adaptive": False, "memory": "8MiB"}


@pytest.mark.spread(2)
@pytest.mark.behaviour(64, 120, 160)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 24}], ids=["whole", "chunks"])
def test_the_layer_drafts_from_its_cache_what_its_formula_says(
    tiny: Tiny, engines: Engines, folder: Any, family: str, settings: dict[str, Any]
) -> None:
    path = folder(family)
    llm = engines(path, **{**settings_of(), **settings})
    prompts, seen = random_prompts(LENGTHS, seed=3), watch(llm)
    assert tokens_of(llm, prompts) == tokens_of(engines(path), prompts)
    assert llm.engine.extension("drafts").drafting.counts.failures == 0
    assert len(seen) > 50
    assert agree(seen[::3], expected_of(path, family)) == 1  # type: ignore[arg-type]


def test_preemption_fills_the_cache_again(engines: Engines, folder: Any) -> None:
    path = folder("deepseek_v3")
    llm = engines(path, **{**settings_of(), "memory": "100KiB", "max_num_batched_tokens": 24})
    prompts, seen = random_prompts((30, 25, 40, 10, 33, 28), seed=8), watch(llm)
    requests = [add(llm, str(i), prompt) for i, prompt in enumerate(prompts)]
    run_all(llm)
    assert [r.output_token_ids for r in requests] == tokens_of(engines(path), prompts)
    assert sum(r.metrics.num_preemptions for r in requests) > 0
    assert agree(seen[::2], expected_of(path, "deepseek_v3")) > 0.9  # type: ignore[arg-type]  # last drafts may see a hole


@pytest.mark.spread(1, slow=1)
@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_a_cached_prefix_has_the_layers_entries_too(engines: Engines, folder: Any, family: str) -> None:
    path = folder(family)
    llm, plain = engines(path, **settings_of()), engines(path)
    prompts = random_prompts((20, 21, 35), seed=4)
    expected = tokens_of(plain, prompts)
    assert tokens_of(llm, prompts) == expected
    longer = [p + t[:14] for p, t in zip(prompts, expected, strict=True)] + [[*prompts[0][:19], 7, 8, 9]]
    seen = watch(llm)
    requests = [add(llm, str(i), prompt) for i, prompt in enumerate(longer)]
    run_all(llm)
    assert [r.output_token_ids for r in requests] == tokens_of(plain, longer)
    assert all(r.metrics.num_cached_tokens >= 16 for r in requests)
    assert agree(seen[::2], expected_of(path, family)) == 1  # type: ignore[arg-type]


@pytest.mark.spread(2)
@pytest.mark.parametrize("family", ["qwen3_next", "glm4_moe_lite"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_sampled_texts_are_the_same(engines: Engines, folder: Any, family: str, asynchronous: bool) -> None:
    path, prompts = folder(family), random_prompts(LENGTHS, seed=9)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=20, ignore_eos=True)
    llm = engines(path, **settings_of(), **{"scheduler.async": asynchronous})
    assert tokens_of(llm, prompts, params) == tokens_of(engines(path), prompts, params)
    assert llm.engine.extension("drafts").drafting.counts.failures == 0


def test_what_is_kept_in_float32_stays_so(engines: Engines, folder: Any) -> None:
    """The bias that chooses experts decides between scores that bfloat16 cannot tell apart."""
    llm = engines(folder("deepseek_v3"), **settings_of(2), dtype="bfloat16")
    head = llm.engine.extension("drafts").drafting.drafter._head
    dtypes = {name: tensor.dtype for name, tensor in head.state_dict().items()}
    assert dtypes.pop("layer.mlp.gate.e_score_correction_bias") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}
    tokens_of(llm, random_prompts(LENGTHS, seed=2))
    assert llm.engine.extension("drafts").drafting.counts.failures == 0


# ---- where the tensors lie


def test_they_may_lie_in_a_file_that_no_index_names_or_in_another_folder(
    engines: Engines, folder: Any, tiny: Tiny, tmp_path: Path
) -> None:
    path, prompts = folder("qwen3_next"), random_prompts(LENGTHS, seed=4)
    layer = {name: x for name, x in load_file(path / "model.safetensors").items() if name.startswith("mtp.")}
    elsewhere = tmp_path / "mtp"
    elsewhere.mkdir()
    save_file(layer, elsewhere / "mtp.safetensors")
    (elsewhere / "config.json").write_text((path / "config.json").read_text())
    one = engines(path, **settings_of())
    expected = watch(one)
    texts = tokens_of(one, prompts)
    other = engines(tiny("qwen3_next"), **settings_of(), **{"drafter.path": str(elsewhere)})
    seen = watch(other)
    assert tokens_of(other, prompts) == texts
    assert seen == expected


def test_experts_that_are_stored_as_one_tensor_are_taken_as_they_are(
    engines: Engines, folder: Any, tmp_path: Path
) -> None:
    path, prompts = folder("qwen3_next"), random_prompts(LENGTHS, seed=4)
    stored, own = load_file(path / "model.safetensors"), "mtp.layers.0.mlp.experts."
    split = {name: stored.pop(name) for name in list(stored) if name.startswith(own)}
    gate_up = [torch.cat([split[f"{own}{i}.{part}_proj.weight"] for part in ("gate", "up")]) for i in range(4)]
    stored[f"{own}gate_up_proj"] = torch.stack(gate_up)
    stored[f"{own}down_proj"] = torch.stack([split[f"{own}{i}.down_proj.weight"] for i in range(4)])
    fused = tmp_path / "fused"
    fused.mkdir()
    for file in path.iterdir():
        (fused / file.name).write_bytes(file.read_bytes())
    save_file(stored, fused / "model.safetensors", metadata={"format": "pt"})
    one, other = engines(path, **settings_of()), engines(fused, **settings_of())
    expected, seen = watch(one), watch(other)
    assert tokens_of(other, prompts) == tokens_of(one, prompts)
    assert seen == expected


# ---- what does not fit


def changed(path: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """A copy of a checkpoint with other tensors."""
    to.mkdir()
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    stored = load_file(path / "model.safetensors")
    change(stored)
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    return to


def with_settings(path: Path, to: Path, settings: dict[str, Any]) -> Path:
    """A copy of a checkpoint with other settings."""
    to = changed(path, to, lambda stored: None)
    config = json.loads((path / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | settings))
    return to


def test_a_checkpoint_without_such_a_layer_is_refused_with_the_names_that_were_looked_for(tiny: Tiny) -> None:
    with pytest.raises(ModelError, match="no multi-token-prediction layer") as error:
        LLM(tiny("llama_deep"), device="cpu", **settings_of())
    assert "model.layers.4.eh_proj.weight (DeepSeek-V3" in str(error.value)
    assert "mtp.fc.weight (Qwen3-Next" in str(error.value)
    assert "another drafter" in str(error.value)


def test_a_model_without_attention_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    path = changed(tiny("mamba2"), tmp_path / "mamba2", lambda stored: stored.update({"mtp.fc.weight": torch.zeros(1)}))
    with pytest.raises(ModelError, match="has no attention layer"):
        LLM(path, device="cpu", **settings_of())


def test_a_model_whose_layers_stand_between_other_parts_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    path = changed(tiny("bamba"), tmp_path / "bamba", lambda stored: stored.update({"mtp.fc.weight": torch.zeros(1)}))
    with pytest.raises(ModelError, match="BambaForCausalLM has no norm around its layers"):
        LLM(path, device="cpu", **settings_of())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda stored: stored.pop("mtp.layers.0.mlp.experts.3.up_proj.weight"), r"gate_up_proj is \[3, 96, 64\]"),
        (lambda stored: stored.pop("mtp.norm.weight"), "norm.weight is not there"),
        (lambda stored: stored.pop("mtp.layers.0.self_attn.q_norm.weight"), "q_norm.weight is not there"),
        (lambda stored: stored.update({"mtp.fc.weight": torch.zeros(64, 64)}), r"projection.weight is \[64, 64\]"),
    ],
    ids=["an expert", "a norm", "a part of the layer", "a shape"],
)
def test_a_layer_that_is_not_whole_is_refused(folder: Any, tmp_path: Path, change: Any, words: str) -> None:
    path = changed(folder("qwen3_next"), tmp_path / "model", change)
    with pytest.raises(ModelError, match=words):
        LLM(path, device="cpu", **settings_of())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_nextn_predict_layers": 2}, "has num_nextn_predict_layers = 2, .* would draft all 4 tokens"),
        ({"num_nextn_predict_layers": 0}, "has num_nextn_predict_layers = 0"),
        ({"num_mtp_layers": 3}, "has num_mtp_layers = 3"),
        ({"mtp_num_hidden_layers": 2}, "has mtp_num_hidden_layers = 2"),
        ({"mtp_use_dedicated_embeddings": True}, "has mtp_use_dedicated_embeddings"),
    ],
)
def test_settings_of_another_layer_are_refused(folder: Any, tmp_path: Path, settings: Any, words: str) -> None:
    path = with_settings(folder("qwen3_next"), tmp_path / "model", settings)
    with pytest.raises(ModelError, match=words):
        LLM(path, device="cpu", **settings_of())


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3"])
def test_a_weight_without_a_place_is_refused(folder: Any, tmp_path: Path, family: str) -> None:
    name = f"{mtp_checkpoints.names(family)[-1]}self_attn.sinks"
    path = changed(folder(family), tmp_path / "model", lambda stored: stored.update({name: torch.zeros(4)}))
    with pytest.raises(ModelError, match=rf"has {name} \[4\], for which the model's own layer has no place"):
        LLM(path, device="cpu", **settings_of())


@pytest.mark.parametrize(
    "settings",
    [
        {"rms_norm_eps": 0.3, "num_experts_per_tok": 1, "routed_scaling_factor": 0.3, "topk_group": 1},
        {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": None, "mtp_use_dedicated_embeddings": False},
    ],
    ids=["count", "harmless"],
)
def test_the_model_s_settings_are_the_layer_s(engines: Engines, folder: Any, tmp_path: Path, settings: Any) -> None:
    path = with_settings(folder("deepseek_v3"), tmp_path / "model", settings)
    llm = engines(path, **settings_of())
    seen = watch(llm)
    tokens_of(llm, random_prompts(LENGTHS[:3], seed=3))
    assert agree(seen[::4], expected_of(path, "deepseek_v3")) == 1  # type: ignore[arg-type]


def test_the_first_of_several_layers_drafts_one_token(engines: Engines, folder: Any, tmp_path: Path) -> None:
    path = with_settings(folder("qwen3_next"), tmp_path / "model", {"num_nextn_predict_layers": 2})
    seen, prompts = watch(llm := engines(path, **settings_of(1))), random_prompts(LENGTHS[:2], seed=3)
    assert tokens_of(llm, prompts) == tokens_of(engines(folder("qwen3_next")), prompts)
    assert seen


def test_a_broken_file_is_named(folder: Any, tmp_path: Path) -> None:
    path = changed(folder("qwen3_next"), tmp_path / "model", lambda stored: None)
    (path / "more.safetensors").write_bytes(b"not a header")
    with pytest.raises(ModelError, match=r"more\.safetensors cannot be read"):
        LLM(path, device="cpu", **settings_of())
