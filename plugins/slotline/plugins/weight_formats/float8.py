"""Readers of FP8 checkpoints: DeepSeek's blocks, AutoFP8's and ModelOpt's scales of whole tensors."""

from __future__ import annotations

import torch

from slotline.plugins.weight_formats.common import Tensors, examples_of, matches, refuse_fields, two_dimensional
from slotline.registry.contracts.weight_format import WeightFormatContext
from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme
from slotline.registry.errors import ModelError

_FLOAT8 = "F8_E4M3"


class Float8:
    """Reader of one checkpoint of the method ``fp8``. See `slotline.registry.contracts.weight_format.WeightFormat`.

    Raises:
        ModelError: for another kind of float8 or another scheme of activations.
    """

    examples = examples_of("fp8")

    def __init__(self, context: WeightFormatContext) -> None:
        config = context.config
        refuse_fields(context, {"fmt": ("e4m3",), "activation_scheme": ("dynamic", "static")})
        self._tensors = Tensors(context.tensors, context.method)
        self._plain = tuple(config.get("modules_to_not_convert") or config.get("ignored_layers") or ())
        self._block = config.get("weight_block_size")
        self._dynamic = config.get("activation_scheme", "dynamic") != "static"

    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        """See `WeightFormat.scheme_of`. A tensor that is not of eight bits is plain, whatever the lists say."""
        if matches(name, self._plain) or self._tensors.dtype(f"{name}.weight") != _FLOAT8:
            return None
        return WeightScheme(name="fp8", group=self._group(name), activation="fp8", dynamic=self._dynamic)

    def read(self, name: str, kind: str) -> QuantizedWeight:
        scheme = self.scheme_of(name, kind)
        assert scheme is not None
        codes = self._tensors.get(f"{name}.weight", (torch.float8_e4m3fn,), (None, None))
        wanted = scheme.scale_shape(*codes.shape)
        found = self._scale_name(name)
        scales = two_dimensional(self._tensors.get(found))
        if tuple(scales.shape) != wanted:
            self._tensors.wrong(
                found,
                f"has shape {list(scales.shape)}, and {scheme.describe()} of {list(codes.shape)} needs {list(wanted)}",
            )
        inputs = None if self._dynamic else self._tensors.get(f"{name}.input_scale").float().reshape(())
        return QuantizedWeight(scheme=scheme, codes=codes, scales=scales, input_scale=inputs)

    def _group(self, name: str) -> tuple[int, int]:
        if self._block:
            rows, columns = self._block
            return int(rows), int(columns)
        shape = self._tensors.shape(self._scale_name(name))
        numel = torch.Size(shape).numel()
        return (0, 0) if numel == 1 else (1, 0)

    def _scale_name(self, name: str) -> str:
        inverse = f"{name}.weight_scale_inv"
        return inverse if self._block or self._tensors.has(inverse) else f"{name}.weight_scale"


class ModelOpt(Float8):
    """Reader of one checkpoint of ModelOpt's FP8, with one scale for a weight and one for its inputs.

    Raises:
        ModelError: for another algorithm of ModelOpt.
    """

    examples = examples_of("modelopt")

    def __init__(self, context: WeightFormatContext) -> None:
        super().__init__(context)
        config = context.config
        algorithm = config.get("quant_algo")
        if algorithm != "FP8":
            raise ModelError(
                f"{context.path} holds quantized weights (modelopt) with quant_algo = {algorithm!r}, read is 'FP8'",
                fix="use a checkpoint in FP8, or in bfloat16, float16 or float32",
            )
        self._plain = tuple(config.get("exclude_modules") or config.get("ignore") or ())
        self._dynamic = False
