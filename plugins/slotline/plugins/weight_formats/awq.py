"""Reader of AWQ checkpoints in the layout of the GEMM kernels (AutoAWQ)."""

from __future__ import annotations

import torch

from slotline.plugins.weight_formats.common import Tensors, centred, examples_of, matches, unpack
from slotline.registry.contracts.weight_format import WeightFormatContext
from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme
from slotline.registry.errors import ModelError

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where output i of eight is in its word: words hold the outputs 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first."""


class Awq:
    """Reader of one checkpoint. See `slotline.registry.contracts.weight_format.WeightFormat`.

    Raises:
        ModelError: for other bits or layouts.
    """

    examples = examples_of("awq")

    def __init__(self, context: WeightFormatContext) -> None:
        config = context.config
        self._tensors = Tensors(context.tensors, context.method)
        bits = config.get("bits", config.get("w_bit"))
        version = str(config.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise ModelError(
                f"{context.path} holds quantized weights (awq) with bits = {bits!r} and version = {version!r}, read "
                "are 4 bits in 'gemm'",
                fix="use a checkpoint in that layout, or in bfloat16, float16 or float32",
            )
        size = int(config.get("group_size", config.get("q_group_size", 128)))
        self._group = 0 if size < 0 else size
        self._symmetric = not config.get("zero_point", True)
        self._plain = tuple(config.get("modules_to_not_convert") or ())

    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        if matches(name, self._plain) or not self._tensors.has(f"{name}.qweight"):
            return None
        return WeightScheme(name="int4", group=(1, self._group), symmetric=self._symmetric)

    def read(self, name: str, kind: str) -> QuantizedWeight:
        scheme, get = self.scheme_of(name, kind), self._tensors.get
        assert scheme is not None
        packed = get(f"{name}.qweight", (torch.int32,), (None, None))  # [inputs, outputs / 8]
        inputs, outputs = packed.shape[0], packed.shape[1] * 8
        groups = scheme.scale_shape(outputs, inputs)[1]
        scales = get(f"{name}.scales", (), (groups, outputs)).float().T.contiguous()
        offsets = None
        if not self._symmetric:
            zeros = _outputs(get(f"{name}.qzeros", (torch.int32,), (groups, packed.shape[1])))
            offsets = -zeros.float() * scales
        return QuantizedWeight(scheme=scheme, codes=_outputs(packed), scales=scales, offsets=offsets)


def _outputs(packed: torch.Tensor) -> torch.Tensor:
    """Return words [n, outputs / 8] as centred int8 codes [outputs, n] in the outputs' order."""
    codes = unpack(packed, 4, 1).view(packed.shape[0], -1, 8)[..., list(_PLACES)]
    return centred(codes.flatten(1), 4).T.contiguous()
