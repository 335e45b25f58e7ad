"""Reader of GPTQ checkpoints (AutoGPTQ, GPTQModel), with and without act order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slotline.plugins.weight_formats.common import Tensors, centred, examples_of, matches, refuse_fields, unpack
from slotline.registry.contracts.weight_format import WeightFormatContext
from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme
from slotline.registry.errors import ModelError

_USUAL: Mapping[str, tuple[Any, ...]] = {
    "checkpoint_format": ("gptq", "gptq_v2"),
    "is_marlin_format": (False,),
    "pack_dtype": ("int32",),
    "dynamic": ({},),
    "adapter": (),
    "rotation": (),
}
"""Fields of GPTQModel that change what tensors mean, with the values that are read."""


class Gptq:
    """Reader of one checkpoint. See `slotline.registry.contracts.weight_format.WeightFormat`.

    Raises:
        ModelError: for a number of bits without a scheme, or another layout.
    """

    examples = examples_of("gptq")

    def __init__(self, context: WeightFormatContext) -> None:
        config: Mapping[str, Any] = context.config
        self._tensors = Tensors(context.tensors, context.method)
        refuse_fields(context, _USUAL)
        bits = config.get("bits")
        if bits not in (4, 8):
            raise ModelError(
                f"{context.path} holds quantized weights (gptq) of {bits!r} bits, read are 4 and 8",
                fix="use a checkpoint of 4 or 8 bits, or in bfloat16, float16 or float32",
            )
        self._bits = int(bits)
        size = int(config.get("group_size", -1))
        self._group = 0 if size < 0 else size
        self._symmetric = bool(config.get("sym", True))
        self._ordered = bool(config.get("desc_act", False)) and self._group > 0
        self._zero_is_less_one = config.get("checkpoint_format", "gptq") != "gptq_v2"
        self._plain = tuple(config.get("modules_to_not_convert") or ())

    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        if matches(name, self._plain) or not self._tensors.has(f"{name}.qweight"):
            return None
        return WeightScheme(
            name="int4" if self._bits == 4 else "int8",
            group=(1, self._group),
            symmetric=self._symmetric,
            act_order=self._ordered,
        )

    def read(self, name: str, kind: str) -> QuantizedWeight:
        scheme, get, bits = self.scheme_of(name, kind), self._tensors.get, self._bits
        assert scheme is not None
        packed = get(f"{name}.qweight", (torch.int32,), (None, None))  # [inputs * bits / 32, outputs]
        inputs, outputs = packed.shape[0] * 32 // bits, packed.shape[1]
        groups = scheme.scale_shape(outputs, inputs)[1]
        codes = centred(unpack(packed, bits, 0), bits).T.contiguous()
        scales = get(f"{name}.scales", (), (groups, outputs)).float().T.contiguous()
        zeros = self._zeros(name, groups, outputs)  # [outputs, groups]
        offsets = None
        if self._symmetric and bool((zeros != 0).any()):
            self._tensors.wrong(f"{name}.qzeros", "has zero points, where the configuration says sym = true")
        if not self._symmetric:
            offsets = -zeros.float() * scales
        order = get(f"{name}.g_idx", (), (inputs,)).int() if self._tensors.has(f"{name}.g_idx") else None
        if not self._ordered:
            self._refuse_order(name, order, inputs)
            order = None
        elif order is None:
            self._tensors.missing(f"{name}.g_idx")
        return QuantizedWeight(scheme=scheme, codes=codes, scales=scales, offsets=offsets, g_idx=order)

    def _zeros(self, name: str, groups: int, outputs: int) -> torch.Tensor:
        """Return the zero points [outputs, groups] int8, less half of the range."""
        words = -(-outputs * self._bits // 32)
        packed = self._tensors.get(f"{name}.qzeros", (torch.int32,), (groups, words))
        zeros = unpack(packed, self._bits, 1)[:, :outputs]
        if self._zero_is_less_one:
            zeros = (zeros + 1) & ((1 << self._bits) - 1)
        return centred(zeros, self._bits).T.contiguous()

    def _refuse_order(self, name: str, order: torch.Tensor | None, inputs: int) -> None:
        if order is not None and self._group > 0:
            plain = torch.arange(inputs, dtype=torch.int32) // self._group
            if not torch.equal(order, plain):
                self._tensors.wrong(f"{name}.g_idx", "reorders inputs, where the configuration says desc_act = false")
