"""Quantized weights, version 1 (provisional): schemes, and the canonical tensors that every weight format gives.

A weight format turns what a file holds into a `QuantizedWeight`. A linear or experts plugin takes a `QuantizedWeight`
of a scheme that it declares. So every plugin works with every format of the same scheme.

**Canonical tensors.** One code a byte, in all schemes. The weight is ``value(code) * scale + offset``. Whole numbers
are signed and centred: an unsigned four-bit code of a file is stored minus 8, an eight-bit one minus 128. An integer
zero point z of a file is the offset ``-z * scale``, with z centred in the same way. Scales and offsets are float32,
those of MXFP4 too, where they are powers of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve, field, frozen

from slotline.registry.declared import declared
from slotline.registry.errors import ModelError

if TYPE_CHECKING:
    import torch

    from slotline.registry.contracts.experts import Experts
    from slotline.registry.contracts.linear import Linear
    from slotline.registry.contracts.weight_format import WeightFormat


@frozen(kw_only=True)
class Element:
    """Numbers of a scheme.

    Attributes:
        bits: bits of a code in a file.
        codes: torch dtype of the canonical codes, by name.
        low, high: range of the codes that are whole numbers or indices.
        codebook: the number of each code, for codes that are indices. Empty for others.
    """

    bits: int
    codes: str
    low: int = 0
    high: int = 0
    codebook: tuple[float, ...] = ()


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

ELEMENTS: Mapping[str, Element] = MappingProxyType(
    {
        "int8": Element(bits=8, codes="int8", low=-128, high=127),
        "int6": Element(bits=6, codes="int8", low=-32, high=31),
        "int4": Element(bits=4, codes="int8", low=-8, high=7),
        "fp8": Element(bits=8, codes="float8_e4m3fn"),
        "mxfp4": Element(bits=4, codes="uint8", high=15, codebook=(*_E2M1, *(-value for value in _E2M1))),
        "nf4": Element(bits=4, codes="uint8", high=15, codebook=_NF4),
    }
)
"""The names that a `WeightScheme` may have."""


@frozen(kw_only=True, field_transformer=declared)
class WeightScheme:
    """Form of a quantized weight [out_features, in_features]. Equal schemes are negotiated together.

    Attributes:
        name: a key of `ELEMENTS`.
        group: (rows, columns) of the weight that share a scale. 0 stands for all of them: (0, 0) is one scale for the
            tensor, (1, 0) one for each output, (1, 32) one for each 32 inputs of an output, (128, 128) one for a block.
        symmetric: True if there are no offsets.
        act_order: True if `QuantizedWeight.g_idx` says which group each input belongs to.
        activation: what the checkpoint's maker let activations be rounded to, "" for nothing. It permits a plugin to
            round them. A plugin that does not is closer to the dequantized model.
        dynamic: True if the activations' scale is taken from each token, False if the checkpoint has `input_scale`.
    """

    name: str = field()
    group: tuple[int, int] = (1, 0)
    symmetric: bool = True
    act_order: bool = False
    activation: Literal["", "int8", "fp8"] = ""
    dynamic: bool = True

    @name.validator
    def _known(self, _attribute: object, value: str) -> None:
        if value not in ELEMENTS:
            raise ModelError(f"weight scheme {value!r} is not known", fix=f"use one of {', '.join(ELEMENTS)}")

    @property
    def element(self) -> Element:
        """The scheme's numbers."""
        return ELEMENTS[self.name]

    @property
    def granularity(self) -> str:
        """``tensor``, ``channel``, ``group`` or ``block``."""
        rows, columns = self.group
        if columns == 0:
            return "channel" if rows == 1 else "tensor"
        return "group" if rows == 1 else "block"

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Return the shape of the scales of a weight [out_features, in_features]."""
        rows, columns = self.group
        return ceil(out_features / (rows or out_features)), ceil(in_features / (columns or in_features))

    def num_bytes(self, out_features: int, in_features: int, scale_bytes: int = 4) -> int:
        """Return the bytes of the codes, packed as tightly as in a file, with scales and offsets."""
        rows, columns = self.scale_shape(out_features, in_features)
        scales = rows * columns * scale_bytes * (1 if self.symmetric else 2)
        return ceil(out_features * in_features * self.element.bits / 8) + scales

    def describe(self) -> str:
        """Return the scheme in a few words, for tables."""
        rows, columns = self.group
        size = {"group": f"in groups of {columns}", "block": f"in blocks of {rows}x{columns}"}
        parts = [f"{self.name} {size.get(self.granularity, f'per {self.granularity}')}"]
        parts += [] if self.symmetric else ["offsets"]
        parts += ["act order"] if self.act_order else []
        parts += [f"activations {self.activation}" + ("" if self.dynamic else " static")] if self.activation else []
        return ", ".join(parts)


@frozen(kw_only=True, eq=False)
class QuantizedWeight:
    """Canonical tensors of one weight [out_features, in_features], or of all experts with a first dimension of experts.

    Attributes:
        scheme: its form.
        codes: [.., out_features, in_features] of the dtype `Element.codes`, one code a byte.
        scales: [.., row groups, column groups] float32, see `WeightScheme.scale_shape`.
        offsets: of the shape of the scales, float32. None for a symmetric scheme.
        g_idx: [in_features] int32, the column group of each input. None without act order.
        input_scale: scalar float32, the scale of activations. None if it is dynamic.
    """

    scheme: WeightScheme
    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    g_idx: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        """Number of outputs."""
        return int(self.codes.shape[-2])

    @property
    def in_features(self) -> int:
        """Number of inputs."""
        return int(self.codes.shape[-1])

    def dequantize(self, dtype: Any = None) -> torch.Tensor:
        """Return the weight [.., out_features, in_features], by default in float32. This defines the scheme."""
        import torch

        values = self.values()
        values *= self._expanded(self.scales)
        if self.offsets is not None:
            values += self._expanded(self.offsets)
        return values.to(torch.float32 if dtype is None else dtype)

    def values(self) -> torch.Tensor:
        """Return the number of each code before scaling, float32, as a new tensor of the shape of the codes."""
        import torch

        if book := self.scheme.element.codebook:
            return torch.tensor(book, device=self.codes.device)[self.codes.long()]
        return self.codes.float() if self.codes.dtype != torch.float32 else self.codes.clone()

    def to(self, device: Any) -> QuantizedWeight:
        """Return the same weight on a device."""
        moved = {name: None if tensor is None else tensor.to(device) for name, tensor in self._tensors().items()}
        return QuantizedWeight(scheme=self.scheme, **moved)  # type: ignore[arg-type]

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Return outputs `start` to `stop` - 1, a shard of the weight.

        Raises:
            ModelError: if the border lies inside a block of rows.
        """
        size = self.scheme.group[0]
        _refuse_border(size, start, stop, self.out_features, "outputs")
        first, last = (0, self.scales.shape[-2]) if size == 0 else (start // size, ceil(stop / size))
        return self._cut(-2, (start, stop), (first, last))

    def columns(self, start: int, stop: int) -> QuantizedWeight:
        """Return inputs `start` to `stop` - 1, a shard of the weight.

        With act order the shard keeps the scales of all groups.

        Raises:
            ModelError: if the border lies inside a group of columns.
        """
        size = self.scheme.group[1]
        if self.g_idx is not None:
            return evolve(self, codes=self.codes[..., start:stop].contiguous(), g_idx=self.g_idx[start:stop])
        _refuse_border(size, start, stop, self.in_features, "inputs")
        first, last = (0, self.scales.shape[-1]) if size == 0 else (start // size, ceil(stop / size))
        return self._cut(-1, (start, stop), (first, last))

    def check(self, name: str) -> None:
        """Check that the tensors fit each other.

        Args:
            name: the weight's name, for the message.

        Raises:
            ModelError: with the name, the numbers and a remedy.
        """
        _check(self, name)

    def _cut(self, dim: int, codes: tuple[int, int], scales: tuple[int, int]) -> QuantizedWeight:
        def scaled(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.narrow(dim, scales[0], scales[1] - scales[0]).contiguous()

        return evolve(
            self,
            codes=self.codes.narrow(dim, codes[0], codes[1] - codes[0]).contiguous(),
            scales=scaled(self.scales),
            offsets=None if self.offsets is None else scaled(self.offsets),
        )

    def _expanded(self, scales: torch.Tensor) -> torch.Tensor:
        """Return scales or offsets in a shape that multiplies the codes, by group rows and columns."""
        rows, columns = self.scheme.group
        if rows > 1:
            scales = scales.repeat_interleave(rows, -2)[..., : self.out_features, :]
        if self.g_idx is not None:
            return scales[..., self.g_idx.long()]
        if columns > 0:
            scales = scales.repeat_interleave(columns, -1)[..., : self.in_features]
        return scales

    def _tensors(self) -> dict[str, torch.Tensor | None]:
        names = ("codes", "scales", "offsets", "g_idx", "input_scale")
        return {name: getattr(self, name) for name in names}


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return several weights of the same scheme and inputs as one, side by side along the outputs.

    Scales of whole tensors become scales of outputs, so that each part keeps its own.

    Raises:
        ModelError: if they do not fit together.
    """
    import torch

    first = weights[0]
    same = all(w.scheme == first.scheme and w.in_features == first.in_features for w in weights)
    size = first.scheme.group[0]
    aligned = size <= 1 or all(w.out_features % size == 0 for w in weights[:-1])
    if not same or not aligned or any(not _equal(w.g_idx, first.g_idx) for w in weights):
        raise ModelError(
            f"{len(weights)} quantized weights cannot be joined: "
            f"{'; '.join(f'{w.scheme.describe()} {list(w.codes.shape)}' for w in weights)}",
            fix="keep them apart",
        )
    if size == 0:
        weights = [_by_rows(w) for w in weights]

    def joined(name: str) -> torch.Tensor | None:
        parts = [getattr(w, name) for w in weights]
        return None if parts[0] is None else torch.cat(parts, -2)

    scales = [w.input_scale for w in weights if w.input_scale is not None]
    return QuantizedWeight(
        scheme=weights[0].scheme,
        codes=joined("codes"),  # type: ignore[arg-type]
        scales=joined("scales"),  # type: ignore[arg-type]
        offsets=joined("offsets"),
        g_idx=first.g_idx,
        input_scale=torch.stack(scales).max() if scales else None,
    )


def stack(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return the weights of experts, of one scheme and shape, as one with a first dimension of experts.

    Raises:
        ModelError: if they do not fit together.
    """
    import torch

    first = weights[0]
    if any(w.scheme != first.scheme or w.codes.shape != first.codes.shape for w in weights) or first.g_idx is not None:
        raise ModelError("experts have weights of several schemes or shapes", fix="use a checkpoint with equal experts")

    def stacked(name: str) -> torch.Tensor | None:
        parts = [getattr(w, name) for w in weights]
        return None if parts[0] is None else torch.stack(parts)

    return QuantizedWeight(
        scheme=first.scheme,
        codes=stacked("codes"),  # type: ignore[arg-type]
        scales=stacked("scales"),  # type: ignore[arg-type]
        offsets=stacked("offsets"),
        input_scale=stacked("input_scale"),
    )


@frozen(kw_only=True, field_transformer=declared)
class WeightModule:
    """Module of a model whose weight is quantized, or could be.

    Attributes:
        name: path of the module in the model.
        stored: the part that the names of its tensors in the files share, e.g. the path itself.
        kind: ``linear``, ``head`` for the output projection, or ``experts``.
        in_features, out_features: sizes. Of experts, those of the first product (gate and up together).
        experts: number of experts, 0 for others.
        interleaved, activation, constants, bias: of experts, as in `ExpertsContext` and `Experts.pack`.
    """

    name: str
    stored: str
    kind: Literal["linear", "head", "experts"] = "linear"
    in_features: int
    out_features: int
    experts: int = 0
    interleaved: bool = False
    activation: str = ""
    constants: tuple[tuple[str, float], ...] = ()
    bias: bool = False


@frozen(kw_only=True, eq=False)
class PlannedModule:
    """Module with the plugin that multiplies by its weight.

    Attributes:
        module: the module.
        scheme: the form of its weight.
        kernel: the built linear or experts plugin.
    """

    module: WeightModule
    scheme: WeightScheme
    kernel: Linear | Experts


@frozen(kw_only=True, eq=False)
class ModelWeights:
    """Quantized modules of a model that is loaded, and their reader.

    Attributes:
        format: the built weight format.
        online: True if it quantizes plain weights.
        method: the checkpoint's `quant_method`, or the value of `weights.quantize`.
        modules: by path of the module in the model.
    """

    format: WeightFormat
    online: bool
    modules: Mapping[str, PlannedModule]
    method: str = ""


def _refuse_border(size: int, start: int, stop: int, length: int, what: str) -> None:
    if size > 1 and (start % size or (stop % size and stop != length)):
        raise ModelError(
            f"{what} {start} to {stop} do not begin and end between groups of {size}",
            fix="use another number of shards",
        )


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    import torch

    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _by_rows(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a weight with one scale for its tensor with that scale for each output instead."""
    scheme = evolve(weight.scheme, group=(1, weight.scheme.group[1]))
    shape = (*weight.scales.shape[:-2], weight.out_features, weight.scales.shape[-1])
    offsets = None if weight.offsets is None else weight.offsets.expand(shape).contiguous()
    return evolve(weight, scheme=scheme, scales=weight.scales.expand(shape).contiguous(), offsets=offsets)


def _check(weight: QuantizedWeight, name: str) -> None:
    import torch

    scheme, element = weight.scheme, weight.scheme.element
    fix = "download the checkpoint again, or report the weight format that read it"
    if weight.codes.dtype != getattr(torch, element.codes) or weight.codes.dim() < 2:
        raise ModelError(
            f"{name}: codes of {scheme.describe()} are {weight.codes.dtype} {list(weight.codes.shape)}, expected "
            f"{element.codes} [out_features, in_features]",
            fix=fix,
        )
    out_features, in_features = weight.out_features, weight.in_features
    columns = scheme.group[1]
    if scheme.granularity == "group" and not scheme.act_order and in_features % columns:
        raise ModelError(
            f"{name}: {in_features} inputs are not divided by groups of {columns}", fix="use another group size"
        )
    leading = tuple(weight.codes.shape[:-2])
    wanted = (*leading, *scheme.scale_shape(out_features, in_features))
    for what, tensor in (("scales", weight.scales), ("offsets", weight.offsets)):
        if tensor is None:
            if what == "offsets" and scheme.symmetric:
                continue
            raise ModelError(f"{name}: {scheme.describe()} without {what}", fix=fix)
        columns_fit = scheme.act_order and tuple(tensor.shape[:-1]) == wanted[:-1]  # a shard keeps all groups
        if (tuple(tensor.shape) != wanted and not columns_fit) or tensor.dtype != torch.float32:
            raise ModelError(
                f"{name}: {what} of {scheme.describe()} are {tensor.dtype} {list(tensor.shape)}, expected float32 "
                f"{list(wanted)} for a weight {list(weight.codes.shape)}",
                fix=fix,
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{name}: {what} hold values that are not finite", fix=fix)
    _check_order(weight, name, fix)


def _check_order(weight: QuantizedWeight, name: str, fix: str) -> None:
    if weight.scheme.act_order != (weight.g_idx is not None):
        raise ModelError(f"{name}: {weight.scheme.describe()}, and g_idx is {weight.g_idx!r:.40}", fix=fix)
    if weight.g_idx is None:
        return
    groups = weight.scales.shape[-1]
    low, high = int(weight.g_idx.min()), int(weight.g_idx.max())
    if tuple(weight.g_idx.shape) != (weight.in_features,) or low < 0 or high >= groups:
        raise ModelError(
            f"{name}: g_idx has shape {list(weight.g_idx.shape)} and values {low} to {high}, expected "
            f"[{weight.in_features}] of values below {groups}",
            fix=fix,
        )
