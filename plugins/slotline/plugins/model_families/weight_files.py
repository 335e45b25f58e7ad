"""A checkpoint's files of weights: which of them is broken, and whether they hold numbers that this family reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slotline.plugins.model_families.naming import listed
from slotline.registry.errors import ModelError
from slotline.registry.json_file import read_json
from slotline.registry.loading import one_line
from slotline.registry.tensor_files import StoredTensor, stored_tensors

_POINTER = b"version https://git-lfs"
_WHOLE = ("I64", "I32", "I16", "BOOL", "int64", "int32", "int16", "bool")
"""Dtypes of positions and masks, which some checkpoints hold beside their weights."""

_MASKS = ("U8", "BOOL", "uint8", "bool")
_MASK = re.compile(r"(attn|attention)\.bias$")  # a causal mask, in checkpoints of the GPT-2 kind
_LEFT_OUT = re.compile(r"(^|\.)(mtp|mtp_layers|mtp_block|nextn_predict_layers)\.|inv_freq$|masked_bias$|position_ids$")

_PREFERRED = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def unreadable(path: Path, error: Exception, report: str = "", file: Path | None = None) -> ModelError:
    """Return the error for a folder whose weights could not be read, with the file at fault if it can be found.

    Args:
        path: the folder.
        report: further lines.
        file: the file that was being read.
    """
    fix = "download the checkpoint again"
    for stored in sorted(path.glob("*.safetensors")):
        try:
            with stored.open("rb") as opened:
                pointer = opened.read(len(_POINTER)) == _POINTER
            if pointer:
                return ModelError(
                    f"{stored} is a Git LFS pointer, not the weights", fix="run `git lfs pull` in its folder"
                )
            with safe_open(stored, framework="pt"):
                pass
        except (OSError, SafetensorError) as fault:
            return ModelError(f"{stored} cannot be read: {fault}", fix=fix)
    for index in path.glob("*.index.json"):
        if not _is_index(index):
            return ModelError(f"{index} is no index: it has no table weight_map of files", fix="download it again")
    if isinstance(error, UnpicklingError):
        files = ", ".join(file.name for file in sorted(path.glob("pytorch_model*.bin")))
        return ModelError(
            f"{path}: {files} cannot be read as weights alone: it is broken, or would run code of its own",
            fix="download the checkpoint again, as safetensors if there are any",
        )
    why = str(error) if isinstance(error, (OSError, RuntimeError, ValueError, SafetensorError)) else one_line(error)
    what = path if file is None else file
    return ModelError(f"the weights of {what} cannot be read: {why}{report}", fix=fix)


def _is_index(file: Path) -> bool:
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return False
    files = content.get("weight_map") if isinstance(content, dict) else None
    return isinstance(files, dict) and all(isinstance(name, str) for name in files.values())


def loaded_files(path: Path, config: Any) -> list[Path]:
    """Return the files that transformers reads the weights of a folder from, in its order of preference.

    Raises:
        ModelError: if an index is broken.
    """
    explicit = getattr(config, "transformers_weights", None)
    for name in [explicit] if isinstance(explicit, str) else _PREFERRED:
        file = path / name
        if file.is_file() and name.endswith(".index.json"):
            if not _is_index(file):
                raise ModelError(f"{file} is no index: it has no table weight_map of files", fix="download it again")
            table = read_json(file)["weight_map"]
            return [path / shard for shard in sorted(set(table.values()))]
        if file.exists():
            return [file]
    return []


def tensors_of(path: Path, config: Any, *, quick: bool = False) -> tuple[StoredTensor, ...]:
    """Read what the files say of all tensors that transformers will load.

    Args:
        quick: read headers of safetensors only, and say nothing of torch files and of files that cannot be read: a plan
            needs no weights, and the loader says what is wrong.

    Raises:
        ModelError: if a file cannot be read.
    """
    found: list[StoredTensor] = []
    files = loaded_files(path, config)
    if quick and any(file.suffix != ".safetensors" for file in files):
        return ()
    for file in files:
        try:
            found += stored_tensors(file)
        except Exception as error:  # readers of two formats, each with errors of its own
            if quick:
                return ()
            raise unreadable(path, error, file=file) from error
    return tuple(found)


def refuse_quantized(tensors: Iterable[StoredTensor]) -> None:
    """Refuse tensors whose numbers mean nothing without scales, and complex ones, whatever their names are.

    Whole numbers of 16 bits and more may be positions and masks: see `refuse_whole_numbers`.

    Raises:
        ModelError: naming them.
    """
    strange = [tensor for tensor in tensors if not (tensor.is_weight or tensor.dtype in _WHOLE)]
    if strange := [tensor for tensor in strange if not _is_left_out(tensor)]:
        raise _unfit(strange)


def refuse_whole_numbers(tensors: Iterable[StoredTensor], unused: Collection[str], model: torch.nn.Module) -> None:
    """Refuse whole numbers that were loaded as weights. A model's own tables of positions and masks stay.

    Args:
        unused: names of tensors that the model has no place for.
        model: as transformers loaded it.

    Raises:
        ModelError: naming them.
    """
    whole = [tensor for tensor in tensors if not tensor.is_weight and tensor.name not in unused]
    if not whole:
        return
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    own = {name.rpartition(".")[2] for name, buffer in model.named_buffers() if not buffer.is_floating_point()}
    loaded = [
        tensor
        for tensor in whole
        if tensor.name.rpartition(".")[2] not in own
        and not _is_left_out(tensor)
        and not any(re.search(pattern, tensor.name) for pattern in ignored)
    ]
    if loaded:
        raise _unfit(loaded)


def refuse_adapter(path: Path) -> None:
    """Refuse an adapter between a model's own files.

    Transformers would join it to the weights where PEFT is installed, and leave it out elsewhere.

    Raises:
        ModelError: naming its configuration.
    """
    file = path / "adapter_config.json"
    if file.is_file():
        raise ModelError(
            f"{file} lies between the model's files, so it is not said whether the adapter is part of the model",
            fix="move adapter_config.json and the adapter's weights into a folder of their own and name it as an "
            "adapter, or remove them if they are merged into the weights",
        )


def _is_left_out(tensor: StoredTensor) -> bool:
    """Return True for a tensor in checkpoints that no model of this family reads."""
    mask = tensor.dtype in _MASKS and _MASK.search(tensor.name) is not None
    return mask or _LEFT_OUT.search(tensor.name) is not None


def _unfit(tensors: Sequence[StoredTensor]) -> ModelError:
    first = tensors[0]
    same = sorted(tensor.name for tensor in tensors if (tensor.file, tensor.dtype) == (first.file, first.dtype))
    what = "weights" if first.dtype.lower().startswith("c") else "quantized weights"
    return ModelError(
        f"{first.file} holds {what} ({first.dtype}), which this family cannot read: {listed(same)}",
        fix="use the checkpoint in bfloat16, float16 or float32",
    )
