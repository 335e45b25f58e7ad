"""Folders of weights as they are after the passes: tensors in shards, and an index that says what they fit."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import asdict, field, frozen
from cattrs import ClassValidationError, Converter
from safetensors import SafetensorError
from safetensors.torch import save_file

from slotline.plugins.model_families import saved_codes
from slotline.plugins.model_families.passes.pipeline import target_for
from slotline.registry.contracts.model_family import SAVED_WEIGHTS, ModelContext
from slotline.registry.errors import ModelError
from slotline.registry.json_file import read_object

FORMAT = 1
SHARD_BYTES = 4 << 30
"""Most bytes of a shard, but for a single tensor that is larger."""

_LEFT_BEHIND = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json", ".py")
"""Ends of names of files that a saved folder does not take over: other weights, and code."""

_AGAIN = "save the weights again from the checkpoint that they were made from"


@frozen(kw_only=True)
class SavedWeights:
    """Index of a folder.

    Attributes:
        format: version of this index.
        fits: what the weights fit, see `conditions`.
        config_sha256: digest of the folder's config.json.
        files: bytes of each shard, by its name.
        weights: the shard of each tensor, by its name after the passes.
        others: the shard of each tensor that is none of the model's after the passes: of quantized weights, and scales
            of the cache.
        quantize: what `weights.quantize` made them, "" for plain weights.
        tied: names of parameters before the passes that are another one, with the name of that one.
        dtypes: dtypes of tensors before the passes that have another one than the model.
        answers: of the passes' checks.
        lean: True if our loop over the layers gave the model's own logits.
        notes: what was done to the model before it was saved, in words.
    """

    format: int
    fits: dict[str, Any]
    config_sha256: str
    files: dict[str, int]
    weights: dict[str, str]
    others: dict[str, str] = field(factory=dict)
    quantize: str = ""
    tied: dict[str, str] = field(factory=dict)
    dtypes: dict[str, str] = field(factory=dict)
    answers: list[Any] = field(factory=list)
    lean: bool = False
    notes: list[str] = field(factory=list)


def conditions(context: ModelContext) -> dict[str, Any]:
    """Return what weights fit that a model of this context has after its passes."""
    held = "cpu" if context.offload_bytes else ""
    target = target_for(context.device, context.dtype, captured=context.captured, held=held)
    return {
        "slotline": _own_version(),
        "transformers": transformers.__version__,
        "architecture": context.facts.architecture,
        "dtype": context.dtype,
        "device": target.device,
        "kernels": "none" if target.kernels is None else type(target.kernels).__name__,
        "packed": target.packs,
        "quantized": saved_codes.describe(context.weights),
        "stages": len(context.stages),
        "optimize": context.optimize,
        "batch_invariant": context.batch_invariant,
    }


def read(context: ModelContext) -> SavedWeights:
    """Return the index of a model's folder.

    Raises:
        ModelError: if it is broken, if the weights do not fit this model and this engine, or if a shard is missing or
            has another size than when it was saved.
    """
    path = context.facts.path
    file = path / SAVED_WEIGHTS
    content = read_object(file)
    if content.get("format") != FORMAT:
        raise ModelError(f"{file} has format {content.get('format')!r}, and this version reads {FORMAT}", fix=_AGAIN)
    try:
        saved = Converter().structure(content, SavedWeights)
    except (ClassValidationError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{file} is no index of saved weights", fix=_AGAIN) from error
    if saved.config_sha256 != _digest(path / "config.json"):
        raise ModelError(
            f"{path / 'config.json'} is not the one that the weights in {path} were saved with", fix=_AGAIN
        )
    _refuse_unfit(path, saved.fits, conditions(context))
    _refuse_incomplete(path, saved)
    return saved


def write(
    folder: Path,
    saved: SavedWeights,
    tensors: Mapping[str, torch.Tensor],
    others: Mapping[str, torch.Tensor],
    source: Path,
) -> None:
    """Write a folder that holds tensors, and what else is in the checkpoint's folder. It appears when it is complete.

    Args:
        folder: must not exist, or be empty.
        saved: the index. Digest, files and shards are filled in.
        tensors: the tensors by name, on any device, in oneDNN's layout too.
        others: further tensors by name.
        source: the checkpoint's folder.

    Raises:
        ModelError: if the folder is not empty, or cannot be written.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ModelError(f"{folder} is there already", fix="name a folder that does not exist, or is empty")
    scratch = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        _copy_others(source, scratch, saved.fits["dtype"])
        weights = _write_shards(scratch, {**tensors, **others})
        content = asdict(saved) | {
            "config_sha256": _digest(scratch / "config.json"),
            "files": {name: (scratch / name).stat().st_size for name in sorted(set(weights.values()))},
            "weights": {name: weights[name] for name in tensors},
            "others": {name: weights[name] for name in others},
        }
        (scratch / SAVED_WEIGHTS).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        os.replace(scratch, folder)
    except (OSError, SafetensorError) as error:
        fix = "free some space, or name another folder"
        raise ModelError(f"weights cannot be saved in {folder}: {error}", fix=fix) from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _write_shards(folder: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Write the tensors, and return the file of each. One shard is in memory at a time."""
    shards = _shards(tensors)
    found: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"slotline-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(_apart({name: _plain(tensors[name]) for name in names}), folder / file, metadata={"format": "pt"})
        found |= dict.fromkeys(names, file)
    return found


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with a copy of each that shares its memory with another one."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return found


def _shards(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of each shard's tensors, in the model's order."""
    shards: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if not shards or size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory in the usual layout, on its own."""
    plain = tensor.detach().to_dense() if tensor.is_mkldnn else tensor.detach()
    plain = plain.cpu().contiguous()
    return plain.clone() if plain.untyped_storage().nbytes() != plain.nbytes else plain


def _copy_others(source: Path, folder: Path, dtype: str) -> None:
    """Copy what belongs to a checkpoint beside its weights. Its config.json gets the dtype of the saved weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_LEFT_BEHIND) and file.name not in ("config.json", SAVED_WEIGHTS):
            shutil.copyfile(file, folder / file.name)
    config = read_object(source / "config.json")
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def _refuse_unfit(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse weights that were saved under other conditions.

    Raises:
        ModelError: naming the first that differs, with both values.
    """
    for key, value in wanted.items():
        if saved.get(key) == value:
            continue
        known, here = (json.dumps(item) for item in (saved.get(key), value))
        fix = {
            "slotline": f"install slotline {saved.get(key)}, or {_AGAIN}",
            "transformers": f"install transformers {saved.get(key)}, or {_AGAIN}",
            "quantized": f"set weights.quantize as it was then, or {_AGAIN}",
            "stages": f"set parallel.pipeline = 1, or {_AGAIN}",
            **{
                name: f"set {name} = {known}, or {_AGAIN}"
                for name in ("dtype", "device", "optimize", "batch_invariant")
            },
        }
        raise ModelError(
            f"the weights in {path} were saved with {key} = {known}, and here it is {here}", fix=fix.get(key, _AGAIN)
        )


def _refuse_incomplete(path: Path, saved: SavedWeights) -> None:
    """Refuse a folder whose shards are not those that were saved.

    Raises:
        ModelError: naming the first shard.
    """
    for name in (*saved.files, *saved.weights.values(), *saved.others.values()):
        if name not in saved.files or Path(name).name != name:
            raise ModelError(f"{path / SAVED_WEIGHTS} names the shard {name!r}, which it does not list", fix=_AGAIN)
    for name, size in saved.files.items():
        file = path / name
        if not file.is_file():
            raise ModelError(f"the shard {file} is missing", fix="copy it from where it was saved, or " + _AGAIN)
        if (found := file.stat().st_size) != size:
            raise ModelError(
                f"the shard {file} has {found} bytes, and was saved with {size}",
                fix="copy it again from where it was saved, or " + _AGAIN,
            )


def ties(names: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the names of tensors that are another one, with the first name of that one."""
    first: dict[int, str] = {}
    found = {}
    for name, tensor in names:
        if (other := first.setdefault(id(tensor), name)) != name:
            found[name] = other
    return found


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}", fix="copy it again from where it was saved") from error


def _own_version() -> str:
    try:
        return version("slotline")
    except PackageNotFoundError:
        return "unknown"
