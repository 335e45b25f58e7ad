"""The dtype of every tensor that is loaded is looked at, and sizes are compared before memory is taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import head_folders
import mtp_checkpoints
import pytest
import torch
from safetensors.torch import load_file, save_file

from slotline.core import LLM, LoRARequest, SamplingParams
from slotline.plugins.lora import peft_folder
from slotline.plugins.model_families.transformers_model import TransformersDecoder
from slotline.proposers.eagle.heads import read_weights
from slotline.proposers.medusa.heads import read_heads
from slotline.proposers.mtp.layouts import find
from slotline.registry.errors import ModelError, RequestError
from slotline.registry.tensor_files import stored_tensors

Tiny = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "backend": "torch",
    "memory": "4MiB",
    "max_num_seqs": 2,
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
}
FORMS = ("safetensors", "bin", "old bin", "shards", "bin shards")
DOWN = "model.layers.1.mlp.down_proj.weight"


def rewritten(source: Path, folder: Path, form: str, change: Callable[[Tensors], Mapping[str, torch.Tensor]]) -> Path:
    """A copy of a checkpoint with changed tensors, in one of the forms."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}
    file.unlink()
    if form == "safetensors":
        save_file(tensors, file, {"format": "pt"})
    elif form.endswith("bin"):
        torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin")
    else:
        kind = "pytorch_model.bin" if form == "bin shards" else "model.safetensors"
        names = sorted(tensors)
        table = {}
        for index, part in enumerate((names[:5], names[5:])):
            shard = f"part_{index}.safetensors" if form == "shards" else f"pytorch_model_part_{index}.bin"
            table |= dict.fromkeys(part, shard)
            stored = {name: tensors[name] for name in part}
            torch.save(stored, folder / shard) if kind.endswith("bin") else save_file(
                stored, folder / shard, {"format": "pt"}
            )
        (folder / f"{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return folder


def one(name: str, dtype: torch.dtype) -> Callable[[Tensors], Tensors]:
    """A change of one tensor's dtype."""
    return lambda tensors: tensors | {name: tensors[name].to(dtype)}


def text_of(folder: Path) -> list[int]:
    llm = LLM(str(folder), **SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=12)
    return list(llm.generate("def main(", params, progress=False)[0].outputs[0].token_ids)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_a_quantized_weight_is_refused_in_every_form_of_a_file(
    tiny: Tiny, tmp_path: Path, form: str, dtype: str
) -> None:
    if (form, dtype) == ("old bin", "float8_e4m3fn"):
        pytest.skip("torch's old format has no such numbers")
    folder = rewritten(tiny("llama"), tmp_path / "checkpoint", form, one(DOWN, getattr(torch, dtype)))
    with pytest.raises(ModelError, match="holds quantized weights") as refused:
        LLM(str(folder), **SETTINGS)
    file = "part_1" if "shards" in form else "model.safetensors" if form == "safetensors" else "pytorch_model.bin"
    spelled = {"float8_e4m3fn": "F8_E4M3", "int8": "I8"}[dtype] if form in ("safetensors", "shards") else dtype
    message = str(refused.value)
    assert file in message
    assert f"({spelled})" in message
    assert DOWN in message


@pytest.mark.parametrize("dtype", ["uint8", "float8_e5m2", "complex64", "int16", "int32", "int64", "bool"])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_packed_whole_and_complex_numbers_are_no_weights(tiny: Tiny, tmp_path: Path, form: str, dtype: str) -> None:
    folder = rewritten(tiny("llama"), tmp_path / "checkpoint", form, one(DOWN, getattr(torch, dtype)))
    with pytest.raises(ModelError, match=rf"holds (quantized )?weights \(\w+\), which .*{DOWN}"):
        LLM(str(folder), **SETTINGS)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_no_name_of_a_weight_is_passed_over(tiny: Tiny, tmp_path: Path, name: str) -> None:
    folder = rewritten(tiny("llama"), tmp_path / "checkpoint", "bin", one(name, torch.float8_e4m3fn))
    with pytest.raises(ModelError, match=rf"\(float8_e4m3fn\), which .*{name}"):
        LLM(str(folder), **SETTINGS)


def test_fused_experts_in_eight_bits_are_refused_though_their_names_end_in_no_weight(
    tiny: Tiny, tmp_path: Path
) -> None:
    def change(tensors: Tensors) -> Tensors:
        fused = [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]
        assert fused
        return tensors | {name: tensors[name].to(torch.float8_e4m3fn) for name in fused}

    folder = rewritten(tiny("gpt_oss"), tmp_path / "checkpoint", "safetensors", change)
    with pytest.raises(ModelError, match=r"\(F8_E4M3\).*experts\.(down|gate_up)_proj"):
        LLM(str(folder), **SETTINGS)


@pytest.mark.parametrize("form", FORMS)
def test_weights_in_double_precision_give_the_same_text(tiny: Tiny, tmp_path: Path, form: str) -> None:
    folder = rewritten(
        tiny("llama"), tmp_path / "checkpoint", form, lambda tensors: {n: x.double() for n, x in tensors.items()}
    )
    assert text_of(folder) == text_of(tiny("llama"))


def test_masks_and_positions_beside_the_weights_stay_allowed(tiny: Tiny, tmp_path: Path) -> None:
    more = {
        "model.position_ids": torch.arange(64)[None],
        "model.layers.0.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "model.layers.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        "something.else": torch.arange(4),
        "mtp.layers.0.mlp.up_proj.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
    }
    folder = rewritten(tiny("llama"), tmp_path / "checkpoint", "safetensors", lambda tensors: tensors | more)
    assert text_of(folder) == text_of(tiny("llama"))


def test_a_tensor_quantized_by_torch_and_a_sparse_one_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = rewritten(tiny("llama"), tmp_path / "checkpoint", "bin", one(DOWN, torch.float32))
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    with pytest.warns(UserWarning, match="deprecated"):
        quantized = torch.quantize_per_tensor(tensors[DOWN], 0.1, 0, torch.qint8)
    for tensor, message in ((quantized, "quantized tensors"), (tensors[DOWN].to_sparse(), "sparse_coo float32")):
        torch.save(tensors | {DOWN: tensor}, folder / "pytorch_model.bin")
        with pytest.raises(ModelError, match=message):
            LLM(str(folder), **SETTINGS)


def test_an_adapter_between_the_models_files_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny("llama"), tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    with pytest.raises(ModelError, match=r"adapter_config\.json lies between the model's files"):
        LLM(str(tmp_path / "model"), **SETTINGS)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64, torch.complex64])
