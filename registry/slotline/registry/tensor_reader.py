"""Lazy reading of a checkpoint's tensors: headers first, each tensor when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotline.registry.errors import ModelError
from slotline.registry.json_file import read_object
from slotline.registry.tensor_files import StoredTensor, stored_tensors

if TYPE_CHECKING:
    import torch


class SafetensorsReader:
    """Tensors of a folder's safetensors files. A torch file has none: its tensors cannot be read one by one.

    Attributes:
        path: the folder.
        stored: name, dtype and shape of every tensor, by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stored: Mapping[str, StoredTensor] = {
            tensor.name: tensor for file in weight_files(path) for tensor in _described(file)
        }
        self._opened: dict[Path, Any] = {}

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in host memory.

        Raises:
            ModelError: if there is none of that name, or the file is broken.
        """
        if name not in self.stored:
            raise ModelError(
                f"{self.path} has no tensor {name}", fix="download the checkpoint again, or correct its config.json"
            )
        file = self.stored[name].file
        try:
            tensor: torch.Tensor = self._open(file).get_tensor(name)
        except Exception as error:  # safetensors has errors of its own
            raise ModelError(f"{file}: {name} cannot be read: {error}", fix="download the file again") from error
        return tensor

    def close(self) -> None:
        """Close the files. They are opened again if more is read."""
        self._opened.clear()

    def _open(self, file: Path) -> Any:
        from safetensors import safe_open

        if file not in self._opened:
            self._opened[file] = safe_open(file, framework="pt")
        return self._opened[file]


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a folder: those of its index, else model.safetensors, else all."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if single.is_file():
        return (single,)
    if index.is_file():
        table = read_object(index).get("weight_map")
        names = table.values() if isinstance(table, dict) else ()
        return tuple(sorted({path / str(name) for name in names}))
    return tuple(sorted(path.glob("*.safetensors")))


def _described(file: Path) -> tuple[StoredTensor, ...]:
    try:
        return stored_tensors(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}", fix="download the file again") from error
