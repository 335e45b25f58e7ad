"""Pooling settings of a sentence-transformers folder: modules.json and the pooling module's own config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from attrs import frozen

from slotline.registry.contracts import PoolingMethod
from slotline.registry.errors import ModelError
from slotline.registry.json_file import read_json

MODULES_FILE = "modules.json"
_MODES: dict[str, PoolingMethod] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
}
"""Both spellings of sentence-transformers: a flag for each mode, and one key `pooling_mode`."""
_SERVED_MODULES = ("Transformer", "Pooling", "Normalize")


@frozen(kw_only=True)
class Recipe:
    """Method for computing embeddings from a checkpoint's hidden states.

    Attributes:
        method: hidden states to use.
        normalize: True to divide the embedding by its length.
        origin: origin of the settings, in words.
    """

    method: PoolingMethod
    normalize: bool
    origin: str


def present(path: Path) -> bool:
    """Return True if the folder is a sentence-transformers folder, so that the model was trained for embeddings."""
    return (path / MODULES_FILE).is_file()


def read(path: Path, hidden_size: int, method: PoolingMethod | None = None) -> Recipe:
    """Return the recipe of a folder. A given `method` replaces the folder's.

    Raises:
        ModelError: if a file is broken, or requires an unsupported feature.
    """
    modules = _read(path / MODULES_FILE)
    if not isinstance(modules, list) or not all(
        isinstance(m, dict) and isinstance(m.get("type"), str) for m in modules
    ):
        raise ModelError(f"{path / MODULES_FILE} is no list of modules", fix="download the file again")
    names = [module["type"].rpartition(".")[2] for module in modules]
    if names.count("Pooling") != 1 or not set(names) <= set(_SERVED_MODULES):
        raise ModelError(
            f"{path / MODULES_FILE} lists the modules {', '.join(names) or '(none)'}; served is one Pooling, and "
            "beside it Transformer and Normalize alone",
            fix='use a checkpoint without the others, or set task = "generate"',
        )
    normalize = "Normalize" in names
    if method is not None:
        return Recipe(method=method, normalize=normalize, origin="the option `pooling`")
    folder = str(modules[names.index("Pooling")].get("path", "1_Pooling"))
    found = _method(path / folder / "config.json", hidden_size)
    return Recipe(method=found, normalize=normalize, origin=f"{MODULES_FILE} and {folder}/config.json")


def _method(file: Path, hidden_size: int) -> PoolingMethod:
    """Return the single pooling mode of the module's configuration, in the older or the newer of its two forms."""
    config = _read(file)
    if not isinstance(config, dict):
        raise ModelError(f"{file} is no JSON object", fix="download the file again")
    size = config.get("word_embedding_dimension", config.get("embedding_dimension", hidden_size))
    if size != hidden_size:
        raise ModelError(
            f"{file} pools states of size {size!r} and the model's have {hidden_size}",
            fix="download the checkpoint again",
        )
    if config.get("include_prompt", True) is not True:
        raise ModelError(
            f"{file} sets include_prompt = false: instruction tokens left out of the pooling are not served",
            fix="use a checkpoint without it",
        )
    named = config.get("pooling_mode")
    modes = [named] if named is not None else [k for k, v in config.items() if k.startswith("pooling_mode_") and v]
    method = _MODES.get(str(modes[0])) if len(modes) == 1 else None
    if method is None:
        raise ModelError(
            f"{file} sets the pooling {', '.join(map(str, modes)) or '(none)'}; served is one of "
            f"{', '.join(get_args(PoolingMethod))}",
            fix='name another one under [model_family.transformers_decoder], such as pooling = "mean", if it will do',
        )
    return method


def _read(file: Path) -> Any:
    try:
        return read_json(file)
    except (ValueError, OSError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}", fix="download the file again") from error
