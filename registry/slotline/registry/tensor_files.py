"""Names, dtypes and shapes of the tensors in a weight file. The tensors themselves are not read.

Callers check a file here before they convert anything or allocate memory of the sizes in a configuration.
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
    """Description of a tensor in a file.

    Attributes:
        name: name in the file.
        dtype: dtype name of safetensors or torch.
        shape: sizes.
        file: the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def is_weight(self) -> bool:
        """True for real numbers of at least 16 bits, which are stored unpacked."""
        return self.dtype in _WEIGHTS

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def stored_tensors(file: Path) -> tuple[StoredTensor, ...]:
    """Read the descriptions of the tensors in a safetensors file or a torch file.

    Raises:
        ValueError: if a header is broken, or tensors are quantized in torch's own way.
        TypeError: if a torch file does not contain a table of tensors.
        OSError: if the file cannot be read. Torch raises errors of other types for broken files of its own.
    """
    if file.suffix == ".safetensors":
        return _of_safetensors(file)
    return _of_torch_file(file)


def unfit(tensors: Iterable[StoredTensor], indices: Collection[str] = ()) -> StoredTensor | None:
    """Return the first tensor that is not a plain weight: quantized, packed, complex, or of integers.

    Args:
        tensors: the tensors of a file.
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
    """Return a torch tensor's dtype by name, preceded by its layout if it is not strided."""
    name = str(tensor.dtype).removeprefix("torch.")
    layout = str(tensor.layout).removeprefix("torch.")
    return name if layout == "strided" else f"{layout} {name}"
