"""Medusa heads and their published folders.

Head h is a row of residual blocks, x + SiLU(linear(x)), and an output projection. A folder holds config.json with
`medusa_num_heads` and `medusa_num_layers` (or `num_heads` and `num_hidden_layers`, as vLLM converts them) and one file
of weights under the authors' names or vLLM's:

    h.l.linear.weight [hidden, hidden], h.l.linear.bias [hidden]    blocks.h.layers.l.weight, .bias
    h.L.weight [vocab, hidden], L being the number of blocks         lm_heads.h.weight

A bias may be missing. Projections onto `truncated_vocab_size` tokens come with `token_map`, the model's token of each
(vLLM). Where `original_lm_head` is true, or no head has a projection, all share the model's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch.nn.functional import silu

from slotline.registry.errors import ModelError
from slotline.registry.json_file import read_json
from slotline.registry.tensor_files import stored_tensors, unfit

WEIGHT_FILES = ("medusa_lm_head.safetensors", "model.safetensors", "medusa_lm_head.pt", "pytorch_model.bin")
_HEADS, _BLOCKS = ("medusa_num_heads", "num_heads"), ("medusa_num_layers", "num_hidden_layers")
_PREFIX = re.compile(r"^(medusa_heads?|model)\.")
_FIX = "set drafter.path to a folder with Medusa heads that were trained for this model"


@frozen(kw_only=True, eq=False)
class MedusaHeads:
    """All heads, stacked.

    Attributes:
        weights: [num_layers, num_heads, hidden_size, hidden_size].
        biases: [num_layers, num_heads, hidden_size].
        projections: [num_heads, vocab_size, hidden_size], or None if the model's own is shared.
        token_map: [vocab_size] int64, the model's token of each token of the projections. None if both are equal.
    """

    weights: torch.Tensor
    biases: torch.Tensor
    projections: torch.Tensor | None
    token_map: torch.Tensor | None = None

    @property
    def num_heads(self) -> int:
        """Number of tokens that they can predict."""
        return self.weights.shape[1]

    def first(self, count: int) -> MedusaHeads:
        """Return only the first heads."""
        projections = None if self.projections is None else self.projections[:count]
        return evolve(self, weights=self.weights[:, :count], biases=self.biases[:, :count], projections=projections)

    def to(self, device: str, dtype: torch.dtype) -> MedusaHeads:
        """Return the same heads on a device, in the model's dtype."""
        moved = evolve(self, weights=self.weights.to(device, dtype), biases=self.biases.to(device, dtype))
        if self.token_map is not None:
            moved = evolve(moved, token_map=self.token_map.to(device))
        return moved if self.projections is None else evolve(moved, projections=self.projections.to(device, dtype))

    def states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return inputs of the output projections, [num_heads, n, hidden_size], from hidden states [n, hidden_size]."""
        x = hidden_states.to(self.weights.dtype).expand(self.num_heads, *hidden_states.shape)
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + silu(torch.baddbmm(bias[:, None], x, weight.transpose(1, 2)))
        return x


def read_heads(path: Path, hidden_size: int, vocab_size: int) -> MedusaHeads:
    """Return the heads of a folder, in host memory.

    Raises:
        ModelError: if a tensor is missing or does not fit a model of these sizes.
    """
    settings = _read_config(path)
    num_heads, num_layers = (int(_named(settings, names)) for names in (_HEADS, _BLOCKS))
    _refuse_other_sizes(path, settings, hidden_size, vocab_size)
    shared = bool(settings.get("original_lm_head", False))
    found = {_PREFIX.sub("", name): tensor for name, tensor in _read_weights(path).items()}
    _refuse_more_heads(path, num_heads, num_layers, len(found))
    shape = (hidden_size, hidden_size)
    blocks = [
        [
            _find(found, (f"{h}.{i}.linear.weight", f"blocks.{h}.layers.{i}.weight"), shape, path)
            for h in range(num_heads)
        ]
        for i in range(num_layers)
    ]
    zeros = torch.zeros(hidden_size, dtype=blocks[0][0].dtype if blocks else torch.float32)
    biases = [
        [_bias(found, (f"{h}.{i}.linear.bias", f"blocks.{h}.layers.{i}.bias"), zeros, path) for h in range(num_heads)]
        for i in range(num_layers)
    ]
    names = [(f"{h}.{num_layers}.weight", f"lm_heads.{h}.weight") for h in range(num_heads)]
    used = {name for pair in names for name in pair}
    for h, i in product(range(num_heads), range(num_layers)):
        used |= {f"{h}.{i}.linear.{part}" for part in ("weight", "bias")}
        used |= {f"blocks.{h}.layers.{i}.{part}" for part in ("weight", "bias")}
    _refuse_strange(path, found, used)
    projections = token_map = None
    if not shared and any(name in found for pair in names for name in pair):
        token_map = _token_map(found, vocab_size, path)
        size = vocab_size if token_map is None else len(token_map)
        _refuse_other_vocabulary(path, settings, size)
        projections = torch.stack([_find(found, pair, (size, hidden_size), path) for pair in names])
    if not blocks:
        return MedusaHeads(
            weights=torch.zeros(0, num_heads, *shape),
            biases=torch.zeros(0, num_heads, hidden_size),
            projections=projections,
            token_map=token_map,
        )
    return MedusaHeads(
        weights=torch.stack([torch.stack(layer) for layer in blocks]),
        biases=torch.stack([torch.stack(layer) for layer in biases]),
        projections=projections,
        token_map=token_map,
    )


def _refuse_more_heads(path: Path, num_heads: int, num_layers: int, num_tensors: int) -> None:
    """Refuse a config.json of more heads or blocks than the file has tensors."""
    if max(num_heads, num_layers, num_heads * num_layers) > num_tensors:
        raise ModelError(
            f"the heads in {str(path)!r} do not fit: config.json asks for medusa_num_heads = {num_heads} "
            f"with medusa_num_layers = {num_layers}, the file of weights has {num_tensors} tensors",
            fix=_FIX,
        )


def _token_map(found: Mapping[str, torch.Tensor], vocab_size: int, path: Path) -> torch.Tensor | None:
    tokens = found.get("token_map")
    if tokens is None:
        return None
    if tokens.ndim != 1 or len(tokens) == 0 or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ModelError(
            f"token_map of the heads in {str(path)!r} has shape {list(tokens.shape)} and names tokens outside the "
            f"vocabulary of {vocab_size}, or none",
            fix=_FIX,
        )
    return tokens.long()


def _refuse_other_sizes(path: Path, settings: Mapping[str, Any], hidden_size: int, vocab_size: int) -> None:
    """Refuse a config.json that says other sizes than the model has, or asks for quantized weights."""
    for name, models in (("hidden_size", hidden_size), ("vocab_size", vocab_size), ("quantization_config", None)):
        if (own := settings.get(name)) not in (None, models):
            raise ModelError(
                f"the heads in {str(path)!r} have {name} = {own!r}, the model asks for {models or 'none'}", fix=_FIX
            )


def _refuse_other_vocabulary(path: Path, settings: Mapping[str, Any], size: int) -> None:
    """Refuse a config.json with another number of draft tokens than the projections have."""
    if (own := settings.get("truncated_vocab_size")) not in (None, size):
        raise ModelError(
            f"the heads in {str(path)!r} have truncated_vocab_size = {own!r}, their token_map and projections {size}",
            fix=_FIX,
        )


def _refuse_strange(path: Path, found: Mapping[str, torch.Tensor], used: set[str]) -> None:
    """Refuse weights that the heads have no place for. Those of heads that config.json leaves out may be there."""
    heads = {name.removeprefix("blocks.").removeprefix("lm_heads.").split(".")[0] for name in used}
    for name in found:
        if name not in used and name.removeprefix("blocks.").removeprefix("lm_heads.").split(".")[0] in heads:
            raise ModelError(
                f"the heads in {str(path)!r} have {name} {list(found[name].shape)}, for which config.json has no place",
                fix=_FIX,
            )


def _named(settings: Mapping[str, Any], names: tuple[str, str]) -> Any:
    """Return the setting under the authors' name or vLLM's."""
    return settings.get(names[0], settings.get(names[1]))


def _read_config(path: Path) -> dict[str, Any]:
    """Return the settings, with numbers of heads and residual blocks that can be."""
    file = path / "config.json"
    try:
        settings: dict[str, Any] = read_json(file)
        num_heads, num_layers = _named(settings, _HEADS), _named(settings, _BLOCKS)
        if not isinstance(num_heads, int) or not isinstance(num_layers, int) or num_heads < 1 or num_layers < 0:
            raise ValueError(f"medusa_num_heads = {num_heads!r}, medusa_num_layers = {num_layers!r}")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{str(file)!r} does not describe Medusa heads: {error}", fix=_FIX) from error
    return settings


def _read_weights(path: Path) -> Mapping[str, torch.Tensor]:
    file = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if file is None:
        raise ModelError(f"{str(path)!r} has none of {', '.join(WEIGHT_FILES)}", fix=_FIX)
    try:
        tensors = stored_tensors(file)
    except Exception as error:  # readers of two formats, each with errors of its own
        raise ModelError(f"{str(file)!r} cannot be read: {type(error).__name__}: {error}", fix=_FIX) from error
    if strange := unfit(tensors, ("token_map",)):
        raise ModelError(
            f"{str(file)!r} holds {strange.name} in {strange.dtype}, which is no plain weight",
            fix="use heads in bfloat16, float16 or float32",
        )
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            loaded: Mapping[str, torch.Tensor] = load_file(file)
            return loaded
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # readers of two formats, each with errors of its own
        raise ModelError(f"{str(file)!r} cannot be read: {type(error).__name__}: {error}", fix=_FIX) from error
    return loaded


def _find(
    found: Mapping[str, torch.Tensor], names: tuple[str, ...], shape: tuple[int, ...], path: Path
) -> torch.Tensor:
    """Return the tensor under one of the names."""
    name = next((name for name in names if name in found), None)
    if name is None:
        raise ModelError(f"the heads in {str(path)!r} lack {' or '.join(names)}", fix=_FIX)
    if tuple(found[name].shape) != shape:
        raise ModelError(
            f"the heads in {str(path)!r} do not fit: {name} is {list(found[name].shape)}, "
            f"the model asks for {list(shape)}",
            fix=_FIX,
        )
    return found[name]


def _bias(found: Mapping[str, torch.Tensor], names: tuple[str, ...], zeros: torch.Tensor, path: Path) -> torch.Tensor:
    """Return the bias under one of the names, or zeros if there is none."""
    return _find(found, names, tuple(zeros.shape), path) if any(name in found for name in names) else zeros
