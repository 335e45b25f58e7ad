"""A checkpoint's files of weights: which of them is broken, and whether they hold numbers that this family reads."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

from safetensors import SafetensorError, safe_open

from slotline.plugins.model_families.naming import listed
from slotline.registry.errors import ModelError
from slotline.registry.json_file import read_json
from slotline.registry.loading import one_line

_POINTER = b"version https://git-lfs"
_QUANTIZED = ("I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4", "F6_E2M3", "F6_E3M2")
"""Dtypes of weights that are nothing without scales, as safetensors names them."""


def unreadable(path: Path, error: Exception, report: str = "") -> ModelError:
    """What to say of a folder whose weights could not be read: the file at fault, where one can be found.

    Args:
        report: more lines on it.
    """
    fix = "download the checkpoint again"
    for file in sorted(path.glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                pointer = opened.read(len(_POINTER)) == _POINTER
            if pointer:
                return ModelError(
                    f"{file} is a Git LFS pointer, not the weights", fix="run `git lfs pull` in its folder"
                )
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as fault:
            return ModelError(f"{file} cannot be read: {fault}", fix=fix)
    for file in path.glob("*.index.json"):
        if not _is_index(file):
            return ModelError(f"{file} is no index: it has no table weight_map of files", fix="download it again")
    if isinstance(error, UnpicklingError):
        files = ", ".join(file.name for file in sorted(path.glob("pytorch_model*.bin")))
        return ModelError(
            f"{path}: {files} cannot be read as weights alone: it is broken, or would run code of its own",
            fix="download the checkpoint again, as safetensors if there are any",
        )
    why = str(error) if isinstance(error, (OSError, RuntimeError, ValueError, SafetensorError)) else one_line(error)
    return ModelError(f"the weights of {path} cannot be read: {why}{report}", fix=fix)


def _is_index(file: Path) -> bool:
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return False
    files = content.get("weight_map") if isinstance(content, dict) else None
    return isinstance(files, dict) and all(isinstance(name, str) for name in files.values())


def refuse_quantized(path: Path) -> None:
    """Refuse weights of eight bits and fewer: a configuration that does not say how leaves them without their scales.

    Raises:
        ModelError: naming them.
    """
    for file in sorted(path.glob("model*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise unreadable(path, error) from error
        if found := sorted(name for name, dtype in dtypes.items() if name.endswith("weight") and dtype in _QUANTIZED):
            raise ModelError(
                f"{file} holds quantized weights ({dtypes[found[0]]}), which this family cannot read: {listed(found)}",
                fix="use the checkpoint in bfloat16, float16 or float32",
            )
