"""Examples of our weight formats for the conformance suite: writers of the published layouts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import evolve

from slotline.registry.contracts.weight_format import FormatExample
from slotline.registry.contracts.weights import ELEMENTS, QuantizedWeight, WeightScheme

Stored = dict[str, torch.Tensor]
_PLAIN = ["lm_head"]


def pack(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack unsigned codes into int32 words along a dimension, the lowest bits first, padded with zeros."""
    count, codes = 32 // bits, codes.movedim(dim, -1).long()
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % count))
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // count, dtype=torch.int64)
    for place in range(count):
        words |= codes[..., place::count] << (bits * place)
    words = torch.where(words >= 2**31, words - 2**32, words)
    packed: torch.Tensor = words.to(torch.int32).movedim(-1, dim).contiguous()
    return packed


def _unsigned(weight: QuantizedWeight) -> torch.Tensor:
    return weight.codes.int().add(2 ** (weight.scheme.element.bits - 1))


def _zeros(weight: QuantizedWeight) -> torch.Tensor:
    """Return unsigned zero points [outputs, groups], in the middle of the range for a symmetric scheme."""
    middle = 2 ** (weight.scheme.element.bits - 1)
    if weight.offsets is None:
        return torch.full(weight.scales.shape, middle)
    return (-weight.offsets / weight.scales).round().int().add(middle)


# --- compressed-tensors


def _compressed(scheme: WeightScheme, form: str) -> dict[str, Any]:
    element = {"int8": ("int", 8), "int4": ("int", 4), "fp8": ("float", 8)}[scheme.name]
    weights = {"type": element[0], "num_bits": element[1], "strategy": scheme.granularity}
    weights |= {"symmetric": scheme.symmetric}
    weights |= {"group_size": scheme.group[1]} if scheme.granularity == "group" else {}
    weights |= {"block_structure": list(scheme.group)} if scheme.granularity == "block" else {}
    weights |= {"actorder": "group"} if scheme.act_order else {}
    inputs = None
    if scheme.activation:
        kind = "float" if scheme.activation == "fp8" else "int"
        inputs = {"num_bits": 8, "type": kind, "dynamic": scheme.dynamic}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": _PLAIN,
    }


def _store_compressed(name: str, weight: QuantizedWeight) -> Stored:
    scales = weight.scales.reshape(()) if weight.scheme.granularity == "tensor" else weight.scales
    stored = {f"{name}.weight": weight.codes, f"{name}.weight_scale": scales.bfloat16()}
    if weight.offsets is not None:
        stored[f"{name}.weight_zero_point"] = (_zeros(weight) - 128).to(torch.int8)
    if weight.input_scale is not None:
        stored[f"{name}.input_scale"] = weight.input_scale
    return stored


def _store_packed(name: str, weight: QuantizedWeight) -> Stored:
    bits = weight.scheme.element.bits
    stored = {
        f"{name}.weight_packed": pack(_unsigned(weight), bits, 1),
        f"{name}.weight_scale": weight.scales.bfloat16(),
        f"{name}.weight_shape": torch.tensor(weight.codes.shape),
    }
    if weight.offsets is not None:
        stored[f"{name}.weight_zero_point"] = pack(_zeros(weight), bits, 0)
    if weight.g_idx is not None:
        stored[f"{name}.weight_g_idx"] = weight.g_idx
    return stored


def _compressed_example(form: str, **scheme: Any) -> FormatExample:
    made = WeightScheme(**scheme)
    store = _store_packed if form == "pack-quantized" else _store_compressed
    return FormatExample(config=_compressed(made, form), scheme=made, store=store)


