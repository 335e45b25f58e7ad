"""Types of a prompt's tokens: of each request one number is kept, the place where the second text begins."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.api.prompts import as_token_array
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.registry.contracts.device import Device
from slotline.registry.errors import RequestError

NAME = "token_type_ids"
_NOWHERE = np.iinfo(np.int64).max


class TokenTypes:
    """Boundaries of the requests with a row.

    Args:
        max_requests: rows of the request table.
        served: whether the model reads token types.
        device: has the model's inputs.
    """

    def __init__(self, max_requests: int, served: bool, device: Device) -> None:
        self.served = served
        self._device = device
        self._boundaries = np.full(max_requests, _NOWHERE)  # [max_requests] int64

    def validate(self, request: Request) -> None:
        """Check a new request's types, and keep their boundary with it.

        Raises:
            RequestError: if the model reads none, or if they are not those of one text or of two, one after the other.
        """
        given = request.inputs.get(NAME)
        if given is None:
            return
        types = as_token_array(given)
        if len(types) != len(request.prompt_token_ids):
            raise RequestError(
                f"token_type_ids has {len(types)} entries for {len(request.prompt_token_ids)} tokens",
                fix="give one for each token",
            )
        if ((types != 0) & (types != 1)).any() or (np.diff(types) < 0).any():
            raise RequestError(
                "token_type_ids has other entries than zeros and ones after them",
                fix="give 0 for the tokens of the first text, and 1 for those of the second",
            )
        if types.any() and not self.served:
            raise RequestError("token_type_ids: this model's tokens are all of one type", fix="leave them out")
        request.inputs[NAME] = int(np.argmax(types)) if types.any() else None

    def begin(self, request: Request) -> None:
        """Note the boundary of a request that begins to run."""
        boundary = request.inputs.get(NAME)
        self._boundaries[request.row] = _NOWHERE if boundary is None else boundary

    def in_step(self, rows: npt.NDArray[np.int64]) -> bool:
        """Return True if a request of the `rows` [n] has two texts."""
        return self.served and bool((self._boundaries[rows] != _NOWHERE).any())

    def arguments(self, inputs: ModelInputs) -> Mapping[str, torch.Tensor]:
        """Return the argument of the model's forward pass for a step, none if all tokens are of type 0."""
        if inputs.made_up or not self.in_step(inputs.rows):
            return {}
        boundaries = np.full(inputs.num_padded_tokens, _NOWHERE)
        boundaries[: inputs.num_tokens] = np.repeat(self._boundaries[inputs.rows], inputs.num_scheduled)
        return {"token_types": (inputs.positions >= self._device.to_device(boundaries)).long()}
