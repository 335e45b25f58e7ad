"""Hidden states for drafters: collected from chosen layers during a forward pass, and picked by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.batch.attend import Attend
from slotline.core.batch.model_inputs import ModelInputs
from slotline.registry.errors import ContractError

Int = npt.NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class HiddenStates:
    """Hidden states of some tokens. Those that no drafter reads are None.

    Attributes:
        last: [n, hidden_size], after the last norm.
        layers: [n, layers * hidden_size], the inputs of chosen layers side by side.
        index: [n] int64 on the device, the places of the tokens in their step.
    """

    last: torch.Tensor | None
    layers: torch.Tensor | None
    index: torch.Tensor | None

    def take(self, places: Int) -> HiddenStates:
        """Return the states of some of the tokens, in the order of `places`."""
        return self.pick(torch.from_numpy(places))

    def pick(self, chosen: torch.Tensor) -> HiddenStates:
        """Return the states at places [n] int64 that may be known only on the device."""

        def pick(states: torch.Tensor | None) -> torch.Tensor | None:
            return None if states is None else states[chosen.to(states.device)]

        return HiddenStates(last=pick(self.last), layers=pick(self.layers), index=pick(self.index))


@frozen(kw_only=True, eq=False)
class ComputedStates:
    """A whole step's tokens and their hidden states.

    Attributes:
        inputs: the step's.
        token_ids: [num_padded_tokens] int64 on the device.
        attend: of the step, still planned.
        hidden: [num_padded_tokens, hidden_size], with `layers` as in `HiddenStates`.
    """

    inputs: ModelInputs
    token_ids: torch.Tensor
    attend: Attend
    hidden: torch.Tensor
    layers: torch.Tensor | None


class LayerTaps:
    """Keeps the inputs of chosen layers during a forward pass.

    Args:
        layer_ids: the layers, from 0, in the order in which they are wanted.
        device: of the wanted states.
    """

    def __init__(self, layer_ids: Sequence[int], device: str) -> None:
        self.layer_ids = tuple(layer_ids)
        self._device = device
        self._found: dict[int, torch.Tensor] = {}

    def __call__(self, index: int, hidden_states: torch.Tensor) -> None:
        """Copy the input [num_tokens, hidden_size] of layer `index` if it is wanted: the layer may write into it.

        Raises:
            ContractError: if the model's layers have inputs of another shape, as Gemma 3n's several streams.
        """
        if index in self.layer_ids:
            if hidden_states.ndim != 2:
                raise ContractError(
                    f"a drafter reads inputs of layers, and layer {index} of this model has one of shape "
                    f"{list(hidden_states.shape)}, not [num_tokens, hidden_size]",
                    fix="name a drafter that reads no hidden states of layers",
                )
            self._found[index] = hidden_states.to(self._device, copy=True)

    def take(self) -> torch.Tensor:
        """Return the kept states, [num_tokens, layers * hidden_size], and forget them.

        Raises:
            ContractError: if the model has no such layer. The first forward pass, at start-up, shows it.
        """
        found, self._found = self._found, {}
        if missing := [index for index in self.layer_ids if index not in found]:
            raise ContractError(
                f"the drafter reads the inputs of layers {missing}, which the model does not have or does not show",
                fix="name layers from 0 up to the model's number of decoder layers",
            )
        return torch.cat([found[index] for index in self.layer_ids], -1)
