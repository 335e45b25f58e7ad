"""Quantized checkpoints that cannot run are refused with the tensor's name, the numbers and a remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as forms
import torch
from quantized_engines import engine
from safetensors.torch import load_file, save_file

from slotline.registry.errors import ModelError, NegotiationError, SlotlineError

Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forms.two_layers(tmp_path_factory.mktemp("plain"))


def folder(
    form: str,
    plain: Path,
    tmp_path: Path,
    change: Callable[[Tensors], Any] = lambda tensors: None,
    configure: Callable[[dict[str, Any]], Any] = lambda config: None,
) -> Path:
    """Write a form, and change its tensors and its quantization configuration."""
    path = tmp_path / "quantized"
    forms.write(forms.FORMS[form], plain, path, tmp_path / "meant")
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    configure(config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))
    return path


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: tensor})


def said(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config.update(values)


def weights(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda config: config["config_groups"]["group_0"]["weights"].update(values)


W8, W4 = "compressed-tensors W8A16", "compressed-tensors W4A16"
TENSORS: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "a missing scale": (W8, drop(f"{Q}.weight_scale"), rf"without the tensor {Q}\.weight_scale; beside it are {Q}"),
    "a scale of the wrong shape": (
        W8,
        put(f"{Q}.weight_scale", torch.ones(32, 1)),
        rf"{Q}\.weight_scale has shape \[32, 1\], and int8 per channel of \[128, 64\] needs \[128, 1\]",
    ),
    "a scale that is not finite": (
        W8,
        put(f"{Q}.weight_scale", torch.full((128, 1), torch.nan)),
        rf"{Q}: scales hold values that are not finite",
    ),
    "codes of another dtype": (W8, put(f"{Q}.weight", torch.ones(64, 64)), rf"{Q}\.weight is float32, expected int8"),
    "a weight of another size": (
        W8,
        lambda tensors: tensors.update(
            {f"{Q}.weight": torch.zeros(32, 64, dtype=torch.int8), f"{Q}.weight_scale": torch.ones(32, 1)}
        ),
        rf"the quantized weight {Q} is \[32, 64\], where config.json makes it \[128, 64\]",
    ),
    "words of the wrong number": (
        W4,
        put(f"{Q}.weight_packed", torch.zeros(64, 7, dtype=torch.int32)),
        rf"{Q}\.weight_packed has shape \[64, 7\], expected \[128, 8\]",
    ),
    "no size of packed codes": (W4, drop(f"{Q}.weight_shape"), rf"without the tensor {Q}\.weight_shape"),
    "blocks of scales that do not fit": (
        "DeepSeek FP8 blocks",
        put(f"{Q}.weight_scale_inv", torch.ones(1, 2)),
        rf"{Q}\.weight_scale_inv has shape \[1, 2\], and fp8 in blocks of 64x40.* needs \[2, 2\]",
    ),
    "a group index out of range": (
        "GPTQ with act order",
        put(f"{Q}.g_idx", torch.full((64,), 9, dtype=torch.int32)),
        rf"{Q}: g_idx has shape \[64\] and values 9 to 9, expected \[64\] of values below 2",
    ),
    "an order that the configuration denies": (
        "GPTQ",
        put(f"{Q}.g_idx", torch.zeros(64, dtype=torch.int32)),
        rf"{Q}\.g_idx reorders inputs, where the configuration says desc_act = false",
    ),
    "zero points that the configuration denies": (
        "GPTQ",
        put(f"{Q}.qzeros", torch.zeros(2, 16, dtype=torch.int32)),
        rf"{Q}\.qzeros has zero points, where the configuration says sym = true",
    ),
    "a state that is no JSON": (
        "bitsandbytes NF4",
        put(f"{Q}.weight.quant_state.bitsandbytes__nf4", torch.full((4,), 65, dtype=torch.uint8)),
        rf"{Q}\.weight\.quant_state\.bitsandbytes__nf4 is no JSON",
    ),
    "a quantized tensor in a layer that is plain": (
        W8,
        put("lm_head.weight", torch.ones(384, 64, dtype=torch.int8)),
        r"holds quantized weights \(I8\), which this family cannot read: lm_head\.weight",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_wrong_tensors_are_refused_with_name_and_numbers(case: str, plain: Path, tmp_path: Path) -> None:
    form, change, text = TENSORS[case]
    with pytest.raises(ModelError, match=text) as refused:
        engine(folder(form, plain, tmp_path, change))
    assert refused.value.fix


SCALES = ("weight_scale", "weight_scale_inv", "scales", "SCB", "weight.absmax")


@pytest.mark.spread(2)
@pytest.mark.parametrize("form", forms.FORMS)
def test_a_missing_scale_is_refused_in_every_form(form: str, plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "quantized"
    forms.write(forms.FORMS[form], plain, path, tmp_path / "meant")
    tensors = load_file(path / "model.safetensors")
    (scale,) = (name for name in tensors if name.removeprefix(f"{Q}.") in SCALES)
    tensors.pop(scale)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as refused:
        engine(path)
    assert scale in refused.value.message or f"{Q}.weight" in refused.value.message
    assert refused.value.fix


def test_a_missing_scale_of_experts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "quantized"
    forms.gpt_oss(forms.two_layers(tmp_path / "plain", "gpt_oss"), path, tmp_path / "meant")
    tensors = load_file(path / "model.safetensors")
    scales = "model.layers.0.mlp.experts.down_proj_scales"
    tensors.pop(scales)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"without the tensor {scales}") as refused:
        engine(path)
    assert refused.value.fix


@pytest.mark.parametrize(
    ("dtype", "named"),
    [(torch.int8, "I8"), (torch.uint8, "U8"), (torch.int32, "I32"), (torch.float8_e4m3fn, "F8_E4M3")],
)
def test_a_quantized_tensor_in_an_unquantized_model_is_refused(
    dtype: torch.dtype, named: str, plain: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    tensors = load_file(plain / "model.safetensors")
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].to(dtype)
    forms.save(path, tensors, json.loads((plain / "config.json").read_text()))
    with pytest.raises(ModelError, match=rf"holds quantized weights \({named}\).*: {Q}\.weight") as refused:
        engine(path)
    assert refused.value.fix


CONFIGURATIONS: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "an unknown method": (
        W8,
        said(quant_method="quip"),
        r"\(quant_method 'quip'\), which no weight_format plugin reads; installed are awq \(awq\)",
    ),
    "an unknown format": (
        W8,
        said(format="marlin-24"),
        r"in the format 'marlin-24' of config_groups\.group_0, read are",
    ),
    "three bits": (
        W8,
        weights(num_bits=3),
        rf"{Q}: quantized weights \(compressed-tensors\) with type = 'int', num_bits = 3",
    ),
    "no groups": (W8, said(config_groups={}), r"quantized weights by its configuration, and config_groups is \{\}"),
    "no weights": (
        W8,
        said(config_groups={"group_0": {"targets": ["Linear"]}}),
        r"quantized weights by its configuration, and config_groups\.group_0 has no `weights`",
    ),
    "GPTQ of three bits": ("GPTQ", said(bits=3), r"holds quantized weights \(gptq\) of 3 bits, read are 4 and 8"),
    "AWQ of other kernels": ("AWQ", said(version="gemv"), r"\(awq\) with bits = 4 and version = 'gemv', read are 4"),
    "another algorithm": ("ModelOpt FP8", said(quant_algo="NVFP4"), r"with quant_algo = 'NVFP4', read is 'FP8'"),
    "a group that divides nothing": (
        W4,
        weights(group_size=48),
        rf"{Q}\.weight_scale has shape \[64, 2\], and int4 in groups of 48 of \[64, 64\]|not divided by groups of 48",
    ),
    "every layer left out": (W8, said(ignore=["re:.*"]), r"none of its 15 modules has any"),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_wrong_configurations_are_refused(case: str, plain: Path, tmp_path: Path) -> None:
    form, configure, text = CONFIGURATIONS[case]
    with pytest.raises(ModelError, match=text) as refused:
        engine(folder(form, plain, tmp_path, configure=configure))
    assert refused.value.fix


def test_a_scheme_that_no_plugin_serves_is_refused_with_every_reason(plain: Path, tmp_path: Path) -> None:
    path = folder("bitsandbytes NF4", plain, tmp_path)
    with pytest.raises(NegotiationError) as refused:
        engine(path, **{"plugins.block": ("linear:dequantized",)})
    text = refused.value.message
    assert (
        f"no linear plugin multiplies by {Q} and 1 more of scheme nf4 in groups of 32 (64 inputs, 128 outputs)" in text
    )
    assert "numba: N113 weight scheme: needs nf4, offers fp8, int4, int6, int8" in text
    assert "dequantized: N004" in text


def test_a_named_plugin_that_does_not_fit_is_refused(plain: Path, tmp_path: Path) -> None:
    path = folder(W4, plain, tmp_path)
    with pytest.raises(NegotiationError) as refused:
        engine(path, **{"weights.linear": "torch_int8"})
    assert "torch_int8: N120 dtype pair: needs float32, offers bfloat16; N113 weight scheme: " in refused.value.message
    assert "dequantized" not in refused.value.message
    assert refused.value.fix == 'set weights.linear = "auto"'
    with pytest.raises(NegotiationError, match=r"marlin: N001 not installed"):
        engine(path, **{"weights.linear": "marlin"})


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("int3", r"weights\.quantize = 'int3': no weight_format plugin quantizes so; installed are online"),
        ("int8", r"already holds quantized weights \(compressed-tensors\)"),
    ],
)
def test_weights_that_cannot_be_quantized_as_asked_are_refused(
    method: str, text: str, plain: Path, tmp_path: Path
) -> None:
    path = folder(W8, plain, tmp_path) if method == "int8" else plain
    with pytest.raises(NegotiationError, match=text):
        engine(path, **{"weights.quantize": method})


def test_a_group_that_does_not_divide_the_inputs_is_refused_at_load(tmp_path: Path) -> None:
    import tiny_models

    path = tiny_models.build("llama", tmp_path, 0, num_hidden_layers=2, intermediate_size=80)
    with pytest.raises(SlotlineError, match=r"down_proj: 80 inputs are not divided by groups of 32"):
        engine(path, **{"weights.quantize": "int4"})
