"""Linear layers after the pooling of a sentence-transformers folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from attrs import define, field
from safetensors.torch import load_file

from slotline.registry.errors import ModelError
from slotline.registry.json_file import read_json
from slotline.registry.safe_repr import safe_repr

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda states: states,
    "Tanh": torch.tanh,
    "GELU": torch.nn.functional.gelu,
    "ReLU": torch.relu,
    "SiLU": torch.nn.functional.silu,
    "Sigmoid": torch.sigmoid,
}


@define(eq=False)
class DenseLayers:
    """Layers in order, in float32.

    Attributes:
        size: numbers that the last one gives.
    """

    folders: Sequence[Path]
    device: torch.device
    size: int
    _layers: list[DenseLayer] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.load(self.folders)

    def load(self, folders: Sequence[Path]) -> None:
        """Read the layers' weights, the first time or again.

        Raises:
            ModelError: if they cannot be read, or do not fit each other.
        """
        layers, size = [], self.size if not self._layers else self._layers[0].weight.shape[1]
        for folder in folders:
            layer = _read(folder, self.device)
            if layer.weight.shape[1] != size:
                raise ModelError(
                    f"{folder} takes {layer.weight.shape[1]} numbers, and what comes before it gives {size}",
                    fix="download the checkpoint again",
                )
            layers.append(layer)
            size = layer.weight.shape[0]
        self._layers, self.size = layers, size

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return the vectors [n, size] float32 of states [n, hidden_size] float32."""
        for layer in self._layers:
            states = layer(states)
        return states


@define(eq=False)
class DenseLayer:
    """One layer.

    Attributes:
        weight: [out, in] float32.
        bias: [out] float32, None for none.
        activation: of the product.
        residual: [out, in] float32 for an input that is added after the activation, True for the input itself.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: Callable[[torch.Tensor], torch.Tensor]
    residual: torch.Tensor | bool = False

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs [n, out] of inputs [n, in]."""
        out = self.activation(torch.nn.functional.linear(states, self.weight, self.bias))
        if self.residual is False:
            return out
        return out + (states if self.residual is True else torch.nn.functional.linear(states, self.residual))


def torch_activation(
    name: str, served: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the activation of a class of torch.nn by its path, None if it is not one of the `served` by name."""
    return served.get(name.rpartition(".")[2]) if name.startswith("torch.nn.") else None


def _read(folder: Path, device: torch.device) -> DenseLayer:
    """Read a layer.

    Raises:
        ModelError: if a file is missing or broken, or if its activation is not served.
    """
    try:
        config = read_json(folder / "config.json")
        stored = folder / "model.safetensors"
        weights = load_file(stored) if stored.is_file() else torch.load(folder / "pytorch_model.bin", weights_only=True)
        weight = weights["linear.weight"].to(device, torch.float32)
        bias = weights["linear.bias"].to(device, torch.float32) if config.get("bias", True) else None
        residual = weights.get("residual.weight")
    except Exception as error:  # readers of several formats, each with errors of its own
        raise ModelError(
            f"the linear layer of {folder / 'config.json'} cannot be read: {error}", fix="restore it"
        ) from error
    name = str(config.get("activation_function") or "torch.nn.Tanh")
    activation = torch_activation(name, _ACTIVATIONS)
    if activation is None:
        raise ModelError(
            f"{folder / 'config.json'}: activation_function = {safe_repr(name)}",
            fix=f"use one of {', '.join(f'torch.nn.{one}' for one in _ACTIVATIONS)}",
        )
    own = residual.to(device, torch.float32) if residual is not None else True
    return DenseLayer(weight, bias, activation, own if config.get("use_residual") else False)
