"""What ends a step of prompts that are pooled: the last rank has the answers, and tells them to the others."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve, frozen

from slotline.builder.communicators import HostLink
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.step_output import ForwardOutput, StepOutput
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.core.model_runner.output_head import OutputHead

_TOLD = ("answers", "num_nans", "failed", "spoiled")


@frozen(eq=False)
class _Pending:
    """A step of the last rank: what its head waits for, and whether the others are told."""

    pooling: Any
    tells: bool


class LastPoolingHead:
    """Pools, and tells the other ranks the answers of prompts that are complete. Implements `OutputHead`."""

    def __init__(self, runner: ModelRunner, host: HostLink) -> None:
        self._pooling: OutputHead = runner.head
        self._host = host

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Return the tokens that are pooled."""
        return self._pooling.wanted(inputs)

    def start(self, launched: ForwardOutput) -> _Pending:
        """Start pooling."""
        return _Pending(self._pooling.start(launched), _completes(launched.inputs))

    def finish(self, pending: _Pending) -> StepOutput:
        """Wait for a step's answers, and tell them."""
        output = self._pooling.finish(pending.pooling)
        if pending.tells:
            self._host.send({name: getattr(output, name) for name in _TOLD})
        return output


class EarlierPoolingHead:
    """Gets the answers of a step from the last rank. Implements `OutputHead`."""

    def __init__(self, host: HostLink) -> None:
        self._host = host

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Return None: the next stage needs all tokens."""
        return None

    def start(self, launched: ForwardOutput) -> bool:
        """Return whether the last rank will tell of the step."""
        return _completes(launched.inputs)

    def finish(self, pending: bool) -> StepOutput:
        """Wait for a step's answers."""
        return evolve(StepOutput(), **self._host.receive()) if pending else StepOutput()


def _completes(inputs: ModelInputs) -> bool:
    """Return whether prompts of requests are complete with a step."""
    return not inputs.made_up and len(inputs.logits_rows) > 0
