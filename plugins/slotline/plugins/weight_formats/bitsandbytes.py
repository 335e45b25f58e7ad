"""Reader of bitsandbytes checkpoints: NF4 with and without double quantization, and INT8."""

from __future__ import annotations

import json
from typing import Any

import torch

from slotline.plugins.weight_formats.common import Tensors, examples_of
from slotline.registry.contracts.weight_format import WeightFormatContext
from slotline.registry.contracts.weights import ELEMENTS, QuantizedWeight, WeightScheme
from slotline.registry.errors import ModelError

_STATE = "weight.quant_state.bitsandbytes__"


class BitsAndBytes:
    """Reader of one checkpoint. See `slotline.registry.contracts.weight_format.WeightFormat`.

    What a tensor's own state says counts. bitsandbytes writes the configuration from its defaults.
    """

    examples = examples_of("bitsandbytes")

    def __init__(self, context: WeightFormatContext) -> None:
        self._path = context.path
        self._tensors = Tensors(context.tensors, context.method)

    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        if self._tensors.has(f"{name}.SCB"):
            return WeightScheme(name="int8", group=(1, 0))
        for other in ("fp4",):
            if self._tensors.has(f"{name}.{_STATE}{other}"):
                raise ModelError(
                    f"{name}.weight of {self._path} holds quantized weights (bitsandbytes) in {other}, read are nf4 "
                    "and int8",
                    fix="use a checkpoint in nf4 or int8, or in bfloat16, float16 or float32",
                )
        if not self._tensors.has(f"{name}.{_STATE}nf4"):
            return None
        return WeightScheme(name="nf4", group=(1, int(self._state(name)["blocksize"])))

    def read(self, name: str, kind: str) -> QuantizedWeight:
        scheme, get = self.scheme_of(name, kind), self._tensors.get
        assert scheme is not None
        if scheme.name == "int8":
            codes = get(f"{name}.weight", (torch.int8,), (None, None))
            scales = get(f"{name}.SCB", (), (codes.shape[0],)).float().view(-1, 1) / 127
            return QuantizedWeight(scheme=scheme, codes=codes, scales=scales)
        state = self._state(name)
        outputs, inputs = (int(size) for size in state["shape"])
        size = scheme.group[1]
        if inputs % size:
            self._tensors.wrong(
                f"{name}.weight", f"has {inputs} inputs, which are not divided by its blocks of {size} numbers"
            )
        packed = get(f"{name}.weight", (torch.uint8,)).reshape(-1)
        if packed.numel() * 2 != outputs * inputs:
            self._tensors.wrong(
                f"{name}.weight", f"has {packed.numel()} bytes, and its state says shape {[outputs, inputs]}"
            )
        codes = torch.stack((packed >> 4, packed & 15), -1).view(outputs, inputs)  # the first of two is the high one
        self._check_table(name)
        return QuantizedWeight(scheme=scheme, codes=codes, scales=self._scales(name, state, outputs, inputs // size))

    def _scales(self, name: str, state: dict[str, Any], outputs: int, groups: int) -> torch.Tensor:
        absmax = self._tensors.get(f"{name}.weight.absmax", (), (outputs * groups,))
        if absmax.dtype == torch.uint8:
            table = self._tensors.get(f"{name}.weight.nested_quant_map", (), (256,)).float()
            outer = self._tensors.get(f"{name}.weight.nested_absmax").float()
            outer = outer.repeat_interleave(int(state["nested_blocksize"]))[: absmax.numel()]
            absmax = table[absmax.long()] * outer + float(state["nested_offset"])
        scales: torch.Tensor = absmax.float().view(outputs, groups)
        return scales

    def _check_table(self, name: str) -> None:
        table = self._tensors.get(f"{name}.weight.quant_map", (), (16,)).float()
        if not torch.allclose(table, torch.tensor(ELEMENTS["nf4"].codebook), atol=1e-6):
            self._tensors.wrong(f"{name}.weight.quant_map", "is not the table of nf4")

    def _state(self, name: str) -> dict[str, Any]:
        tensor = self._tensors.get(f"{name}.{_STATE}nf4", (torch.uint8,))
        try:
            state = json.loads(bytes(tensor.tolist()).decode())
            missing = [key for key in ("blocksize", "shape") if key not in state]
        except (ValueError, TypeError) as error:
            self._tensors.wrong(f"{name}.{_STATE}nf4", f"is no JSON: {error}")
        if missing:
            self._tensors.wrong(f"{name}.{_STATE}nf4", f"says no {', '.join(missing)}")
        return dict(state)
