"""Reader of LoRA adapters as PEFT saves them: ``adapter_config.json`` and ``adapter_model.safetensors``.

Unsupported settings of an adapter are refused. Nothing is ignored silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from safetensors import SafetensorError
from safetensors.torch import load_file

from slotline.registry.errors import RequestError
from slotline.registry.json_file import read_json
from slotline.registry.safe_repr import safe_repr
from slotline.registry.tensor_files import stored_tensors, unfit

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LARGEST = 1e9
"""Of an adapter's factor."""
_PREFIX = "base_model.model."
_UNSUPPORTED: Mapping[str, str] = {
    "use_dora": "DoRA divides by the norm of the adapted weight, which no kernel here computes",
    "modules_to_save": "whole modules cannot be swapped with an adapter",
    "lora_bias": "biases are not adapted",
    "layer_replication": "the base model's layers are fixed",
    "target_parameters": "only linear layers are adapted",
    "trainable_token_indices": "single embeddings are not adapted",
    "use_qalora": "its inputs are pooled in groups",
    "alora_invocation_tokens": "an adapter holds for whole requests",
    "arrow_config": "an adapter is chosen by the request",
    "ensure_weight_tying": "embedding and output projection are adapted apart",
    "use_bdlora": "its matrices are made of blocks",
    "monteclora_config": "its matrices are drawn anew in each forward pass",
    "kasa_config": "it cuts singular values off the base model's weights",
}
"""What PEFT's configuration may ask for and no plugin here does, and why."""
_CHANGES_WEIGHTS = ("pissa", "corda", "olora", "loftq")
"""Beginnings of `init_lora_weights` under which PEFT takes something off the base model's weights, also when it loads
such an adapter (PEFT 0.21, ``tuners/lora/layer.py``)."""


