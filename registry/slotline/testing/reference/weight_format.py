"""Weight format that stores canonical tensors as they are, and one that packs two codes of four bits in a byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slotline.registry.capability import Set
from slotline.registry.contracts import (
    ELEMENTS,
    FormatExample,
    QuantizedWeight,
    WeightFormatCapabilities,
    WeightFormatContext,
    WeightScheme,
)
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import ModelError

_FIX = "download the checkpoint again"
SCHEMES: Mapping[str, WeightScheme] = {
    "int8 per output": WeightScheme(name="int8"),
    "int8 per tensor": WeightScheme(name="int8", group=(0, 0)),
    "int4 in groups": WeightScheme(name="int4", group=(1, 32)),
    "int4 with zero points": WeightScheme(name="int4", group=(1, 32), symmetric=False),
    "int4 with act order": WeightScheme(name="int4", group=(1, 32), act_order=True),
    "int6 in groups": WeightScheme(name="int6", group=(1, 16)),
    "fp8 in blocks": WeightScheme(name="fp8", group=(16, 32)),
    "nf4 in groups": WeightScheme(name="nf4", group=(1, 64)),
    "mxfp4 experts": WeightScheme(name="mxfp4", group=(1, 32)),
}
_KEYS = ("name", "group", "symmetric", "act_order")


class PlainCodes:
    """Reader of canonical tensors, which are called ``codes``, ``scales``, ``offsets`` and ``g_idx``."""

    def __init__(self, context: WeightFormatContext) -> None:
        self.context, self.tensors, config = context, context.tensors, context.config
        self.scheme = WeightScheme(**{**{key: config[key] for key in _KEYS}, "group": tuple(config["group"])})

    @staticmethod
    def examples() -> Mapping[str, FormatExample]:
        return {name: _example("plain_codes", name, scheme, _store) for name, scheme in SCHEMES.items()}

    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        return self.scheme if f"{name}.scales" in self.tensors.stored else None

    def read(self, name: str, kind: str) -> QuantizedWeight:
        codes = self.codes(name)
        return QuantizedWeight(
            scheme=self.scheme,
            codes=codes,
            scales=self.scaled(name, "scales", codes),
            offsets=None if self.scheme.symmetric else self.scaled(name, "offsets", codes),
            g_idx=self.get(f"{name}.g_idx", torch.int32, (codes.shape[-1],)) if self.scheme.act_order else None,
        )

    def codes(self, name: str) -> torch.Tensor:
        """Return the codes."""
        return self.get(f"{name}.codes", getattr(torch, self.scheme.element.codes))

    def scaled(self, name: str, what: str, codes: torch.Tensor) -> torch.Tensor:
        """Return scales or offsets."""
        shape = (*codes.shape[:-2], *self.scheme.scale_shape(*codes.shape[-2:]))
        return self.get(f"{name}.{what}", torch.float32, shape)

    def get(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return a tensor of a dtype and a shape."""
        if name not in self.tensors.stored:
            raise ModelError(f"there is no tensor {name}", fix=_FIX)
        tensor = self.tensors.read(name)
        if tensor.dtype != dtype or (shape is not None and tuple(tensor.shape) != shape):
            raise ModelError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {shape}", fix=_FIX)
        return tensor


class PackedPairs(PlainCodes):
    """Reader of codes of four bits, two in a byte, the first one high."""

    @staticmethod
    def examples() -> Mapping[str, FormatExample]:
        found = {name: scheme for name, scheme in SCHEMES.items() if scheme.name == "int4"}
        return {name: _example("packed_pairs", name, scheme, _store_pairs) for name, scheme in found.items()}

    def codes(self, name: str) -> torch.Tensor:
        pairs = self.get(f"{name}.codes", torch.uint8)
        return torch.stack((pairs >> 4, pairs & 15), -1).flatten(-2).to(torch.int8) - 8


def _example(method: str, name: str, scheme: WeightScheme, store: Any) -> FormatExample:
    config = {"quant_method": method, **{key: getattr(scheme, key) for key in _KEYS}}
    kind: Any = "experts" if name.endswith("experts") else "linear"
    return FormatExample(config=config, scheme=scheme, store=store, kind=kind, column_step=2)


def _store(name: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    parts = {part: getattr(weight, part) for part in ("codes", "scales", "offsets", "g_idx")}
    return {f"{name}.{part}": tensor for part, tensor in parts.items() if tensor is not None}


def _store_pairs(name: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    codes = (weight.codes + 8).to(torch.uint8)
    return {**_store(name, weight), f"{name}.codes": (codes[:, ::2] << 4) | codes[:, 1::2]}


descriptor = Descriptor(
    kind=Kind.WEIGHT_FORMAT,
    name="plain_codes",
    capabilities=WeightFormatCapabilities(methods=Set(("plain_codes",)), schemes=Set(tuple(ELEMENTS))),
    factory=PlainCodes,
    summary="stores canonical tensors as they are",
)
packed_pairs = Descriptor(
    kind=Kind.WEIGHT_FORMAT,
    name="packed_pairs",
    capabilities=WeightFormatCapabilities(methods=Set(("packed_pairs",)), schemes=Set(("int4",))),
    factory=PackedPairs,
    summary="stores two codes of four bits in a byte",
)