def test_an_adapter_in_another_dtype_is_refused_and_the_others_go_on(
    tiny: Tiny, tmp_path: Path, dtype: torch.dtype
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {key.format("A"): torch.ones(2, 64), key.format("B"): torch.ones(64, 2).to(dtype)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    modules = {"model.layers.0.self_attn.q_proj": (64, 64)}
    with pytest.raises(RequestError, match=r"adapter_model\.safetensors holds .*q_proj\.lora_B\.weight in \w+, which"):
        peft_folder.read(str(tmp_path), modules, 8)


def test_a_bad_adapter_fails_its_request_only(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 10**12, "lora_alpha": 2}))
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file(
        {key.format("A"): torch.ones(2, 64).to(torch.int8), key.format("B"): torch.ones(64, 2)},
        tmp_path / "adapter_model.safetensors",
    )
    llm = LLM(str(tiny("llama")), **SETTINGS, **{"lora.name": "torch", "lora.max_rank": 8})
    params = SamplingParams(temperature=0, max_tokens=4)
    before = llm.generate("hello", params, progress=False)[0].outputs[0].token_ids
    with pytest.raises(RequestError, match=r"lora_A\.weight in I8, which is no plain weight"):
        llm.generate("hello", params, progress=False, lora_request=LoRARequest("bad", 1, str(tmp_path)))
    assert llm.generate("hello", params, progress=False)[0].outputs[0].token_ids == before


@pytest.mark.parametrize("form", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_quantized_head_is_refused(tiny: Tiny, tmp_path: Path, kind: str, form: str) -> None:
    folder = head_folders.build(tmp_path / kind, tiny("llama"), kind)
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / form) if form.endswith("safetensors") else torch.save(tensors, folder / form)
    with pytest.raises(ModelError, match=rf"{form}' holds fc\.weight in (I8|int8), which is no plain weight"):
        read_weights(folder)


@pytest.mark.parametrize("form", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_quantized_medusa_heads_are_refused(tmp_path: Path, form: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 1}))
    tensors = {
        "0.0.linear.weight": torch.ones(4, 4),
        "0.0.linear.bias": torch.ones(4),
        "0.1.weight": torch.ones(8, 4).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / form) if form.endswith("safetensors") else torch.save(tensors, tmp_path / form)
    with pytest.raises(ModelError, match=rf"{form}' holds 0\.1\.weight in \w+, which is no plain weight"):
        read_heads(tmp_path, 4, 8)


