"""Broken readers of GPTQ checkpoints, written for clarity: each ignores a field of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from slotline.registry.capability import Set
from slotline.registry.contracts import (
    FormatExample,
    QuantizedWeight,
    WeightFormatCapabilities,
    WeightFormatContext,
    WeightScheme,
)
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import ModelError
from slotline.testing.check import Level
from slotline.testing.mutants import Mutant

_FIX = "download the checkpoint again"
_USUAL: Mapping[str, tuple[Any, ...]] = {
    "bits": (8,),
    "checkpoint_format": (None, "gptq", "gptq_v2"),
    "is_marlin_format": (None, False),
    "pack_dtype": (None, "int32"),
    "dynamic": (None,),
    "adapter": (None,),
    "rotation": (None,),
}


class ReadsGptq:
    """Reader of GPTQ with eight bits in groups: one code a byte of its words, four to a word along the inputs."""

    usual: Mapping[str, tuple[Any, ...]] = _USUAL

    def __init__(self, context: WeightFormatContext) -> None:
        self.tensors, self.config = context.tensors, context.config
        for name, values in self.usual.items():
            if self.config.get(name) not in values:
                raise ModelError(f"{name} is {self.config.get(name)!r}, read is {values}", fix=_FIX)
        self.group = int(self.config["group_size"])

    @staticmethod
    def examples() -> Mapping[str, FormatExample]:
        config = {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": 32,
            "sym": False,
            "desc_act": False,
            "checkpoint_format": "gptq",
            "modules_to_not_convert": ["lm_head"],
        }
        scheme = WeightScheme(name="int8", group=(1, 32), symmetric=False)
        return {"8 bits": FormatExample(config=config, scheme=scheme, store=_store, row_step=4, column_step=4)}

    def symmetric(self) -> bool:
        """Return True if there are no zero points."""
        return bool(self.config.get("sym", True))

    def ordered(self) -> bool:
        """Return True for an order of the inputs."""
        return bool(self.config.get("desc_act", False))

    def plain(self, name: str) -> bool:
        """Return True for a module that the configuration leaves out."""
        return any(f".{left}." in f".{name}." for left in self.config.get("modules_to_not_convert") or ())

    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        if self.plain(name) or f"{name}.qweight" not in self.tensors.stored:
            return None
        return WeightScheme(name="int8", group=(1, self.group), symmetric=self.symmetric(), act_order=self.ordered())

    def read(self, name: str, kind: str) -> QuantizedWeight:
        scheme = self.scheme_of(name, kind)
        assert scheme is not None
        words = self.get(f"{name}.qweight", torch.int32, None)  # [inputs / 4, outputs]
        inputs, outputs = words.shape[0] * 4, words.shape[1]
        codes = (_bytes(words.T.contiguous()) - 128).to(torch.int8)
        groups = scheme.scale_shape(outputs, inputs)[1]
        scales = self.get(f"{name}.scales", torch.float16, (groups, outputs)).float().T.contiguous()
        points = _bytes(self.get(f"{name}.qzeros", torch.int32, (groups, outputs // 4)))
        points = ((points + self.shift()) % 256 - 128).T
        order = self.get(f"{name}.g_idx", torch.int32, (inputs,))
        self.judge(name, points, order)
        offsets = None if self.symmetric() else -points.float() * scales
        return QuantizedWeight(
            scheme=scheme, codes=codes, scales=scales, offsets=offsets, g_idx=order if self.ordered() else None
        )

    def shift(self) -> int:
        """Return what is added to stored zero points."""
        return 0 if self.config.get("checkpoint_format") == "gptq_v2" else 1

    def judge(self, name: str, points: torch.Tensor, order: torch.Tensor) -> None:
        """Refuse tensors that contradict the configuration."""
        if self.symmetric() and bool((points != 0).any()):
            raise ModelError(f"{name}.qzeros has zero points, and sym is true", fix=_FIX)
        if not self.ordered() and not torch.equal(order, torch.arange(len(order), dtype=torch.int32) // self.group):
            raise ModelError(f"{name}.g_idx reorders inputs, and desc_act is false", fix=_FIX)

    def get(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None) -> torch.Tensor:
        """Return a tensor of a dtype and a shape."""
        if name not in self.tensors.stored:
            raise ModelError(f"there is no tensor {name}", fix=_FIX)
        tensor = self.tensors.read(name)
        if tensor.dtype != dtype or (shape is not None and tuple(tensor.shape) != shape):
            raise ModelError(f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {shape}", fix=_FIX)
        return tensor


def _bytes(words: torch.Tensor) -> torch.Tensor:
    """Return the four unsigned bytes of each word [.., n] as int32 [.., 4 * n]."""
    return words.flatten().view(torch.uint8).view(*words.shape[:-1], -1).int()


def _words(codes: torch.Tensor) -> torch.Tensor:
    return codes.to(torch.uint8).flatten().view(torch.int32).view(*codes.shape[:-1], -1)


def _store(name: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    assert weight.offsets is not None
    points = (-weight.offsets / weight.scales).round().int() + 128
    inputs = weight.codes.shape[1]
    return {
        f"{name}.qweight": _words(weight.codes.int() + 128).T.contiguous(),
        f"{name}.qzeros": _words(((points - 1) % 256).T),
        f"{name}.scales": weight.scales.T.half().contiguous(),
        f"{name}.g_idx": torch.arange(inputs, dtype=torch.int32) // 32,
    }


class OneVersion(ReadsGptq):
    def shift(self) -> int:
        return 1


class NoJudgement(ReadsGptq):
    def judge(self, name: str, points: torch.Tensor, order: torch.Tensor) -> None:
        pass


class NeverOrdered(ReadsGptq):
    def ordered(self) -> bool:
        return False


class WholeNames(ReadsGptq):
    def plain(self, name: str) -> bool:
        return name in (self.config.get("modules_to_not_convert") or ())


class NoGroupSize(ReadsGptq):
    def __init__(self, context: WeightFormatContext) -> None:
        super().__init__(context)
        self.group = 32


class RefusesUnknownFields(ReadsGptq):
    def __init__(self, context: WeightFormatContext) -> None:
        super().__init__(context)
        known = {*_USUAL, "quant_method", "group_size", "sym", "desc_act", "modules_to_not_convert"}
        if strange := set(context.config) - known:
            raise ModelError(f"{min(strange)} is unknown", fix="leave it out")


class Nameless(ReadsGptq):
    def __init__(self, context: WeightFormatContext) -> None:
        try:
            super().__init__(context)
        except ModelError as error:
            raise ModelError("the layout is unknown", fix=_FIX) from error


def _ignoring(*fields: str) -> type[ReadsGptq]:
    kept = {name: values for name, values in _USUAL.items() if name not in fields}
    return type("Ignoring", (ReadsGptq,), {"usual": kept})


descriptor = Descriptor(
    kind=Kind.WEIGHT_FORMAT,
    name="plain_gptq",
    capabilities=WeightFormatCapabilities(methods=Set(("gptq",)), schemes=Set(("int8",))),
    factory=ReadsGptq,
    summary="reads GPTQ of eight bits",
)


def _mutant(name: str, summary: str, factory: Any) -> Mutant:
    changed = attrs.evolve(descriptor, name=f"mutant_{name.replace('-', '_')}", summary=summary, factory=factory)
    return Mutant(name, summary, Level.HOSTILE, changed)


MUTANTS: tuple[Mutant, ...] = (
    *(
        _mutant(f"gptq-{short}", f"a reader of GPTQ that ignores {field}", _ignoring(field))
        for short, field in (
            ("bits", "bits"),
            ("marlin", "is_marlin_format"),
            ("formats", "checkpoint_format"),
            ("words", "pack_dtype"),
            ("dynamic", "dynamic"),
            ("adapter", "adapter"),
            ("rotation", "rotation"),
        )
    ),
    _mutant("gptq-one-version", "reads zero points of version 2 as those of version 1", OneVersion),
    _mutant("gptq-credulous", "lets tensors contradict sym and desc_act", NoJudgement),
    _mutant("gptq-never-ordered", "ignores desc_act", NeverOrdered),
    _mutant("gptq-whole-names", "leaves modules plain by their whole names only", WholeNames),
    _mutant("gptq-group-of-32", "ignores group_size", NoGroupSize),
    _mutant("gptq-unknown-fields", "refuses fields that say nothing of a weight", RefusesUnknownFields),
    _mutant("gptq-nameless", "does not say which field it refuses", Nameless),
)
