"""Reader of the weights of an unpacked GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from slotline.plugins.weight_formats.common import Tensors, examples_of
from slotline.plugins.weight_formats.gguf.blocks import TYPES, decoded
from slotline.registry.contracts.weight_format import WeightFormatContext
from slotline.registry.contracts.weights import QuantizedWeight, WeightScheme


class Gguf:
    """Reader of one file. See `slotline.registry.contracts.weight_format.WeightFormat`."""

    examples = examples_of("gguf")

    def __init__(self, context: WeightFormatContext) -> None:
        self._tensors = Tensors(context.tensors, context.method)
        self._types: Mapping[str, str] = context.config.get("types") or {}

    @staticmethod
    def unpack(path: Path, folder: Path) -> None:
        """See `slotline.registry.contracts.weight_format.FileFormat.unpack`."""
        from slotline.plugins.weight_formats.gguf.unpacking import unpack

        unpack(path, folder)

    def scheme_of(self, name: str, kind: str) -> WeightScheme | None:
        found = TYPES.get(self._types.get(name, ""))
        return None if found is None else found.scheme

    def read(self, name: str, kind: str) -> QuantizedWeight:
        block = TYPES[self._types[name]]
        rows = self._tensors.get(f"{name}.gguf", (torch.uint8,), (None, None))
        if rows.shape[1] % block.num_bytes:
            self._tensors.wrong(f"{name}.gguf", f"has rows of {rows.shape[1]} bytes, no blocks of {block.num_bytes}")
        return decoded(block, rows)
