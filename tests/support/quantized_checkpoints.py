"""Tiny checkpoints in the published forms of quantized weights, each beside the same model dequantized in float32.

Every writer follows the form's specification with code of its own: it rounds a weight, stores it as the form says, and
returns in float32 what the stored numbers mean.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tiny_models
import torch
from attrs import frozen
from safetensors.torch import load_file, save_file

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The stored tensors of a module, by the end of their names, and the weight that they mean in float32."""


@frozen(kw_only=True)
class Form:
    """One published form.

    Attributes:
        config: the quantization configuration.
        write: from (weight [out, in] float32) to what is stored and what it means.
        layers: name of the tiny family.
        file: a file that holds the configuration in place of config.json.
    """

    config: Mapping[str, Any]
    write: Callable[[torch.Tensor], Written]
    layers: str = "llama"
    file: str = ""


def compressed(weights: Mapping[str, Any], form: str, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a compressed-tensors configuration of one group."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def pack(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack unsigned codes into int32 words along a dimension, the lowest bits first, padded with zeros."""
    count, codes = 32 // bits, codes.movedim(dim, -1).long()
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % count))
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // count, dtype=torch.int64)
    for place in range(count):
        words |= codes[..., place::count] << (bits * place)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def rounded(weight: torch.Tensor, group: int, bits: int, *, symmetric: bool = True) -> tuple[torch.Tensor, ...]:
    """Round in groups of inputs (0: all) to unsigned codes, zero points and scales of the shape [out, groups]."""
    out, inputs = weight.shape
    parts = weight.view(out, -1, group or inputs)
    top = 2**bits - 1
    if symmetric:
        scales = (parts.abs().amax(-1) / (top // 2)).clamp(min=1e-6).half().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = ((high - low) / top).clamp(min=1e-6).half().float()
        zeros = (-low / scales).round().clamp(0, top)
    codes = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, top)
    return codes.view(out, inputs), zeros, scales


def meaning(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return (code - zero) * scale of each group, in float32."""
    size = codes.shape[1] // scales.shape[1]
    return (codes - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)


def int8_channel(weight: torch.Tensor) -> Written:
    codes, zeros, scales = rounded(weight, 0, 8)
    return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}, meaning(codes, zeros, scales)


def int8_zero(weight: torch.Tensor) -> Written:
    codes, zeros, scales = rounded(weight, 0, 8, symmetric=False)
    stored = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    return stored | {"weight_zero_point": (zeros - 128).to(torch.int8)}, meaning(codes, zeros, scales)


def fp8(block: tuple[int, int], scale: str = "weight_scale", inputs: float | None = None) -> Callable[..., Written]:
    """Return a writer with scales of blocks (rows, columns), 0 for all."""

    def write(weight: torch.Tensor) -> Written:
        rows, columns = (size or whole for size, whole in zip(block, weight.shape, strict=True))
        counts = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scales, meant = torch.empty(counts), torch.empty_like(weight)
        codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        for i in range(counts[0]):
            for j in range(counts[1]):
                place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = (weight[place].abs().max() / 448).bfloat16().float()
                codes[place] = (weight[place] / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
                meant[place] = codes[place].float() * scales[i, j]
        stored = scales.reshape(()) if block == (0, 0) else scales
        extra = {} if inputs is None else {"input_scale": torch.tensor(inputs)}
        return {"weight": codes, scale: stored} | extra, meant

    return write


def packed(bits: int, group: int, *, symmetric: bool = True) -> Callable[..., Written]:
    """Return a writer of compressed-tensors' packed weights."""

    def write(weight: torch.Tensor) -> Written:
        codes, zeros, scales = rounded(weight, group, bits, symmetric=symmetric)
        stored = {"weight_packed": pack(codes, bits, 1), "weight_scale": scales.bfloat16()}
        scales = scales.bfloat16().float()
        stored["weight_shape"] = torch.tensor(weight.shape)
        if not symmetric:
            stored["weight_zero_point"] = pack(zeros, bits, 0)
        return stored, meaning(codes, zeros, scales)

    return write


def gptq(bits: int, group: int, *, symmetric: bool, act_order: bool, version: int = 1) -> Callable[..., Written]:
    """Return a writer of AutoGPTQ's layout."""

    def write(weight: torch.Tensor) -> Written:
        inputs = weight.shape[1]
        size = group if group > 0 else inputs
        order = (
            torch.randperm(inputs, generator=torch.Generator().manual_seed(1)) if act_order else torch.arange(inputs)
        )
        codes, zeros, scales = rounded(weight[:, order], size, bits, symmetric=symmetric)
        meant, own = torch.empty_like(weight), torch.empty_like(codes)
        meant[:, order], own[:, order] = meaning(codes, zeros, scales), codes
        index = torch.empty(inputs, dtype=torch.int32)
        index[order] = torch.arange(inputs, dtype=torch.int32) // size
        less = (zeros - (1 if version == 1 else 0)) % 2**bits
        stored = {
            "qweight": pack(own.T, bits, 0),
            "qzeros": pack(less.T, bits, 1),
            "scales": scales.T.half().contiguous(),
        }
        return stored | {"g_idx": index}, meant

    return write


def awq(group: int) -> Callable[..., Written]:
    """Return a writer of AutoAWQ's layout: words of eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7."""

    def write(weight: torch.Tensor) -> Written:
        codes, zeros, scales = rounded(weight, group, 4, symmetric=False)
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

        def words(values: torch.Tensor) -> torch.Tensor:
            return pack(values.T.unflatten(1, (-1, 8))[..., order].flatten(1), 4, 1)

        stored = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.T.half().contiguous()}
        return stored, meaning(codes, zeros, scales)

    return write


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def nf4(blocksize: int, *, double: bool) -> Callable[..., Written]:
    """Return a writer of bitsandbytes' NF4: two codes a byte, the first one high."""

    def write(weight: torch.Tensor) -> Written:
        table, blocks = torch.tensor(NF4), weight.reshape(-1, blocksize)
        absmax = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": blocksize, "dtype": "float32"}
        state["shape"] = list(weight.shape)
        stored: dict[str, torch.Tensor] = {"weight.quant_map": table}
        if double:
            offset, outer_table = absmax.mean(), torch.linspace(-1, 1, 256)
            rest = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
            outer = rest.abs().amax(1).clamp(min=1e-6)
            inner = (rest / outer[:, None])[..., None].sub(outer_table).abs().argmin(-1).view(-1)[: len(absmax)]
            absmax = outer_table[inner] * outer.repeat_interleave(256)[: len(inner)] + offset
            stored |= {"weight.absmax": inner.to(torch.uint8), "weight.nested_absmax": outer}
            stored["weight.nested_quant_map"] = outer_table
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        else:
            stored["weight.absmax"] = absmax
        codes = (blocks / absmax[:, None])[..., None].sub(table).abs().argmin(-1)
        pairs = codes.reshape(-1, 2)
        stored["weight"] = (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8)
        text = json.dumps(state).encode()
        stored["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return stored, (table[codes] * absmax[:, None]).view(weight.shape)

    return write


def bitsandbytes_int8(weight: torch.Tensor) -> Written:
    top = weight.abs().amax(1)
    codes = (weight / top[:, None] * 127).round()
    stored = {"weight": codes.to(torch.int8), "SCB": top, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, codes * top[:, None] / 127


_W8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
_F8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
_DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_DYNAMIC8 = {**_DYNAMIC, "type": "float"}
_W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def _gptq(bits: int = 4, **settings: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": True, "desc_act": False, **settings}


FORMS: Mapping[str, Form] = {
    "compressed-tensors W8A16": Form(config=compressed(_W8, "int-quantized"), write=int8_channel),
    "compressed-tensors W8A8": Form(config=compressed(_W8, "int-quantized", _DYNAMIC), write=int8_channel),
    "compressed-tensors W8 with zero points": Form(
        config=compressed({**_W8, "symmetric": False}, "int-quantized"), write=int8_zero
    ),
    "compressed-tensors W8 packed": Form(
        config=compressed({**_W8, "strategy": "channel"}, "pack-quantized"), write=packed(8, 0)
    ),
    "compressed-tensors FP8 tensor": Form(
        config=compressed({**_F8, "strategy": "tensor"}, "float-quantized", {**_DYNAMIC8, "dynamic": False}),
        write=fp8((0, 0), inputs=0.05),
    ),
    "compressed-tensors FP8 channel": Form(
        config=compressed(_F8, "float-quantized", _DYNAMIC8), write=fp8((1, 0))
    ),
    "compressed-tensors FP8 block": Form(
        config=compressed({**_F8, "strategy": "block", "block_structure": [16, 32]}, "float-quantized", _DYNAMIC8),
        write=fp8((16, 32)),
    ),
    "compressed-tensors W4A16": Form(config=compressed(_W4, "pack-quantized"), write=packed(4, 32)),
    "compressed-tensors W4A16 with zero points": Form(
        config=compressed({**_W4, "symmetric": False}, "pack-quantized"), write=packed(4, 32, symmetric=False)
    ),
    "DeepSeek FP8 blocks": Form(
        config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 40], "activation_scheme": "dynamic"},
        write=fp8((64, 40), "weight_scale_inv"),
    ),
    "AutoFP8": Form(
        config={"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        write=fp8((0, 0), inputs=0.05),
    ),
    "ModelOpt FP8": Form(
        config={"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        write=fp8((0, 0), inputs=0.05),
    ),
    "GPTQ": Form(config=_gptq(), write=gptq(4, 32, symmetric=True, act_order=False)),
    "GPTQ with act order": Form(
        config=_gptq(desc_act=True, sym=False), write=gptq(4, 32, symmetric=False, act_order=True)
    ),
    "GPTQ of 8 bits, one group": Form(
        config=_gptq(8, group_size=-1), write=gptq(8, -1, symmetric=True, act_order=False)
    ),
    "GPTQ v2": Form(
        config=_gptq(sym=False, checkpoint_format="gptq_v2"),
        write=gptq(4, 32, symmetric=False, act_order=False, version=2),
    ),
    "AWQ": Form(config=_AWQ, write=awq(32)),
    "AWQ in its own file": Form(
        config={"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
        write=awq(32),
        file="quant_config.json",
    ),
    "bitsandbytes NF4": Form(
        config={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        write=nf4(32, double=False),
    ),
    "bitsandbytes NF4, double": Form(
        config={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        write=nf4(32, double=True),
    ),
    "bitsandbytes INT8": Form(config={"quant_method": "bitsandbytes", "load_in_8bit": True}, write=bitsandbytes_int8),
}  # fmt: skip
"""By the name in docs/quantization.md."""


def write(form: Form, plain: Path, quantized: Path, meant: Path) -> None:
    """Write a checkpoint in a form, and beside it the same model dequantized.

    Args:
        plain: a checkpoint in float32.
        quantized, meant: the folders to write.
    """
    tensors, stored, dequantized = load_file(plain / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if not is_linear(name):
            stored[name] = dequantized[name] = tensor
            continue
        stem = name.removesuffix(".weight")
        parts, dequantized[name] = form.write(tensor.float())
        stored |= {f"{stem}.{end}": part for end, part in parts.items()}
    config = json.loads((plain / "config.json").read_text())
    save(meant, dequantized, config)
    own = {} if form.file else {"quantization_config": dict(form.config)}
    save(quantized, stored, {**config, **own})
    if form.file:
        (quantized / form.file).write_text(json.dumps(dict(form.config)))
    for folder in (quantized, meant):
        copy_tokenizer(plain, folder)


def copy_tokenizer(plain: Path, folder: Path) -> None:
    """Give a checkpoint the tokenizer of another."""
    for file in plain.glob("token*.json"):
        shutil.copy(file, folder)


def is_linear(name: str) -> bool:
    """Return True for the weight of a projection of a Llama."""
    return name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))


def save(path: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write a checkpoint's folder."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"}
    )
    (path / "config.json").write_text(json.dumps(dict(config)))


def two_layers(path: Path, family: str = "llama") -> Path:
    """Return a tiny checkpoint of two layers."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gpt_oss" else {}
    return tiny_models.build(family, path, seed=0, num_hidden_layers=2, **kinds)


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round experts [experts, out, in] to MXFP4: blocks [experts, out, in / 32, 16], exponents, and what they mean."""
    table = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    table = torch.cat((table, -table))
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    scales = torch.exp2(exponents)
    codes = (groups / scales[..., None])[..., None].sub(table).abs().argmin(-1)
    blocks = (codes[..., ::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8), (table[codes] * scales[..., None]).flatten(-2)


def gpt_oss(plain: Path, quantized: Path, meant: Path) -> None:
    """Write a GPT-OSS checkpoint as published, and the same model dequantized."""
    tensors, stored, dequantized = load_file(plain / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = dequantized[name] = tensor
            continue
        blocks, exponents, weight = mxfp4(tensor.transpose(1, 2).float())
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        dequantized[name] = weight.transpose(1, 2)
    config = json.loads((plain / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    save(meant, dequantized, config)
    said = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    save(quantized, stored, {**config, "quantization_config": said})
    for folder in (quantized, meant):
        copy_tokenizer(plain, folder)


def adapter(path: Path, plain: Path, modules: tuple[str, ...]) -> Path:
    """Write a LoRA adapter of rank 4 for some projections of every layer."""
    tensors = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] in modules:
            generator = torch.Generator().manual_seed(len(tensors))
            for part, shape in (("lora_A", (4, weight.shape[1])), ("lora_B", (weight.shape[0], 4))):
                key = f"base_model.model.{stem}.{part}.weight"
                tensors[key] = torch.randn(shape, generator=generator) * 0.2
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(modules), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(said))
    return path
