"""Quantized weights in whole engines: our kernels, merged products, mixtures, adapters, reloading, the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as forms
import torch
from quantized_engines import PROMPT, answer, engine, expected, same
from safetensors.torch import load_file

from slotline.core import LoRARequest, SamplingParams
from slotline.plugins.weight_formats.online import quantize
from slotline.registry.contracts.weights import WeightScheme
from slotline.registry.errors import SlotlineError


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forms.two_layers(tmp_path_factory.mktemp("plain"))


def written(form: str, plain: Path, tmp_path: Path) -> tuple[Path, Path]:
    folders = tmp_path / "quantized", tmp_path / "meant"
    forms.write(forms.FORMS[form], plain, *folders)
    return folders


@pytest.mark.parametrize(
    "form", ["compressed-tensors W8A8", "compressed-tensors W4A16 with zero points", "GPTQ with act order", "AutoFP8"]
)
def test_our_kernels_and_joined_products_answer_like_the_dequantized_model(
    form: str, plain: Path, tmp_path: Path
) -> None:
    quantized, meant = written(form, plain, tmp_path)
    llm = engine(quantized, optimize=True, **{"weights.linear": "numba"})
    same(answer(llm), expected(meant))
    assert {group.plugin for group in llm.plan.weight_groups} == {"numba"}


@pytest.mark.parametrize("method", ["int8", "int4", "fp8"])
def test_plain_weights_are_quantized_at_load(method: str, plain: Path, tmp_path: Path) -> None:
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        head = name == "lm_head.weight"
        if head or forms.is_linear(name):
            grouped = method == "int4" and not head
            scheme = WeightScheme(name="int8" if method == "int4" and head else method, group=(1, 32 if grouped else 0))
            tensors[name] = quantize(name, scheme, tensor).dequantize()
            error = (tensors[name] - tensor).norm() / tensor.norm()
            assert error < {"int8": 0.01, "int4": 0.12, "fp8": 0.04}[method]
    config = json.loads((plain / "config.json").read_text())
    forms.save(tmp_path / "meant", tensors, config)
    llm = engine(plain, optimize=True, **{"weights.quantize": method})
    same(answer(llm), expected(tmp_path / "meant"))
    text = llm.plan.explain()
    assert f"quantizes the weights at load: {method}" in text
    assert "weight group lm_head" in text


@pytest.mark.parametrize(
    ("family", "form", "plugin"),
    [("deepseek_v3", "DeepSeek FP8 blocks", "dequantized"), ("mixtral", "AutoFP8", "numba")],
)
def test_experts_that_are_stored_one_by_one_answer_like_the_dequantized_model(
    family: str, form: str, plugin: str, tmp_path: Path
) -> None:
    plain = forms.two_layers(tmp_path / "plain", family)
    config = {"weight_block_size": [16, 40]} if "weight_block_size" in forms.FORMS[form].config else {}
    write = forms.fp8((16, 40), "weight_scale_inv") if config else forms.FORMS[form].write
    chosen = forms.Form(config={**forms.FORMS[form].config, **config}, write=write)
    forms.write(chosen, plain, tmp_path / "quantized", tmp_path / "meant")
    llm = engine(tmp_path / "quantized")
    same(answer(llm), expected(tmp_path / "meant"))
    assert {group.plugin for group in llm.plan.weight_groups if group.kind == "experts"} == {plugin}


def test_gpt_oss_runs_as_published(tmp_path: Path) -> None:
    plain = forms.two_layers(tmp_path / "plain", "gpt_oss")
    forms.gpt_oss(plain, tmp_path / "quantized", tmp_path / "meant")
    llm = engine(tmp_path / "quantized")
    same(answer(llm), expected(tmp_path / "meant"))
    (group,) = llm.plan.weight_groups
    assert (group.kind, group.scheme.describe()) == ("experts", "mxfp4 in groups of 32")
    assert "experts     dequantized" in llm.plan.explain()
    assert group.num_bytes < group.plain_bytes / 4


@pytest.mark.parametrize("optimize", [False, True])
def test_adapters_work_on_quantized_layers(optimize: bool, plain: Path, tmp_path: Path) -> None:
    quantized, meant = written("compressed-tensors W8A16", plain, tmp_path)
    folder = forms.adapter(tmp_path / "adapter", plain, ("q_proj", "v_proj", "down_proj"))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    found = []
    for path in (quantized, meant):
        llm = engine(path, optimize=optimize, **{"lora.name": "torch", "lora.max_rank": 4})
        outputs = llm.generate(
            [{"prompt_token_ids": PROMPT}] * 2, params, lora_request=[LoRARequest("one", 1, str(folder)), None]
        )
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1], "the adapter changes the answer"


def test_no_adapter_is_merged_into_codes(plain: Path, tmp_path: Path) -> None:
    quantized, _ = written("compressed-tensors W8A16", plain, tmp_path)
    folder = forms.adapter(tmp_path / "adapter", plain, ("q_proj",))
    settings: dict[str, Any] = {"lora.name": "torch", "lora.merge": True, "lora.max_adapters": 1, "lora.max_rank": 4}
    with pytest.raises(SlotlineError, match=r"q_proj has a quantized weight, so no adapter can be merged into it"):
        engine(quantized, **settings, **{"lora.adapters": {"one": str(folder)}})


def test_weights_are_reloaded_in_place(plain: Path, tmp_path: Path) -> None:
    quantized, _ = written("compressed-tensors W4A16", plain, tmp_path)
    llm = engine(quantized, optimize=True)
    model = llm.engine.runner.model.hf_model
    wanted = answer(llm)
    buffers = {name: tensor for name, tensor in model.named_buffers() if name.endswith("codes")}
    assert buffers
    for tensor in buffers.values():
        tensor.zero_()
    llm.reload_weights()
    assert {name: t.data_ptr() for name, t in model.named_buffers() if name in buffers} == {
        name: t.data_ptr() for name, t in buffers.items()
    }
    same(answer(llm), wanted)


def test_the_plan_says_why_each_plugin_was_not_taken(plain: Path, tmp_path: Path) -> None:
    quantized, _ = written("GPTQ with act order", plain, tmp_path)
    llm = engine(quantized)
    (group, *_) = llm.plan.weight_groups
    reasons = {item.name: [reason.code for reason in item.reasons] for item in group.rejected}
    assert reasons["torch_int8"] == ["N120", "N113", "N114", "N115", "N115"]
    assert group.measured
    assert torch.tensor([us for _, *both in group.measured for us in both]).gt(0).all()
    assert {setting.key: setting.resolved for setting in llm.plan.settings}["weights.linear"]
    assert "int4 in groups of 32, offsets, act order" in llm.plan.explain()
