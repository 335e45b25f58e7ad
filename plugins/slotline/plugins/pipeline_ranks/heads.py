"""What ends a step on each rank of a pipeline: the last one samples, the others get its tokens.

Log-probabilities, counts of NaN and the reasons of failures follow on the host, for steps that have any. All ranks know
which those are: from the requests, or from the marks of failed rows among the tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from attrs import evolve

from slotline.builder.communicators import HostLink
from slotline.builder.sampling_profile import warm_up
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.step_output import ForwardOutput, PendingSample, StepOutput
from slotline.core.model_runner.model_runner import ModelRunner
from slotline.plugins.pipeline_ranks.links import TokenLink
from slotline.registry.contracts import Communicator

NAME = "pipeline_ranks"
"""Extra of a pending step: whether more than its tokens is told. None for a made-up step."""
_TOLD = ("logprobs", "prompt_logprobs", "num_nans", "failed")


class LastHead:
    """Samples, and sends the tokens to the other ranks."""

    def __init__(self, runner: ModelRunner, communicator: Communicator, host: HostLink) -> None:
        self._sampling, self._communicator, self._host, self._ops = runner.head, communicator, host, runner.ops
        self._tells = partial(_tells, runner)

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Return the tokens that sample."""
        return self._sampling.wanted(inputs)

    def rehearse(self, num_rows: int, vocab_size: int, device: str) -> None:
        """Take as much memory as sampling does at most."""
        warm_up(num_rows, vocab_size, device, self._ops)

    def start(self, launched: ForwardOutput) -> PendingSample:
        """Start sampling, and send the tokens once they are drawn."""
        pending: PendingSample = self._sampling.start(launched)
        if launched.inputs.made_up:
            return pending
        if pending.sampled.numel():
            for rank in range(self._communicator.size - 1):
                self._communicator.send(pending.sampled.contiguous(), rank)
        return evolve(pending, extras={**pending.extras, NAME: self._tells(launched.inputs)})

    def finish(self, pending: PendingSample) -> StepOutput:
        """Wait for a step's tokens, and tell what else it gave."""
        output = self._sampling.finish(pending)
        tells = pending.extras.get(NAME)
        if tells is not None and (tells or output.failed):
            self._host.send({name: getattr(output, name) for name in _TOLD})
        return output


class EarlierHead:
    """Gets the tokens of a step from the last rank. There are no logits here."""

    def __init__(self, runner: ModelRunner, tokens: TokenLink, host: HostLink) -> None:
        self._sampling, self._tokens, self._host = runner.head, tokens, host
        self._tells = partial(_tells, runner)
        self._keep_states = runner.extensions.keep_states

    def wanted(self, inputs: ModelInputs) -> torch.Tensor | None:
        """Return None: the next stage needs all tokens."""
        return None

    def rehearse(self, num_rows: int, vocab_size: int, device: str) -> None:
        """Take nothing: nothing is sampled here."""

    def start(self, launched: ForwardOutput) -> PendingSample:
        """Note that a step's tokens will come."""
        inputs = launched.inputs
        count = len(inputs.logits_rows)
        extras: dict[str, Any] = {name: keep(launched, launched.hidden[:0]) for name, keep in self._keep_states}
        if not inputs.made_up:
            extras[NAME] = self._tells(inputs)
        return PendingSample(
            batch=inputs.sampling,
            spec_positions=inputs.spec_positions,
            tokens=_Zeros(count) if inputs.made_up else self._tokens.expect(inputs.rows, count, inputs.stand_ins),
            sampled=torch.empty(0),
            extras=extras,
        )

    def finish(self, pending: PendingSample) -> StepOutput:
        """Wait for a step's tokens, and for what else it gave."""
        output = self._sampling.finish(pending)
        tells = pending.extras.get(NAME)
        return evolve(output, **self._host.receive()) if tells is not None and (tells or output.failed) else output


class _Zeros:
    """Tokens of a made-up step. Implements `Download`."""

    def __init__(self, count: int) -> None:
        self._count = count

    def wait(self) -> Any:
        """Return zeros [count] int64."""
        return torch.zeros(self._count, dtype=torch.int64).numpy()


def _tells(runner: ModelRunner, inputs: ModelInputs) -> bool:
    """Return whether the last rank tells more of a step than its tokens."""
    return runner.count_nans or inputs.scored is not None or bool(runner.rows.score_prompts(inputs.rows))