def compressed_tensors() -> Mapping[str, FormatExample]:
    """Return the forms of compressed-tensors."""
    quantized, floats, packed = "int-quantized", "float-quantized", "pack-quantized"
    return {
        "W8A16": _compressed_example(quantized, name="int8"),
        "W8A8": _compressed_example(quantized, name="int8", activation="int8"),
        "W8 with zero points": _compressed_example(quantized, name="int8", symmetric=False),
        "W8 packed": _compressed_example(packed, name="int8"),
        "FP8 tensor": _compressed_example(floats, name="fp8", group=(0, 0), activation="fp8", dynamic=False),
        "FP8 channel": _compressed_example(floats, name="fp8", activation="fp8"),
        "FP8 block": _compressed_example(floats, name="fp8", group=(16, 32), activation="fp8"),
        "W4A16": _compressed_example(packed, name="int4", group=(1, 32)),
        "W4A16 with zero points": _compressed_example(packed, name="int4", group=(1, 32), symmetric=False),
        "W4A16 with act order": _compressed_example(packed, name="int4", group=(1, 32), act_order=True),
    }


# --- FP8 of DeepSeek, AutoFP8 and ModelOpt


def _store_fp8(name: str, weight: QuantizedWeight) -> Stored:
    if weight.scheme.granularity == "block":
        return {f"{name}.weight": weight.codes, f"{name}.weight_scale_inv": weight.scales}
    stored = {f"{name}.weight": weight.codes, f"{name}.weight_scale": weight.scales.reshape(())}
    return stored if weight.input_scale is None else stored | {f"{name}.input_scale": weight.input_scale}


def fp8() -> Mapping[str, FormatExample]:
    """Return the forms of DeepSeek and AutoFP8."""
    block = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 40], "activation_scheme": "dynamic"}
    tensor = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": _PLAIN}
    return {
        "DeepSeek": FormatExample(
            config={**block, "modules_to_not_convert": _PLAIN},
            scheme=WeightScheme(name="fp8", group=(64, 40), activation="fp8"),
            store=_store_fp8,
        ),
        "AutoFP8": FormatExample(
            config=tensor,
            scheme=WeightScheme(name="fp8", group=(0, 0), activation="fp8", dynamic=False),
            store=_store_fp8,
        ),
    }


def modelopt() -> Mapping[str, FormatExample]:
    """Return the form of ModelOpt."""
    scheme = WeightScheme(name="fp8", group=(0, 0), activation="fp8", dynamic=False)
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": _PLAIN}
    return {"FP8": FormatExample(config=config, scheme=scheme, store=_store_fp8)}


# --- GPTQ and AWQ


def _store_gptq(less: int) -> Callable[[str, QuantizedWeight], Stored]:
    def store(name: str, weight: QuantizedWeight) -> Stored:
        bits, inputs = weight.scheme.element.bits, weight.in_features
        size = weight.scheme.group[1] or inputs
        order = torch.arange(inputs, dtype=torch.int32) // size if weight.g_idx is None else weight.g_idx
        return {
            f"{name}.qweight": pack(_unsigned(weight).T, bits, 0),
            f"{name}.qzeros": pack((_zeros(weight).T - less) % 2**bits, bits, 1),
            f"{name}.scales": weight.scales.T.half(),
            f"{name}.g_idx": order,
        }

    return store


def _gptq(group: int, *, version: int = 1, **scheme: Any) -> FormatExample:
    made = WeightScheme(group=(1, max(group, 0)), **scheme)
    config = {
        "quant_method": "gptq",
        "bits": made.element.bits,
        "group_size": group,
        "sym": made.symmetric,
        "desc_act": made.act_order,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "modules_to_not_convert": _PLAIN,
    }
    return FormatExample(config=config, scheme=made, store=_store_gptq(2 - version), column_step=8)


def gptq() -> Mapping[str, FormatExample]:
    """Return the forms of GPTQ. Words of codes along the inputs are whole."""
    return {
        "4 bits": _gptq(32, name="int4"),
        "4 bits with zero points and act order": _gptq(32, name="int4", symmetric=False, act_order=True),
        "8 bits, one group": _gptq(-1, name="int8"),
        "version 2 with zero points": _gptq(32, version=2, name="int4", symmetric=False),
    }


