"""Shared parts of the readers: names that are left plain, checked tensors, and packed codes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from typing import Any, NoReturn

import torch

from slotline.registry.contracts.weight_format import FormatExample, TensorReader, WeightFormatContext
from slotline.registry.errors import ModelError

DOWNLOAD = "download the checkpoint again"


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return True if a module is named: by its path, the end of it, a part of it, or a pattern ``re:..``."""
    return any(_matches(name, pattern) for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name) is not None
    return name == pattern or f".{name}.".find(f".{pattern}.") >= 0


def refuse_fields(context: WeightFormatContext, usual: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse a configuration with fields that change what the tensors mean.

    Args:
        usual: field -> the values for which the weights are read. None stands for a field that is not there.

    Raises:
        ModelError: naming the first field with another value.
    """
    for name, values in usual.items():
        found = context.config.get(name)
        if found not in (None, *values):
            read = " or ".join(repr(value) for value in values if value is not None) or "none"
            raise ModelError(
                f"{context.path} holds quantized weights ({context.method}) with {name} = {found!r:.80}, read "
                f"is {read}",
                fix="use a checkpoint without it, or in bfloat16, float16 or float32",
            )


class Tensors:
    """Checked access to the tensors of modules.

    Args:
        tensors: the checkpoint's tensors.
        method: what the checkpoint calls its format, for messages.
    """

    def __init__(self, tensors: TensorReader, method: str) -> None:
        self._tensors, self._method = tensors, method

    def has(self, name: str) -> bool:
        """Return True if there is a tensor of that name."""
        return name in self._tensors.stored

    def dtype(self, name: str) -> str:
        """Return the stored dtype by safetensors' name, or "" if there is no such tensor."""
        stored = self._tensors.stored.get(name)
        return "" if stored is None else stored.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the stored shape.

        Raises:
            ModelError: if there is no such tensor.
        """
        if not self.has(name):
            self.missing(name)
        return self._tensors.stored[name].shape

    def get(self, name: str, dtypes: Collection[torch.dtype] = (), shape: tuple[int | None, ...] | None = None) -> Any:
        """Read a tensor.

        Args:
            dtypes: the dtypes that it may have, empty for any.
            shape: sizes that it must have, None for any.

        Raises:
            ModelError: if it is missing, or of another dtype or shape.
        """
        if not self.has(name):
            self.missing(name)
        tensor = self._tensors.read(name)
        if dtypes and tensor.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self.wrong(name, f"is {str(tensor.dtype).removeprefix('torch.')}, expected {wanted}")
        if shape is not None and not _fits(tensor.shape, shape):
            self.wrong(name, f"has shape {list(tensor.shape)}, expected {_sizes(shape)}")
        return tensor

    def missing(self, name: str) -> NoReturn:
        """Raise for a tensor that the format needs."""
        stem = name.rpartition(".")[0]
        there = sorted(other for other in self._tensors.stored if other.startswith(f"{stem}."))
        beside = f"; beside it are {', '.join(there[:4])}" if there else ""
        raise ModelError(f"quantized weights ({self._method}) without the tensor {name}{beside}", fix=DOWNLOAD)

    def wrong(self, name: str, what: str) -> NoReturn:
        """Raise for a tensor that does not fit the format."""
        raise ModelError(f"quantized weights ({self._method}): {name} {what}", fix=DOWNLOAD)


def _fits(found: Iterable[int], wanted: tuple[int | None, ...]) -> bool:
    found = tuple(found)
    return len(found) == len(wanted) and all(w is None or f == w for f, w in zip(found, wanted, strict=True))


def _sizes(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


def examples_of(name: str) -> Callable[[], Mapping[str, FormatExample]]:
    """Return the static method `examples` of a reader, which the conformance suite calls."""

    def examples() -> Mapping[str, FormatExample]:
        found: Mapping[str, FormatExample] = getattr(import_module("slotline.plugins.weight_formats.examples"), name)()
        return found

    return staticmethod(examples)


def unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the unsigned codes of int32 words, the lowest bits first, as int32 with `dim` 32 / bits times as long."""
    dim %= packed.dim()
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (packed.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (packed.dim() - dim - 1))) & ((1 << bits) - 1)
    return codes.flatten(dim, dim + 1)


def centred(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return unsigned codes as int8, less half of their range."""
    return (codes - (1 << (bits - 1))).to(torch.int8)


def two_dimensional(scale: torch.Tensor) -> torch.Tensor:
    """Return a scale as float32 with two dimensions: a number as [1, 1], a vector as [n, 1]."""
    scale = scale.float()
    return scale.reshape(-1, 1) if scale.dim() < 2 else scale.contiguous()
