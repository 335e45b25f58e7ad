"""What ranks of a pipeline send each other on devices: hidden states and sampled tokens.

The order of these is the same for both ends of each pair. A stage receives the tokens of a step after its own work on a
later step, and before it sends that on: as many steps later as there are stages between it and the last one. So the
device never waits for tokens while it has other work, and no two ranks wait for each other.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define

from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.registry.contracts import Communicator
from slotline.registry.contracts.device import Download, TransferBuffer

Int = npt.NDArray[np.int64]


def greet(link: Communicator, device: str) -> None:
    """Send a number along each way that a step takes: what these need is then allocated before memory is measured."""
    last, number = link.size - 1, torch.zeros(1, dtype=torch.int64, device=device)
    if link.rank > 0:
        number = link.receive(number, link.rank - 1)
    if link.rank < last:
        link.send(number, link.rank + 1)
        link.receive(number, last)
    else:
        for rank in range(last):
            link.send(number, rank)


def receive_into(there: torch.Tensor, link: Communicator, source: int) -> None:
    """Receive what a rank sends at an address."""
    found = link.receive(there, source)
    if found is not there:
        there.copy_(found)


@define(eq=False)
class Awaited:
    """Tokens that the last rank samples. Implements `Download`.

    Attributes:
        rows: [n] int64, rows of the step.
        count: number of its tokens.
        stand_ins: [count] int64 on the device, None if the next step waits for the tokens.
    """

    tokens: TokenLink
    rows: Int
    count: int
    stand_ins: torch.Tensor | None
    arriving: Download | None = None

    def wait(self) -> npt.NDArray[Any]:
        """Return the tokens [count] int64."""
        self.tokens.receive_until(self)
        assert self.arriving is not None
        return self.arriving.wait()


class TokenLink:
    """Sampled tokens on their way from the last rank, to a rank before it.

    Args:
        communicator: of the pipeline's ranks.
        staging: of this rank's device.
        device: torch device string.
        last_tokens: the table that the tokens are written into, if steps are prepared before they are known.
    """

    def __init__(
        self, communicator: Communicator, staging: TransferBuffer, device: str, last_tokens: PlaceholderTokens | None
    ) -> None:
        self._communicator, self._staging, self._device = communicator, staging, device
        self._last_tokens = last_tokens
        self._awaited: deque[Awaited] = deque()
        self._behind = communicator.size - 2 - communicator.rank

    def expect(self, rows: Int, count: int, stand_ins: torch.Tensor | None) -> Awaited:
        """Return the tokens of a launched step, which come later."""
        stand_ins = None if stand_ins is None or self._last_tokens is None else stand_ins.clone()
        awaited = Awaited(self, rows, count, stand_ins)
        self._awaited.append(awaited)
        return awaited

    def before(self, rows: Int) -> None:
        """Receive the tokens that a step of `rows` reads."""
        known = [len(np.intersect1d(step.rows, rows)) > 0 for step in self._awaited]
        self._receive(max((place + 1 for place, reads in enumerate(known) if reads), default=0))

    def after_forward(self) -> None:
        """Receive what the last rank has sampled by the time at which a forward pass of this stage ends."""
        self._receive(len(self._awaited) - self._behind)

    @torch.inference_mode()  # as the buffers that it writes to were made
    def receive_until(self, step: Awaited) -> None:
        """Receive the tokens of a step and of those before it."""
        if step.arriving is None:
            self._receive(self._awaited.index(step) + 1)

    def _receive(self, steps: int) -> None:
        for _ in range(steps):
            step = self._awaited.popleft()
            tokens = torch.empty(step.count, dtype=torch.int64, device=self._device)
            if step.count:
                tokens = self._communicator.receive(tokens, self._communicator.size - 1)
            if step.stand_ins is not None and self._last_tokens is not None:
                self._last_tokens.record(step.stand_ins, tokens.clamp(min=0))
            step.arriving = self._staging.download(tokens)