def _store_awq(name: str, weight: QuantizedWeight) -> Stored:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(values: torch.Tensor) -> torch.Tensor:
        return pack(values.T.unflatten(1, (-1, 8))[..., order].flatten(1), 4, 1)

    return {
        f"{name}.qweight": words(_unsigned(weight)),
        f"{name}.qzeros": words(_zeros(weight)),
        f"{name}.scales": weight.scales.T.half(),
    }


def awq() -> Mapping[str, FormatExample]:
    """Return the form of AWQ. Words hold eight outputs."""
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    scheme = WeightScheme(name="int4", group=(1, 32), symmetric=False)
    return {
        "GEMM": FormatExample(
            config={**config, "modules_to_not_convert": _PLAIN}, scheme=scheme, store=_store_awq, row_step=8
        )
    }


# --- bitsandbytes and MXFP4


def _state(weight: QuantizedWeight) -> dict[str, Any]:
    shape = list(weight.codes.shape)
    return {"quant_type": "nf4", "blocksize": weight.scheme.group[1], "dtype": "float32", "shape": shape}


def _store_nf4(name: str, weight: QuantizedWeight) -> Stored:
    codes = weight.codes.reshape(-1, 2)
    text = json.dumps(_state(weight)).encode()
    return {
        f"{name}.weight": (codes[:, :1] << 4) | codes[:, 1:],
        f"{name}.weight.absmax": weight.scales.reshape(-1),
        f"{name}.weight.quant_map": torch.tensor(ELEMENTS["nf4"].codebook),
        f"{name}.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
    }


