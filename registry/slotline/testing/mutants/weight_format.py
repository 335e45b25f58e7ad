"""Broken weight formats, one bug each, and right ones that differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from slotline.registry.capability import Set
from slotline.registry.contracts import FormatExample, QuantizedWeight, WeightFormatContext, WeightScheme
from slotline.registry.errors import ModelError
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.mutants.weight_format_fields import MUTANTS as FIELDS
from slotline.testing.mutants.weight_format_fields import descriptor as gptq
from slotline.testing.reference import weight_format as reference
from slotline.testing.reference.weight_format import PlainCodes

Tensor = torch.Tensor


class OneArgument(PlainCodes):
    def read(self, name: str) -> QuantizedWeight:  # type: ignore[override]
        return super().read(name, "linear")


class NoExamples(PlainCodes):
    @staticmethod
    def examples() -> Mapping[str, FormatExample]:
        return {}


class NoOffsets(PlainCodes):
    def scaled(self, name: str, what: str, codes: Tensor) -> Tensor:
        found = super().scaled(name, what, codes)
        return found * 0 if what == "offsets" else found


class NegativeOffsets(PlainCodes):
    def scaled(self, name: str, what: str, codes: Tensor) -> Tensor:
        found = super().scaled(name, what, codes)
        return -found if what == "offsets" else found


class ScalesAreOffsets(PlainCodes):
    def scaled(self, name: str, what: str, codes: Tensor) -> Tensor:
        return super().scaled(name, "scales", codes)


class NoOrder(PlainCodes):
    def read(self, name: str, kind: str) -> QuantizedWeight:
        found = super().read(name, kind)
        if found.g_idx is None:
            return found
        return attrs.evolve(found, g_idx=found.g_idx.sort().values)


class SwappedNibbles(PlainCodes):
    def codes(self, name: str) -> Tensor:
        codes = super().codes(name)
        pairs = self.scheme.element.bits == 4
        return codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if pairs else codes


class UnsignedCodes(PlainCodes):
    def codes(self, name: str) -> Tensor:
        codes = super().codes(name)
        return codes & 7 if self.scheme.name == "int4" else codes


class TransposedBlocks(PlainCodes):
    def scaled(self, name: str, what: str, codes: Tensor) -> Tensor:
        found = super().scaled(name, what, codes)
        return found.T.reshape(found.shape) if self.scheme.granularity == "block" else found


class DoubleScales(PlainCodes):
    def scaled(self, name: str, what: str, codes: Tensor) -> Tensor:
        return super().scaled(name, what, codes).double()


class OtherScheme(PlainCodes):
    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        found = super().scheme_of(name, kind)
        return None if found is None else attrs.evolve(found, symmetric=True)


class ClaimsPlain(PlainCodes):
    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        return self.scheme


class WritesTensors(PlainCodes):
    def scaled(self, name: str, what: str, codes: Tensor) -> Tensor:
        return super().scaled(name, what, codes).mul_(1.0001)


class Noise(PlainCodes):
    def scaled(self, name: str, what: str, codes: Tensor) -> Tensor:
        found = super().scaled(name, what, codes)
        return found * (1 + torch.rand_like(found) * 1e-7)


class ReadsEverything(PlainCodes):
    def __init__(self, context: WeightFormatContext) -> None:
        super().__init__(context)
        for name in self.tensors.stored:
            self.tensors.read(name)


class FirstExpert(PlainCodes):
    def scaled(self, name: str, what: str, codes: Tensor) -> Tensor:
        found = super().scaled(name, what, codes)
        return found[:1].expand_as(found).contiguous() if found.dim() == 3 else found


class LosesLastInput(PlainCodes):
    def codes(self, name: str) -> Tensor:
        codes = super().codes(name).clone()
        if codes.shape[-1] % 64 and not codes.dtype.is_floating_point:
            codes[..., -1] = 0
        return codes


class WholeBlocks(PlainCodes):
    def scaled(self, name: str, what: str, codes: Tensor) -> Tensor:
        found = super().scaled(name, what, codes)
        rows = self.scheme.group[0]
        if rows > 1 and codes.shape[-2] % rows and found.shape[-2] > 1:
            found = torch.cat((found[..., :-1, :], found[..., -2:-1, :]), -2)
        return found


class SymmetricRange(PlainCodes):
    def codes(self, name: str) -> Tensor:
        codes = super().codes(name)
        return codes.clamp(min=-self.scheme.element.high) if self.scheme.name == "int8" else codes


class NoSubnormals(PlainCodes):
    def codes(self, name: str) -> Tensor:
        codes = super().codes(name)
        if self.scheme.name != "fp8":
            return codes
        return torch.where(codes.float().abs() < 2.0**-6, 0.0, codes.float()).to(codes.dtype)


class LastGroup(PlainCodes):
    def scaled(self, name: str, what: str, codes: Tensor) -> Tensor:
        found = super().scaled(name, what, codes)
        return found.index_select(-1, torch.arange(found.shape[-1]).clamp(max=11))


class OneFile(PlainCodes):
    def get(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        files = {tensor.file for tensor in self.tensors.stored.values()}
        if self.tensors.stored[name].file != min(files) if name in self.tensors.stored else False:
            raise ModelError(f"there is no tensor {name}", fix="download the checkpoint again")
        return super().get(name, dtype, shape)


class MissingIsOne(PlainCodes):
    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        return self.scheme if f"{name}.codes" in self.tensors.stored else None

    def scaled(self, name: str, what: str, codes: Tensor) -> Tensor:
        if f"{name}.{what}" in self.tensors.stored:
            return super().scaled(name, what, codes)
        return torch.ones(*codes.shape[:-2], *self.scheme.scale_shape(*codes.shape[-2:]))


class KeyErrors(PlainCodes):
    def get(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        if name not in self.tensors.stored:
            raise KeyError(name)
        return super().get(name, dtype, shape)


class Nameless(PlainCodes):
    def get(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> Tensor:
        if name not in self.tensors.stored:
            raise ModelError("a tensor is missing", fix="download the checkpoint again")
        return super().get(name, dtype, shape)


class AnyShape(PlainCodes):
    def scaled(self, name: str, what: str, codes: Tensor) -> Tensor:
        found = self.get(f"{name}.{what}", torch.float32)
        rows, columns = self.scheme.scale_shape(*codes.shape[-2:])
        spread = torch.zeros(*codes.shape[:-2], rows, columns)
        rows, columns = min(rows, found.shape[-2]), min(columns, found.shape[-1])
        spread[..., :rows, :columns] = found[..., :rows, :columns]
        return spread


class AnyType(PlainCodes):
    def codes(self, name: str) -> Tensor:
        if f"{name}.codes" not in self.tensors.stored:
            raise ModelError(f"there is no tensor {name}.codes", fix="download the checkpoint again")
        return self.tensors.read(f"{name}.codes").to(getattr(torch, self.scheme.element.codes))


class Swallows(PlainCodes):
    def scaled(self, name: str, what: str, codes: Tensor) -> Tensor:
        if f"{name}.{what}" not in self.tensors.stored:
            return super().scaled(name, what, codes)
        try:
            self.tensors.read(f"{name}.{what}")
        except ModelError:
            return torch.ones(*codes.shape[:-2], *self.scheme.scale_shape(*codes.shape[-2:]))
        return super().scaled(name, what, codes)


class Tires(PlainCodes):
    reads = 0

    def scaled(self, name: str, what: str, codes: Tensor) -> Tensor:
        self.reads += 1
        found = super().scaled(name, what, codes)
        return found if self.reads <= 20 else found * 1.5


def _mutant(name: str, summary: str, level: Level, factory: Any, **offer: Any) -> Mutant:
    changed = attrs.evolve(
        reference.descriptor,
        name=f"mutant_{name.replace('-', '_')}",
        summary=summary,
        factory=factory,
        capabilities=attrs.evolve(reference.descriptor.capabilities, **offer),
    )
    return Mutant(name, summary, level, changed)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("one-argument", "read takes no kind", Level.CONTRACT, OneArgument),
    _mutant("no-examples", "has no examples", Level.CONTRACT, NoExamples),
    _mutant("claims-all", "takes checkpoints of every method", Level.CONTRACT, PlainCodes, methods=Set(None)),
    _mutant("claims-other", "its examples are of another method", Level.CONTRACT, PlainCodes, methods=Set(("other",))),
    _mutant("fewer-schemes", "gives undeclared schemes", Level.CONTRACT, PlainCodes, schemes=Set(("int8",))),
    _mutant("no-offsets", "leaves zero points out", Level.NUMERICS, NoOffsets),
    _mutant("negative-offsets", "adds zero points with the wrong sign", Level.NUMERICS, NegativeOffsets),
    _mutant("scales-are-offsets", "reads scales in place of offsets", Level.NUMERICS, ScalesAreOffsets),
    _mutant("no-order", "leaves act order out", Level.NUMERICS, NoOrder),
    _mutant("swapped-nibbles", "changes the two codes of a byte", Level.NUMERICS, SwappedNibbles),
    _mutant("unsigned-codes", "loses the sign of codes", Level.NUMERICS, UnsignedCodes),
    _mutant("transposed-blocks", "reads the scales of blocks by columns", Level.NUMERICS, TransposedBlocks),
    _mutant("double-scales", "gives scales in float64", Level.NUMERICS, DoubleScales),
    _mutant("other-scheme", "announces another scheme than it reads", Level.NUMERICS, OtherScheme),
    _mutant("claims-plain", "gives plain modules a scheme", Level.NUMERICS, ClaimsPlain),
    _mutant("writes-tensors", "writes into the checkpoint's tensors", Level.NUMERICS, WritesTensors),
    _mutant("noise", "gives other bits each time", Level.NUMERICS, Noise),
    _mutant("reads-everything", "reads the whole checkpoint at once", Level.NUMERICS, ReadsEverything),
    _mutant("first-expert", "takes the first expert's scales for all", Level.NUMERICS, FirstExpert),
    _mutant("loses-last-input", "an odd last input is zero", Level.HOSTILE, LosesLastInput),
    _mutant("whole-blocks", "a last block of fewer outputs gets its neighbour's scale", Level.HOSTILE, WholeBlocks),
    _mutant("symmetric-range", "takes the lowest code for the one above it", Level.NUMERICS, SymmetricRange),
    _mutant("no-subnormals", "takes small float8 numbers for zero", Level.NUMERICS, NoSubnormals),
    _mutant("twelve-groups", "takes the twelfth group's scale for all later ones", Level.NUMERICS, LastGroup),
    _mutant("one-file", "reads the first file alone", Level.HOSTILE, OneFile),
    _mutant("missing-is-one", "takes one for scales that are missing", Level.HOSTILE, MissingIsOne),
    _mutant("key-errors", "raises KeyError for a missing tensor", Level.HOSTILE, KeyErrors),
    _mutant("nameless", "does not name a missing tensor", Level.HOSTILE, Nameless),
    _mutant("any-shape", "cuts scales of the wrong shape, or fills them up", Level.HOSTILE, AnyShape),
    _mutant("any-type", "converts codes of another dtype", Level.HOSTILE, AnyType),
    _mutant("swallows", "takes one for scales that cannot be read", Level.HOSTILE, Swallows),
    *FIELDS,
    _mutant("tires", "gives other scales after 20 reads", Level.STATEFUL, Tires),
)

CORRECT: tuple[Correct, ...] = (
    Correct("canonical tensors are stored as they are", reference.descriptor),
    Correct("two codes are packed in a byte", reference.packed_pairs),
    Correct("GPTQ of eight bits, every field judged", gptq),
)
