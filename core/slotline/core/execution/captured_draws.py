"""What follows a decode step's forward pass, captured: the draws, the table of last tokens, and the way to the host.

It is a graph of its own behind the forward's, so that a step with more to do than that, such as a logits processor's
work, takes the same forward and does the rest in the ordinary way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.execution.attention import unowned
from slotline.core.execution.capturing import Recorder
from slotline.core.execution.graph_shapes import GraphShape
from slotline.core.execution.staging import Download
from slotline.core.execution.step_inputs import StepInputs
from slotline.core.sampling.last_tokens import LastTokens
from slotline.core.sampling.sampler import sample
from slotline.registry.errors import IntegrityError


@frozen(eq=False)
class _Captured:
    """The graph of one shape: `tokens` [num_tokens] int64 is where it leaves what it drew."""

    recorder: Recorder
    addresses: tuple[int, ...]
    tokens: torch.Tensor


@frozen(eq=False)
class _Arriving:
    """The first `count` tokens of a replay, on their way to pinned memory."""

    host: npt.NDArray[np.int64]
    count: int
    done: torch.cuda.Event

    def wait(self) -> npt.NDArray[Any]:
        """Wait for the copy alone; the result is the caller's own."""
        self.done.synchronize()
        return self.host[: self.count].copy()


class CapturedDraws:
    """Captures the draws of decode shapes and replays them.

    One step's tokens are read before those of the next are drawn, so one buffer on the host serves all.

    Args:
        most: tokens of the largest shape.
    """

    def __init__(self, last_tokens: LastTokens, most: int) -> None:
        self._last_tokens = last_tokens
        self._host = torch.empty(most, dtype=torch.int64, pin_memory=True)
        self._array = self._host.numpy()
        self._done = torch.cuda.Event()
        self._captured: dict[GraphShape, _Captured] = {}

    def capture(self, shape: GraphShape, pool: Any, logits: torch.Tensor, inputs: StepInputs) -> None:
        """Capture the draws from `logits` [num_tokens, vocab_size], where the shape's forward leaves them."""
        self._draw(logits, inputs)
        torch.cuda.synchronize()
        recorder = Recorder(pool, [])
        recorder.begin()
        tokens = self._draw(logits, inputs)
        recorder.end()
        self._captured[shape] = _Captured(recorder, _addresses(inputs), unowned(tokens))

    def replay(self, inputs: StepInputs) -> tuple[torch.Tensor, Download]:
        """Draw the tokens of a step whose forward was replayed: [num_logits] int64 on the device, and on their way.

        Raises:
            IntegrityError: if the shape's draws were not captured, or their inputs are not where the graph reads them.
        """
        captured = None if inputs.shape is None else self._captured.get(inputs.shape)
        if captured is None or _addresses(inputs) != captured.addresses:
            raise IntegrityError(f"no draws of {inputs.shape} were captured for inputs that lie where these do")
        captured.recorder.parts[0]()
        self._done.record()
        count = len(inputs.logits_rows)
        tokens = captured.tokens if count == len(captured.tokens) else captured.tokens[:count]
        return tokens, _Arriving(self._array, count, self._done)

    def _draw(self, logits: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """All of it, for padded requests too. A kernel writes to the host: a copy would hold the device up longer."""
        from slotline.core.execution.triton_draws import keep_tokens

        assert inputs.stand_ins is not None
        tokens, _ = sample(logits, inputs.sampling, inputs.sampling_params)
        keep_tokens(tokens, inputs.stand_ins, self._last_tokens.tokens, self._host)
        return tokens


def _addresses(inputs: StepInputs) -> tuple[int, ...]:
    """Where the draws' inputs lie."""
    return tuple(0 if one is None else one.data_ptr() for one in (inputs.stand_ins, inputs.sampling_params))