def test_a_quantized_multi_token_prediction_layer_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = mtp_checkpoints.build(tmp_path / "mtp", tiny("qwen2"), "qwen2")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.mtp_layers.0.input_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"holds {name} in F8_E4M3, which is no plain weight"):
        find(folder).read()


HUGE = 2**40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vocab_size": HUGE},
            r"(lm_head|embed_tokens)\.weight is \[384, 64\] in model\.safetensors, \[1099511627776, 64\]",
        ),
        ({"hidden_size": 2**22, "head_dim": 16}, "makes a model of"),
        ({"intermediate_size": HUGE}, r"mlp\.\w+_proj\.weight is \["),
        ({"num_hidden_layers": 10**12}, r"num_hidden_layers = 1000000000000, and the weights have \d+ tensors"),
        (
            {"num_attention_heads": 2**30, "num_key_value_heads": 2},
            "is not a multiple of the number of attention heads",
        ),
    ],
)
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_sizes_of_a_configuration_are_compared_before_memory_is_taken(
    tiny: Tiny, tmp_path: Path, changes: dict[str, Any], message: str, form: str
) -> None:
    if form == "bin" and "num_hidden_layers" in changes:
        pytest.skip("layers of a torch file are counted by the loader")
    folder = rewritten(tiny("llama"), tmp_path / "checkpoint", form, lambda tensors: tensors)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    if form == "bin":
        message = message.replace(r"model\.safetensors", r"pytorch_model\.bin")
    with pytest.raises(ModelError, match=message):
        LLM(str(folder), **SETTINGS)
    with pytest.raises(ModelError, match=f"{message}|has a vocabulary of {HUGE}"):
        LLM(str(tiny("llama")), **SETTINGS, **{"drafter.name": "draft_model", "drafter.path": str(folder)})


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("eagle", {"intermediate_size": HUGE}, r"gate_proj\.weight is \[48, 64\], its config\.json asks for"),
        ("eagle", {"head_dim": HUGE}, r"q_proj\.weight is \[64, 64\]"),
        ("eagle", {"num_hidden_layers": 10**12}, r"num_hidden_layers = 1000000000000, its weights have \d+ tensors"),
        ("eagle3", {"draft_vocab_size": HUGE}, r"lm_head\.weight is \[100, 64\]"),
        ("eagle3", {"num_attention_heads": 2**33}, "is not a multiple of the number of attention heads"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1] * 3000}}, "fc"),
    ],
)
def test_sizes_of_a_head_are_compared_before_memory_is_taken(
    tiny: Tiny, tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    folder = head_folders.build(tmp_path / kind, tiny("llama"), kind)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(Exception, match=message) as refused:
        LLM(str(tiny("llama")), **SETTINGS, **{"drafter.name": kind, "drafter.path": str(folder)})
    assert refused.type.__module__.startswith("slotline")


@pytest.mark.parametrize("changes", [{"medusa_num_heads": HUGE}, {"medusa_num_layers": HUGE}])
def test_sizes_of_medusa_heads_are_compared_before_memory_is_taken(tmp_path: Path, changes: dict[str, Any]) -> None:
    settings = {"medusa_num_heads": 1, "medusa_num_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(settings | changes))
    save_file({"0.0.weight": torch.ones(8, 4)}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ModelError, match=rf"asks for .*{HUGE}.*, the file of weights has 1 tensors"):
        read_heads(tmp_path, 4, 8)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, (9).to_bytes(8, "little") + b'{"a": [] }', (2).to_bytes(8, "little") + b"[]"]
)
def test_a_broken_header_is_an_error_of_its_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"header|Expecting"):
        stored_tensors(file)


def test_what_a_file_says_of_its_tensors_needs_none_of_their_memory(tiny: Tiny) -> None:
    file = tiny("llama") / "model.safetensors"
    told = {tensor.name: (tensor.shape, tensor.dtype) for tensor in stored_tensors(file)}
    assert told == {name: (tuple(tensor.shape), "F32") for name, tensor in load_file(file).items()}
    assert TransformersDecoder().inspect(tiny("llama")).num_parameters == sum(
        tensor.numel for tensor in stored_tensors(file)
    )
