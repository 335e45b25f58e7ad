"""Reader of MXFP4 checkpoints: the experts of GPT-OSS as OpenAI published them."""

from __future__ import annotations

import torch

from slotline.plugins.weight_formats.common import Tensors, examples_of, matches
from slotline.registry.contracts.weight_format import WeightFormatContext
from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme

_SIZE, _EXPONENT_BIAS = 32, 127


class Mxfp4:
    """Reader of one checkpoint. See `slotline.registry.contracts.weight_format.WeightFormat`."""

    examples = examples_of("mxfp4")

    def __init__(self, context: WeightFormatContext) -> None:
        self._tensors = Tensors(context.tensors, context.method)
        self._plain = tuple(context.config.get("modules_to_not_convert") or ())

    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        """See `WeightFormat.scheme_of`."""
        if matches(name, self._plain) or not self._tensors.has(f"{name}_blocks"):
            return None
        return WeightScheme(name="mxfp4", group=(1, _SIZE))

    def read(self, name: str, kind: str) -> QuantizedWeight:
        scheme, get = self.scheme_of(name, kind), self._tensors.get
        assert scheme is not None
        blocks = get(f"{name}_blocks", (torch.uint8,))  # [experts, outputs, inputs / 32, 16]
        if blocks.dim() < 3 or blocks.shape[-1] * 2 != _SIZE:
            self._tensors.wrong(f"{name}_blocks", f"has shape {list(blocks.shape)}, expected [.., outputs, groups, 16]")
        exponents = get(f"{name}_scales", (torch.uint8,), tuple(blocks.shape[:-1]))
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-3)  # the first of two is the low one
        return QuantizedWeight(scheme=scheme, codes=codes, scales=torch.exp2(exponents.float() - _EXPONENT_BIAS))
