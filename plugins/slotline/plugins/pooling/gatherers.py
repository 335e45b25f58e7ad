"""Methods of pooling: the hidden states of a prompt, gathered over its chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request_table import RequestTable
from slotline.registry.contracts.device import Device


class Gatherer(Protocol):
    """Pooling of the hidden states of requests over their chunks.

    Attributes:
        whole_prompt: True if every position of a prompt must be computed, so that no cached prefix may be taken.
    """

    whole_prompt: bool

    def __init__(self, rows: RequestTable, hidden_size: int, device: Device) -> None: ...

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """See `PoolingHead.wanted`."""
        ...

    def gather(self, inputs: ModelInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Return the pooled states [n, hidden_size] float32 of the requests in `inputs.logits_rows`."""
        ...


class LastToken:
    """The last token's state: it is in the step that completes the prompt, so nothing is kept."""

    whole_prompt = False

    def __init__(self, rows: RequestTable, hidden_size: int, device: Device) -> None:
        """Do nothing, as there is nothing to prepare."""

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Return the last token of each completed prompt."""
        return inputs.logits_indices

    def gather(self, inputs: ModelInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Return the states in float32."""
        return hidden.float()


class _Kept:
    """States of the earlier chunks of requests, by permanent row: [max_requests, hidden_size] float32 on the device."""

    def __init__(self, rows: RequestTable, hidden_size: int, device: Device) -> None:
        self._device = device
        self._states = torch.zeros((rows.max_requests, hidden_size), device=device.torch_device)

    def update(self, inputs: ModelInputs, merge: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Keep the result of `merge` for the step's requests. Return that of the completed ones [n, hidden_size].

        `merge` gets the kept states [num_requests, hidden_size] and whether each had begun [num_requests, 1]. A request
        that starts over after preemption has not begun: the states of its first attempt, or of another request, do not
        count.
        """
        states, to_device = self._states, self._device.to_device
        begun = to_device(inputs.seq_lens_cpu[: len(inputs.rows)] > inputs.num_scheduled)
        rows = to_device(inputs.rows)
        states[rows] = merge(states[rows], begun[:, None])
        return states[to_device(inputs.logits_rows)]


class FirstToken:
    """The first token's state, kept until the prompt is complete."""

    whole_prompt = True

    def __init__(self, rows: RequestTable, hidden_size: int, device: Device) -> None:
        self._kept = _Kept(rows, hidden_size, device)

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Return the first token of each chunk."""
        return inputs.query_start_loc[: len(inputs.rows)].long()

    def gather(self, inputs: ModelInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Return the states of each prompt's first chunk."""
        states = hidden.float()  # [num_requests, hidden_size]
        return self._kept.update(inputs, lambda kept, begun: torch.where(begun, kept, states))


class Mean:
    """The mean over the prompt's tokens: sums are kept until it is complete."""

    whole_prompt = True

    def __init__(self, rows: RequestTable, hidden_size: int, device: Device) -> None:
        self._kept = _Kept(rows, hidden_size, device)
        self._device = device
        self._rows = rows

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Return None: all tokens are needed."""
        return None

    def gather(self, inputs: ModelInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Sum the step's states by request and add those of its earlier chunks, all in float32."""
        counts = self._device.to_device(inputs.num_scheduled)
        # `unsafe` leaves out a check of the counts that would wait for the device.
        sums = torch.segment_reduce(hidden[: inputs.num_tokens].float(), "sum", lengths=counts, axis=0, unsafe=True)
        done = self._kept.update(inputs, lambda kept, begun: torch.where(begun, kept, 0.0) + sums)
        lengths = np.maximum(self._rows.num_tokens[inputs.logits_rows], 1)  # dummy rows have no tokens
        return done / self._device.to_device(lengths)[:, None]


GATHERERS: Mapping[str, type[Gatherer]] = {"last": LastToken, "cls": FirstToken, "mean": Mean}
"""By name, as `Pooler.method` names them."""