def _store_bitsandbytes_int8(name: str, weight: QuantizedWeight) -> Stored:
    return {
        f"{name}.weight": weight.codes,
        f"{name}.SCB": weight.scales[:, 0] * 127,
        f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def bitsandbytes() -> Mapping[str, FormatExample]:
    """Return the forms of bitsandbytes with scales in float32."""
    return {
        "NF4": FormatExample(
            config={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            scheme=WeightScheme(name="nf4", group=(1, 32)),
            store=_store_nf4,
        ),
        "INT8": FormatExample(
            config={"quant_method": "bitsandbytes", "load_in_8bit": True},
            scheme=WeightScheme(name="int8"),
            store=_store_bitsandbytes_int8,
        ),
    }


def _store_mxfp4(name: str, weight: QuantizedWeight) -> Stored:
    codes = weight.codes.unflatten(-1, (-1, 32))
    return {
        f"{name}_blocks": codes[..., ::2] | (codes[..., 1::2] << 4),
        f"{name}_scales": (weight.scales.log2().round() + 127).to(torch.uint8),
    }


def mxfp4() -> Mapping[str, FormatExample]:
    """Return the form of GPT-OSS."""
    config = {"quant_method": "mxfp4", "modules_to_not_convert": _PLAIN}
    scheme = WeightScheme(name="mxfp4", group=(1, 32))
    return {"experts": FormatExample(config=config, scheme=scheme, store=_store_mxfp4, kind="experts")}


# --- GGUF


def _half(values: torch.Tensor) -> torch.Tensor:
    """Return numbers [..] as two bytes of float16 each, [.., 2]."""
    return values.half().unsqueeze(-1).contiguous().view(torch.uint8)


def _bytes_q4_0(weight: QuantizedWeight) -> torch.Tensor:
    codes = (weight.codes + 8).view(torch.uint8).unflatten(1, (-1, 32))
    return torch.cat((_half(weight.scales), codes[..., :16] | (codes[..., 16:] << 4)), -1)


def _bytes_q8_0(weight: QuantizedWeight) -> torch.Tensor:
    return torch.cat((_half(weight.scales), weight.codes.view(torch.uint8).unflatten(1, (-1, 32))), -1)


def _step(scales: torch.Tensor, groups: int, steps: int) -> torch.Tensor:
    """Return a power of two for each super-block of `groups`, of which its largest scale is at most `steps`."""
    largest = scales.abs().unflatten(1, (-1, groups)).amax(-1, keepdim=True)
    return torch.exp2((largest / steps).log2().ceil())


def _fit_q4_k(weight: QuantizedWeight) -> QuantizedWeight:
    assert weight.offsets is not None
    scales, offsets = (part.unflatten(1, (-1, 8)) for part in (weight.scales, weight.offsets))
    step = _step(weight.scales, 8, 32)
    scales = (scales / step).round().clamp(1, 63) * step
    minima = ((8 * scales - offsets) / (8 * step)).round().clamp(0, 63) * 8 * step
    return evolve(weight, scales=scales.flatten(1), offsets=(8 * scales - minima).flatten(1))


def _bytes_q4_k(weight: QuantizedWeight) -> torch.Tensor:
    assert weight.offsets is not None
    step = _step(weight.scales, 8, 32)
    scales, offsets = (part.unflatten(1, (-1, 8)) for part in (weight.scales, weight.offsets))
    factors = [(scales / step).round().int(), ((8 * scales - offsets) / (8 * step)).round().int()]
    low, high = (part.split(4, -1) for part in factors)
    first, second = (part[0] | (part[1] >> 4 << 6) for part in (low, high))
    packed = torch.cat((first, second, (low[1] & 15) | ((high[1] & 15) << 4)), -1).to(torch.uint8)
    codes = (weight.codes + 8).view(torch.uint8).unflatten(1, (-1, 4, 2, 32))
    quants = (codes[..., 0, :] | (codes[..., 1, :] << 4)).flatten(-2)
    return torch.cat((_half(step[..., 0]), _half(8 * step[..., 0]), packed, quants), -1)


def _fit_q6_k(weight: QuantizedWeight) -> QuantizedWeight:
    step = _step(weight.scales, 16, 64)
    scales = (weight.scales.unflatten(1, (-1, 16)) / step).round().clamp(1, 127) * step
    return evolve(weight, scales=scales.flatten(1))


def _bytes_q6_k(weight: QuantizedWeight) -> torch.Tensor:
    step = _step(weight.scales, 16, 64)
    scales = (weight.scales.unflatten(1, (-1, 16)) / step).round().to(torch.int8).view(torch.uint8)
    codes = (weight.codes + 32).view(torch.uint8).unflatten(1, (-1, 2, 4, 32))  # halves of four runs
    low = torch.stack([codes[..., run, :] & 15 | (codes[..., run + 2, :] & 15) << 4 for run in (0, 1)], -2)
    high = sum((codes[..., run, :] >> 4) << (2 * run) for run in range(4))
    assert isinstance(high, torch.Tensor)
    return torch.cat((low.flatten(-3), high.flatten(-2), scales, _half(step[..., 0])), -1)


def _gguf(kind: str, scheme: WeightScheme, size: int, to_bytes: Any, fit: Any = None) -> FormatExample:
    def config(names: tuple[str, ...]) -> Mapping[str, Any]:
        return {"quant_method": "gguf", "types": dict.fromkeys(names, kind)}

    def store(name: str, weight: QuantizedWeight) -> Stored:
        return {f"{name}.gguf": to_bytes(weight).flatten(1)}

    return FormatExample(config=config, scheme=scheme, store=store, fit=fit, column_step=size)


def gguf() -> Mapping[str, FormatExample]:
    """Return the types of blocks that stay quantized, as ggml-quants.c lays them out."""
    four = WeightScheme(name="int4", group=(1, 32), activation="int8")
    return {
        "Q4_0": _gguf("Q4_0", four, 32, _bytes_q4_0),
        "Q8_0": _gguf("Q8_0", WeightScheme(name="int8", group=(1, 32), activation="int8"), 32, _bytes_q8_0),
        "Q4_K": _gguf("Q4_K", evolve(four, symmetric=False), 256, _bytes_q4_k, _fit_q4_k),
        "Q6_K": _gguf("Q6_K", WeightScheme(name="int6", group=(1, 16), activation="int8"), 256, _bytes_q6_k, _fit_q6_k),
    }
