"""Weights without a place in the model: whole layers are refused, the rest is named, and what is expected is quiet."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mtp_checkpoints
import pytest
import torch
from safetensors.torch import load_file, save_file

from slotline.registry.errors import ModelError
from tests.plugins.model_families.test_model_family import load

Tiny = Callable[..., Path]


def changed(model: Path, folder: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint with other values in its config.json and more weights."""
    shutil.copytree(model, folder)
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | dict(config)))
    file = folder / "model.safetensors"
    save_file(load_file(file) | dict(weights), file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("family", "layers", "name"),
    [
        ("llama_deep", 3, r"3 of model\.layers\): model\.layers\.3, 9 tensors"),
        ("llama_deep", 2, r"2 of model\.layers\): model\.layers\.2, model\.layers\.3, 18 tensors"),
        ("deepseek_v3", 3, r"3 of model\.layers\): model\.layers\.3"),
        ("mamba2", 3, r"3 of backbone\.layers\): backbone\.layers\.3"),
        ("bloom", 3, r"3 of transformer\.h\): transformer\.h\.3"),
    ],
)
def test_layers_behind_the_last_one_of_the_configuration_are_refused(
    family: str, layers: int, name: str, tiny: Tiny, tmp_path: Path
) -> None:
    key = "n_layer" if family == "bloom" else "num_hidden_layers"
    shorter = changed(tiny(family), tmp_path / "shorter", {key: layers}, {})
    with pytest.raises(ModelError, match=name) as raised:
        load(shorter)
    raised.match("fix: correct num_hidden_layers in config.json")


def test_a_checkpoint_of_the_bare_body_is_refused_alike(tiny: Tiny, tmp_path: Path) -> None:
    shorter = changed(
        tiny("llama_deep"), tmp_path / "shorter", {"num_hidden_layers": 3, "tie_word_embeddings": True}, {}
    )
    file = shorter / "model.safetensors"
    body = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"}
    save_file(body, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"3 of model\.layers\): model\.layers\.3, 9 tensors"):
        load(shorter)


@pytest.mark.parametrize("family", mtp_checkpoints.FAMILIES)
def test_layers_that_predict_further_tokens_are_expected(
    family: str, tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    path = mtp_checkpoints.build(tmp_path / "mtp", tiny(family), family)
    with caplog.at_level(logging.WARNING):
        load(path)
    assert not caplog.records
    assert "REPORT" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama_deep", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("llama_deep", "model.layers.1.self_attn.k_scale"),
        ("llama_deep", "model.layers.1.self_attn.attn.v_scale"),
        ("llama_tied", "lm_head.weight"),
    ],
)
def test_buffers_scales_and_a_tied_head_are_expected(
    family: str, name: str, tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    embedding = load_file(tiny(family) / "model.safetensors")["model.embed_tokens.weight"]
    path = changed(tiny(family), tmp_path / "more", {}, {name: embedding if "head" in name else torch.ones(1)})
    with caplog.at_level(logging.WARNING):
        load(path)
    assert not caplog.records


def test_any_other_weight_is_named_once_in_a_warning(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    more = {f"model.layers.{i}.self_attn.gate.weight": torch.ones(3) for i in range(4)}
    path = changed(tiny("llama_deep"), tmp_path / "more", {}, {**more, "model.typo.weight": torch.ones(3)})
    with caplog.at_level(logging.WARNING):
        load(path)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"5 weights in {path} have no place in LlamaForCausalLM: model.layers.0.self_attn.gate.weight, "
        "model.layers.1.self_attn.gate.weight, model.layers.2.self_attn.gate.weight, "
        "model.layers.3.self_attn.gate.weight and 1 more"
    )
    assert "REPORT" not in "".join(capfd.readouterr())


def test_adapters_among_the_weights_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    more = {f"model.layers.0.self_attn.q_proj.lora_{part}.vision.weight": torch.ones(3) for part in "AB"}
    path = changed(tiny("llama_deep"), tmp_path / "more", {}, more)
    with pytest.raises(
        ModelError, match=r"holds adapters among the model's own weights.*lora_A\.vision\.weight"
    ) as caught:
        load(path)
    assert "a folder of its own" in str(caught.value.fix)


def test_a_report_of_transformers_that_others_ask_for_is_not_kept_back(tiny: Tiny, tmp_path: Path) -> None:
    import transformers

    path = changed(tiny("llama_deep"), tmp_path / "more", {}, {"model.typo.weight": torch.ones(3)})
    load(path)
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    theirs = logging.getLogger("transformers.modeling_utils")
    theirs.addHandler(handler)
    try:
        transformers.LlamaForCausalLM.from_pretrained(path, trust_remote_code=False)
    finally:
        theirs.removeHandler(handler)
    assert any("LOAD REPORT" in text for text in seen)
