"""Descriptors of our weight formats, which import no torch."""

from __future__ import annotations

from typing import Any

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.weight_format import WeightFormatCapabilities
from slotline.registry.descriptor import Descriptor, Kind


def _offer(
    name: str,
    methods: tuple[str, ...],
    schemes: tuple[str, ...],
    factory: str,
    summary: str,
    files: tuple[str, ...] = (),
    **more: Any,
) -> Descriptor[WeightFormatCapabilities]:
    return Descriptor(
        kind=Kind.WEIGHT_FORMAT,
        name=name,
        capabilities=WeightFormatCapabilities(methods=Set(methods), schemes=Set(schemes), files=files, **more),
        factory=f"slotline.plugins.weight_formats.{factory}",
        summary=summary,
    )


compressed_tensors = _offer(
    "compressed_tensors",
    ("compressed-tensors", "sparseml"),
    ("int8", "int4", "fp8"),
    "compressed_tensors:CompressedTensors",
    "compressed-tensors: FP8 per tensor, channel and block, INT8, W8A16 and W4A16",
)
fp8 = _offer("fp8", ("fp8",), ("fp8",), "float8:Float8", "FP8 of DeepSeek (blocks) and AutoFP8 (per tensor)")
modelopt = _offer(
    "modelopt", ("modelopt",), ("fp8",), "float8:ModelOpt", "FP8 of NVIDIA's ModelOpt", ("hf_quant_config.json",)
)
gptq = _offer(
    "gptq", ("gptq",), ("int4", "int8"), "gptq:Gptq", "GPTQ, with and without act order", ("quantize_config.json",)
)
awq = _offer("awq", ("awq",), ("int4",), "awq:Awq", "AWQ in the layout of GEMM kernels", ("quant_config.json",))
bitsandbytes = _offer(
    "bitsandbytes", ("bitsandbytes",), ("nf4", "int8"), "bitsandbytes:BitsAndBytes", "NF4 and INT8 of bitsandbytes"
)
mxfp4 = _offer("mxfp4", ("mxfp4",), ("mxfp4",), "mxfp4:Mxfp4", "MXFP4 experts of GPT-OSS")
gguf = _offer(
    "gguf",
    ("gguf",),
    ("int4", "int6", "int8"),
    "gguf.reader:Gguf",
    "GGUF files: Q4_0, Q8_0, Q4_K and Q6_K stay as they are, other types are dequantized",
    suffixes=(".gguf",),
)
online = _offer(
    "online",
    ("int8", "int4", "fp8"),
    ("int8", "int4", "fp8"),
    "online:Online",
    "quantizes plain weights at load: int8 and fp8 per output, int4 in groups of 32 inputs",
    online=Flag(True),
)