@frozen(eq=False)
class Share:
    """Weights of an adapter for one module, in float32 or as saved.

    A is [rank, in_features], B is [out_features, rank], and there is the factor of the product. An embedding's
    in_features are its rows.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float


@frozen(eq=False)
class PeftAdapter:
    """An adapter in host memory.

    Attributes:
        shares: by module path.
        rank: the highest of any module.
    """

    shares: Mapping[str, Share]
    rank: int


def read(
    path: str, modules: Mapping[str, tuple[int, int]], max_rank: int, embeddings: Collection[str] = ()
) -> PeftAdapter:
    """Read a PEFT folder and check it as a whole.

    Args:
        path: the folder.
        modules: path of each module that may carry an adapter -> (in_features, out_features).
        max_rank: the highest rank that fits.
        embeddings: those of the modules that are embeddings.

    Raises:
        RequestError: naming the first fault.
    """
    config = _config(path)
    tensors = _by_module(path, _tensors(path), modules, embeddings)
    shares = {}
    for module, parts in tensors.items():
        rank = int(_pattern(config.get("rank_pattern"), module, config["r"]))
        alpha = float(_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
        if rank > max_rank:
            raise RequestError(
                f"{path}: rank {rank} of {module} is above the highest, {max_rank}", fix="raise lora.max_rank"
            )
        _check_shapes(path, module, parts, rank, modules[module])
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        shares[module] = Share(parts["lora_A"], parts["lora_B"], scale)
    return PeftAdapter(shares, max((share.a.shape[0] for share in shares.values()), default=0))


def signature(path: str) -> tuple[tuple[str | int, ...], ...]:
    """Return what tells that the folder's files are still those that were read.

    The inode's number and its time of change are part of it: no program sets that one back.
    """
    found = []
    for name in (CONFIG, WEIGHTS):
        try:
            stat = Path(path, name).stat()
        except (OSError, ValueError):  # a path with a NUL is none
            continue
        found.append((name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(found)


def _config(path: str) -> dict[str, Any]:
    """Return the folder's configuration, of a plain or rank-stabilised adapter."""
    try:
        config = read_json(Path(path, CONFIG))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot read {CONFIG}: {error}", fix="name a folder that PEFT saved") from error
    if not isinstance(config, dict) or config.get("peft_type", "LORA") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise RequestError(f"{path}: {CONFIG} has peft_type = {safe_repr(kind, 40)}", fix="use a LoRA adapter")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not _is_rank(rank) or not _is_alpha(alpha):
        raise RequestError(
            f"{path}: {CONFIG} has r = {safe_repr(rank)}, lora_alpha = {safe_repr(alpha)}", fix="save the adapter again"
        )
    _check_patterns(path, "rank_pattern", config.get("rank_pattern") or {}, _is_rank)
    _check_patterns(path, "alpha_pattern", config.get("alpha_pattern") or {}, _is_alpha)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_WEIGHTS):
        raise RequestError(
            f"{path}: init_lora_weights = {start!r}: the adapter belongs to weights that PEFT changes at the start",
            fix="save it as a plain adapter, with path_initial_model_for_weight_conversion where PEFT has that",
        )
    if config.get("bias", "none") != "none":
        raise RequestError(
            f"{path}: bias = {safe_repr(config['bias'])}: biases are not adapted", fix='train with bias = "none"'
        )
    for key, why in _UNSUPPORTED.items():
        if config.get(key):
            raise RequestError(
                f"{path}: {key} = {safe_repr(config[key])} is not supported: {why}", fix="train without it"
            )
    return config


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_alpha(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _check_patterns(path: str, name: str, patterns: Any, fits: Callable[[Any], bool]) -> None:
    if not isinstance(patterns, dict):
        raise RequestError(f"{path}: {name} = {safe_repr(patterns)} is no table", fix="save the adapter again")
    for pattern, value in patterns.items():
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise RequestError(f"{path}: {name} has {pattern!r}: {error}", fix="save the adapter again") from error
        if not fits(value):
            raise RequestError(f"{path}: {name} has {safe_repr(value)} for {pattern!r}", fix="save the adapter again")


def _tensors(path: str) -> dict[str, torch.Tensor]:
    try:
        strange = unfit(stored_tensors(Path(path, WEIGHTS)))
        tensors: dict[str, torch.Tensor] = {} if strange else load_file(Path(path, WEIGHTS))
    except (OSError, ValueError, SafetensorError) as error:
        raise RequestError(f"{path}: cannot read {WEIGHTS}: {error}", fix="save the adapter as safetensors") from error
    if strange:
        raise RequestError(
            f"{path}: {WEIGHTS} holds {strange.name} in {strange.dtype}, which is no plain weight",
            fix="save the adapter in bfloat16, float16 or float32",
        )
    return tensors


def _by_module(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    modules: Mapping[str, tuple[int, int]],
    embeddings: Collection[str],
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the two tensors of each module, checked to be finite and of modules that may carry an adapter."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        module = _module(name, modules)
        embeds = module in embeddings
        if part == "base_layer" and module and tuple(tensor.shape) == modules[module][:: 1 if embeds else -1]:
            continue  # PEFT saves the base model's own weight with an adapter of the embedding or output projection
        part = part.replace("lora_embedding_", "lora_") if embeds else part
        if part not in ("lora_A", "lora_B") or module is None:
            raise RequestError(
                f"{path}: {key} belongs to no module that may carry an adapter; those are {_summary(modules)}",
                fix="name its module in lora.target_modules, or train an adapter for these",
            )
        if not bool(tensor.isfinite().all()):
            raise RequestError(f"{path}: {key} has values that are not finite", fix="train the adapter again")
        found.setdefault(module, {})[part] = tensor
    if not found:
        raise RequestError(f"{path}: {WEIGHTS} has no matrices of an adapter", fix="save the adapter again")
    return found


def _module(name: str, modules: Mapping[str, tuple[int, int]]) -> str | None:
    """Return the module of a name in the file. A model of images and text calls its decoder so."""
    for candidate in (name, name.replace("language_model.", "", 1), name.replace("text_model.", "", 1)):
        if candidate in modules:
            return candidate
    return None


def _check_shapes(path: str, module: str, parts: Mapping[str, torch.Tensor], rank: int, sizes: tuple[int, int]) -> None:
    shapes = {part: tuple(tensor.shape) for part, tensor in sorted(parts.items())}
    wanted = {"lora_A": (rank, sizes[0]), "lora_B": (sizes[1], rank)}
    if shapes != wanted:
        raise RequestError(
            f"{path}: {module} has the shapes {shapes}, wanted {wanted}", fix="use an adapter of this base model"
        )


def _pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Return the value of the first pattern that fits the end of the module's path, like PEFT."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _summary(modules: Mapping[str, Any]) -> str:
    """Return the last parts of the paths with their counts."""
    names = [module.rpartition(".")[2] for module in modules]
    return ", ".join(f"{name} ({names.count(name)})" for name in dict.fromkeys(names)) or "none"
