"""Names, dtypes and shapes of the tensors in a file of weights. The tensors themselves are not read.

A reader looks here before it converts anything and before it takes memory of the sizes that a configuration names.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from math import prod
from pathlib import Path
from typing import Any

from attrs import frozen

_LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""

_WEIGHTS = frozenset({"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"})
"""Dtypes of numbers that need no scale, as safetensors and torch name them."""

_INDICES = frozenset({"I64", "I32", "BOOL", "int64", "int32", "bool"})


@frozen(kw_only=True)
class StoredTensor:
    """A tensor as its file describes it.

    Attributes:
        name: in the file.
        dtype: as safetensors or torch names it.
        shape: sizes.
        file: where it lies.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def is_weight(self) -> bool:
        """True for real numbers of 16 bits and more, which mean what they say."""
        return self.dtype in _WEIGHTS

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


def stored_tensors(file: Path) -> tuple[StoredTensor, ...]:
    """Read what a safetensors file or a torch file says of its tensors.

    Raises:
        ValueError: if a header is broken, or tensors are quantized in torch's own way.
        TypeError: if a torch file does not hold a table of tensors.
        OSError: if the file cannot be read. Torch raises errors of other types for broken files of its own.
    """
    if file.suffix == ".safetensors":
        return _of_safetensors(file)
    return _of_torch_file(file)


def unfit(tensors: Iterable[StoredTensor], indices: Collection[str] = ()) -> StoredTensor | None:
    """Return the first tensor that is no plain weight: quantized, packed, complex, or of whole numbers.

    Args:
        indices: names of tensors that hold token ids or masks.
    """
    for tensor in tensors:
        if not tensor.is_weight and not (tensor.name in indices and tensor.dtype in _INDICES):
            return tensor
    return None


def _of_safetensors(file: Path) -> tuple[StoredTensor, ...]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= _LONGEST_HEADER:
            raise ValueError(f"its header has {length} bytes")
        text = opened.read(length)
    try:
        header = json.loads(text)
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    if not isinstance(header, dict):
        raise ValueError("its header is no table")
    header.pop("__metadata__", None)
    return tuple(_described(file, name, entry) for name, entry in header.items())


def _described(file: Path, name: str, entry: Any) -> StoredTensor:
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (None, None)
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise ValueError(f"its header describes {name!r:.80} as {entry!r:.80}")
    return StoredTensor(name=name, dtype=dtype, shape=tuple(shape), file=file)


def _of_torch_file(file: Path) -> tuple[StoredTensor, ...]:
    import zipfile

    import torch

    mapped = {"mmap": True} if zipfile.is_zipfile(file) else {}
    try:
        loaded = torch.load(file, map_location="meta", weights_only=True, **mapped)
    except NotImplementedError as error:  # torch has no quantized tensors without memory
        raise ValueError("it holds quantized tensors") from error
    if not isinstance(loaded, dict):
        raise TypeError(f"it holds a {type(loaded).__name__}, not a table of tensors")
    if other := [name for name, tensor in loaded.items() if not isinstance(tensor, torch.Tensor)]:
        raise TypeError(f"its entry {other[0]!r:.80} is no tensor")
    return tuple(
        StoredTensor(name=str(name), dtype=_dtype(tensor), shape=tuple(tensor.shape), file=file)
        for name, tensor in loaded.items()
    )


def _dtype(tensor: Any) -> str:
    """A torch tensor's dtype by name; one that is not dense says so."""
    name = str(tensor.dtype).removeprefix("torch.")
    layout = str(tensor.layout).removeprefix("torch.")
    return name if layout == "strided" else f"{layout} {name}"
