"""Reader of compressed-tensors checkpoints (llm-compressor)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slotline.plugins.weight_formats.common import (
    Tensors,
    centred,
    examples_of,
    matches,
    refuse_fields,
    two_dimensional,
    unpack,
)
from slotline.registry.contracts.weight_format import WeightFormatContext
from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme
from slotline.registry.errors import ModelError

_PACKED = "pack-quantized"
_PLAIN = "dense"
_READ = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_DYNAMIC = (None, True, False)
_ORDERED = ("group", "dynamic", "true")
"""What `actorder` says where inputs are stored in an order of their own."""


class CompressedTensors:
    """Reader of one checkpoint. See `slotline.registry.contracts.weight_format.WeightFormat`.

    Raises:
        ModelError: if the configuration has a group that it cannot read.
    """

    examples = examples_of("compressed_tensors")

    def __init__(self, context: WeightFormatContext) -> None:
        self._config = context.config
        self._path = context.path
        self._tensors = Tensors(context.tensors, context.method)
        refuse_fields(context, {"transform_config": ({}, {"config_groups": {}})})
        sparse = self._config.get("sparsity_config")
        if isinstance(sparse, Mapping) and sparse.get("format", _PLAIN) != _PLAIN:
            refuse_fields(context, {"sparsity_config": ({},)})
        self._ignored = tuple(self._config.get("ignore") or ())
        groups = self._config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise ModelError(
                f"{context.path} holds quantized weights by its configuration, and config_groups is {groups!r:.60}",
                fix="download config.json again",
            )
        self._groups = dict(groups)
        for name, group in self._groups.items():
            self._check_group(name, group)

    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        if matches(name, self._ignored):
            return None
        group = self._group_of(name, kind)
        if group is None or self._format_of(group) == _PLAIN:
            return None
        ordered = self._tensors.has(f"{name}.weight_g_idx")
        if not ordered and str(group["weights"].get("actorder") or "").lower() in _ORDERED:
            self._tensors.missing(f"{name}.weight_g_idx")
        return _scheme(name, group, ordered=ordered)

    def read(self, name: str, kind: str) -> QuantizedWeight:
        scheme, group = self.scheme_of(name, kind), self._group_of(name, kind)
        assert scheme is not None
        assert group is not None
        if self._format_of(group) == _PACKED:
            return self._read_packed(name, scheme)
        dtype = torch.float8_e4m3fn if scheme.name == "fp8" else torch.int8
        codes = self._tensors.get(f"{name}.weight", (dtype,), (None, None))
        scales = self._scales(name, scheme, codes.shape)
        offsets = None
        if not scheme.symmetric:
            stored = self._tensors.get(f"{name}.weight_zero_point", (torch.int8,))
            zeros = two_dimensional(stored)
            if tuple(zeros.shape) not in ((1, 1), tuple(scales.shape)):
                self._tensors.wrong(
                    f"{name}.weight_zero_point", f"has shape {list(stored.shape)}, its scales {list(scales.shape)}"
                )
            offsets = -zeros.expand(scales.shape) * scales
        return QuantizedWeight(
            scheme=scheme, codes=codes, scales=scales, offsets=offsets, input_scale=self._input_scale(name, scheme)
        )

    def _read_packed(self, name: str, scheme: WeightScheme) -> QuantizedWeight:
        bits = scheme.element.bits
        shape = self._tensors.get(f"{name}.weight_shape", (), (2,))
        outputs, inputs = (int(size) for size in shape)
        words = -(-inputs * bits // 32)
        packed = self._tensors.get(f"{name}.weight_packed", (torch.int32,), (outputs, words))
        codes = centred(unpack(packed, bits, 1)[:, :inputs], bits)
        scales = self._scales(name, scheme, (outputs, inputs))
        offsets = None
        if not scheme.symmetric:
            shape = (-(-outputs * bits // 32), scales.shape[1])
            zeros = self._tensors.get(f"{name}.weight_zero_point", (torch.int32,), shape)
            unpacked = unpack(zeros, bits, 0)[:outputs]
            offsets = -centred(unpacked, bits).float() * scales
        order = self._tensors.get(f"{name}.weight_g_idx", (), (inputs,)).int() if scheme.act_order else None
        return QuantizedWeight(scheme=scheme, codes=codes, scales=scales, offsets=offsets, g_idx=order)

    def _scales(self, name: str, scheme: WeightScheme, shape: Any) -> torch.Tensor:
        scales = two_dimensional(self._tensors.get(f"{name}.weight_scale"))
        wanted = scheme.scale_shape(*shape)
        if tuple(scales.shape) != wanted:
            self._tensors.wrong(
                f"{name}.weight_scale",
                f"has shape {list(scales.shape)}, and {scheme.describe()} of {list(shape)} needs {list(wanted)}",
            )
        return scales

    def _input_scale(self, name: str, scheme: WeightScheme) -> torch.Tensor | None:
        if not scheme.activation or scheme.dynamic:
            return None
        scale: torch.Tensor = self._tensors.get(f"{name}.input_scale").float().reshape(())
        return scale

    def _group_of(self, name: str, kind: str) -> Mapping[str, Any] | None:
        for group in self._groups.values():
            targets = tuple(group.get("targets") or ())
            if "Linear" in targets or matches(name, (target for target in targets if target != "Linear")):
                return group  # type: ignore[no-any-return]
        return None

    def _format_of(self, group: Mapping[str, Any]) -> str:
        return str(group.get("format") or self._config.get("format") or _PACKED)

    def _check_group(self, name: str, group: Any) -> None:
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ModelError(
                f"{self._path} holds quantized weights by its configuration, and config_groups.{name} has no `weights`",
                fix="download config.json again",
            )
        found = self._format_of(group)
        if found not in (*_READ, _PLAIN):
            raise ModelError(
                f"{self._path} holds quantized weights (compressed-tensors) in the format {found!r} of config_groups."
                f"{name}, read are {', '.join(_READ)}",
                fix="use a checkpoint in one of these, or in bfloat16, float16 or float32",
            )
        if found != _PLAIN and (unread := _unread(group, weights)):
            raise ModelError(
                f"{self._path} holds quantized weights (compressed-tensors) with config_groups.{name}.{unread}, for "
                "which there is no scheme",
                fix="use a checkpoint without it, or in bfloat16, float16 or float32",
            )


def _unread(group: Mapping[str, Any], weights: Mapping[str, Any]) -> str:
    """Return a field that changes what is computed and that no scheme has, with its value. Empty if there is none."""
    if weights.get("dynamic"):
        return f"weights.dynamic = {weights['dynamic']!r}"
    if group.get("output_activations"):
        return f"output_activations = {group['output_activations']!r:.80}"
    inputs = group.get("input_activations")
    if not inputs:
        return ""
    read = inputs.get("num_bits", 8) == 8 and inputs.get("symmetric", True) and inputs.get("dynamic") in _DYNAMIC
    return "" if read else f"input_activations = {inputs!r:.120}"


def _scheme(name: str, group: Mapping[str, Any], *, ordered: bool) -> WeightScheme:
    weights, inputs = group["weights"], group.get("input_activations") or {}
    element = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8"}.get(
        (weights.get("type", "int"), weights.get("num_bits"))
    )
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    sizes = weights.get("group_size"), weights.get("block_structure")
    if element is None or strategy not in ("tensor", "channel", "group", "block"):
        raise ModelError(
            f"{name}: quantized weights (compressed-tensors) with type = {weights.get('type')!r}, "
            f"num_bits = {weights.get('num_bits')} and strategy = {strategy!r} have no scheme",
            fix="use a checkpoint with 4 or 8 bits, or in bfloat16, float16 or float32",
        )
    shared = {"tensor": (0, 0), "channel": (1, 0), "group": (1, sizes[0] or 128), "block": _block(sizes[1])}[strategy]
    return WeightScheme(
        name=element,
        group=shared,
        symmetric=bool(weights.get("symmetric", True)),
        act_order=ordered and strategy == "group",
        activation=_activation(inputs),  # type: ignore[arg-type]
        dynamic=bool(inputs.get("dynamic", True)),
    )


def _block(sizes: Any) -> tuple[int, int]:
    if isinstance(sizes, str):
        sizes = sizes.split("x")
    rows, columns = sizes or (128, 128)
    return int(rows), int(columns)


def _activation(inputs: Mapping[str, Any]) -> str:
    if inputs.get("num_bits") != 8:
        return ""
    return "fp8" if inputs.get("type") == "float" else "int8"
