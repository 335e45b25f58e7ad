"""Link of a bound mixer to its state layers and the current `advance`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen

from slotline.plugins.model_families.binding import AttendHolder
from slotline.registry.contracts.state import STATE_KINDS, StateKind, StateLayer, StateTensorSpec, kind_of
from slotline.registry.errors import ModelError

ACTIVATIONS = {"silu": "silu", "swish": "silu"}


@frozen(eq=False)
class StateSlot:
    """The state layers of one mixer, in the order of `Mixer.layers`, and the model's holder."""

    layers: tuple[StateLayer, ...]
    holder: AttendHolder

    def convolve(self, conv: Any, x: torch.Tensor) -> torch.Tensor:
        """Run the mixer's first state layer, a convolution with the weights of a torch.nn.Conv1d: [T, C] -> [T, C]."""
        inputs = {"x": x, "weight": conv.weight.squeeze(1)}
        if conv.bias is not None:
            inputs["bias"] = conv.bias
        return self.holder.advance(self.layers[0], inputs)

    def recur(self, inputs: Mapping[str, torch.Tensor], index: int = -1) -> torch.Tensor:
        """Run one of the mixer's state layers, by default the last."""
        return self.holder.advance(self.layers[index], inputs)


def layer_of(mixer: str, state_kind: str, **facts: Any) -> StateLayer:
    """Return a state layer of a mixer, named after the mixer and the layer's tensor. Its index is set later."""
    return _layer_of(mixer, state_kind, STATE_KINDS[state_kind], facts)


def own_layer_of(mixer: str, state_kind: str, own_kind: StateKind, **facts: Any) -> StateLayer:
    """Return a state layer like `layer_of`, of a kind that the contract does not have."""
    return evolve(_layer_of(mixer, state_kind, own_kind, facts), own_kind=own_kind)


def _layer_of(mixer: str, state_kind: str, kind: StateKind, facts: dict[str, Any]) -> StateLayer:
    tensors = tuple(
        StateTensorSpec(
            name=name,
            shape=tuple(facts["width"] - 1 if size == "width - 1" else facts[size] for size in sizes),
            dtype="float32" if kind.recurrent else "auto",
        )
        for name, sizes in kind.tensors.items()
    )
    return StateLayer(
        name=f"{mixer}.{tensors[0].name}",
        index=-1,
        state_kind=state_kind,
        tensors=tensors,
        facts=facts,
    )


def conv_of(mixer: str, conv: Any, activation: str) -> StateLayer:
    """Return the state layer of a causal depthwise torch.nn.Conv1d.

    Raises:
        ModelError: if the contract does not have its activation.
    """
    if activation not in (*ACTIVATIONS, "none"):
        raise ModelError(
            f"the convolution of {mixer!r} is followed by {activation!r}, and state backends know silu and none",
            fix="use a model family plugin that serves this architecture",
        )
    width = int(conv.kernel_size[0])
    name = ACTIVATIONS.get(activation, activation)
    return layer_of(mixer, "short_conv", channels=int(conv.in_channels), width=width, activation=name)


def rate(a_log: torch.Tensor) -> torch.Tensor:
    """Return A, the negative rate of decay, from the logarithm in checkpoints: float32."""
    return -torch.exp(a_log.float())


def output_like(layer: StateLayer) -> str:
    """Return the input that has the shape of the layer's output."""
    return kind_of(layer).output
