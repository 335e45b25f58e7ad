"""Extension of a plan whose layers are divided among ranks: one stage's part of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.builder.communicators import PIPELINE_HOST, HostLink
from slotline.builder.parts import Parts
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.batch.step_output import StepOutput
from slotline.core.model_runner.model_runner import ComputedPass, ForwardPass, ModelRunner
from slotline.core.model_runner.output_head import OutputHead
from slotline.plugins.pipeline_ranks.heads import EarlierHead, LastHead
from slotline.plugins.pipeline_ranks.layer_inputs import LayerInputs
from slotline.plugins.pipeline_ranks.links import TokenLink, greet, receive_into
from slotline.plugins.pipeline_ranks.pooled import EarlierPoolingHead, LastPoolingHead
from slotline.plugins.pipeline_ranks.turns import Turns
from slotline.registry.contracts import ExtensionContext

Int = npt.NDArray[np.int64]
DRAFTS = "drafts"
"""Extension whose drafter may read the inputs of layers."""


class PipelineRanks:
    """Stage of this rank.

    Made-up steps stay on the rank: they are run while it is built, and read zeros.

    Attributes:
        turns: chooses the requests of each step.
        received: [most tokens of a step, hidden_size], what the stage before sent. None for the first stage.
    """

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        planned = parts.planned
        config = planned.loaded.config
        self.turns = Turns(planned.turns, context.max_requests)
        self._link = parts.communicators["pipeline"]
        self._host = HostLink(parts.communicators[PIPELINE_HOST])
        self._pools = planned.task != "generate"
        self._pairs = parts.named.get("guidance")
        sizes = () if isinstance(config.graphs.sizes, str) else config.graphs.sizes
        most = max((config.scheduler.max_batched_tokens, *sizes))
        dtype = getattr(torch, planned.plan.dtype)
        buffer = torch.zeros(most, planned.facts.hidden_size, dtype=dtype, device=planned.device)
        self.received = buffer if self._link.rank else None
        self._inputs: LayerInputs | None = None
        if (drafts := parts.named.get(DRAFTS)) is not None and drafts.layer_ids:
            self._inputs = LayerInputs(self._link, drafts.layer_ids, planned.rank_stages, buffer)
        self._tokens = None
        if self._link.rank < self._link.size - 1:
            self._tokens = TokenLink(self._link, parts.stagings[-1], planned.device, parts.last_tokens)
        parts.agree(0)  # all ranks have loaded their weights, which may take any time
        greet(self._link, planned.device)

    # Steps

    def forward_kwargs(self, inputs: ModelInputs) -> Mapping[str, Any]:
        """Return what the stage before sent of a step."""
        return {} if self.received is None else {"received": self.received[: inputs.num_padded_tokens]}

    def capture_kwargs(
        self, inputs: ModelInputs, broken: frozenset[str], cut: Callable[[Callable[[], None]], None]
    ) -> Mapping[str, Any]:
        """Return the same for a forward pass that is being captured: it lies at one address."""
        return self.forward_kwargs(inputs)

    def wrap_forward(self, runner: ModelRunner, forward: ForwardPass) -> ForwardPass:
        """Return a forward pass between the ranks before and behind."""

        def compute(inputs: ModelInputs, *, whole: bool) -> ComputedPass:
            if inputs.made_up:
                return self._joined(forward(inputs, whole=whole))
            if self._tokens is not None:
                self._tokens.before(inputs.rows)
            if self.received is not None:
                self._receive(self.received[: inputs.num_tokens])
            computed = self._joined(forward(inputs, whole=whole))
            if self._tokens is not None:
                self._tokens.after_forward()
                self._send(computed, inputs.num_tokens)
            return computed

        return compute

    def _receive(self, there: torch.Tensor) -> None:
        """Receive what the stage before sends of a step into `there` [num_tokens, hidden_size]."""
        receive_into(there, self._link, self._link.rank - 1)
        if self._inputs is not None:
            self._inputs.receive(len(there))

    def _send(self, computed: ComputedPass, count: int) -> None:
        """Send the first `count` tokens of a step to the next stage."""
        self._link.send(computed.hidden[:count].contiguous(), self._link.rank + 1)
        if self._inputs is not None:
            self._inputs.send(computed.extras.get(DRAFTS), count)

    def _joined(self, computed: ComputedPass) -> ComputedPass:
        """Return what a forward pass gave, with the inputs of layers of the stages before."""
        if self._inputs is None:
            return computed
        joined = self._inputs.joined(computed.extras.get(DRAFTS), len(computed.hidden))
        return computed if joined is None else computed._replace(extras={**computed.extras, DRAFTS: joined})

    def output_head(self, runner: ModelRunner) -> OutputHead:
        """Return what ends a step here."""
        if self._pools:
            return LastPoolingHead(runner, self._host) if self._tokens is None else EarlierPoolingHead(self._host)
        if self._tokens is None:
            return LastHead(runner, self._link, self._host)
        return EarlierHead(runner, self._tokens, self._host)

    # Schedule

    def enter(self, request: Request) -> None:
        """Count a request."""
        self.turns.unfinished += 1

    def leave(self, request: Request) -> None:
        """Count a request no more."""
        self.turns.unfinished -= 1

    def before_schedule(self, rows: Int) -> Sequence[tuple[int, Exception]]:
        """Begin a step."""
        self.turns.begin()
        return ()

    def limit_tokens(self, rows: Int, counts: Int) -> Int:
        """Leave the tokens of requests that are in steps just before to a later step."""
        return counts if self._has_pairs() else self.turns.limit(rows, counts)

    def limit_prompt(self, request: Request, computed: int, count: int) -> int | None:
        """Let a request wait if this step has its share of all."""
        return count if self._has_pairs() or self.turns.may_begin() else None

    def begin_request(self, request: Request, computed: int) -> None:
        """Count a request that begins in this step."""
        self.turns.begun()

    def launched(self, scheduled: SchedulerOutput) -> None:
        """Note a step that is under way."""
        self.turns.launched(scheduled.rows)

    def after_step(self, output: StepOutput, generations: Int) -> None:
        """Note that a step was handed out."""
        self.turns.ended()

    def restore(self, requests: Sequence[Request]) -> None:
        """Forget the steps that were under way."""
        self.turns.forget()

    def _has_pairs(self) -> bool:
        """Return whether some requests must be computed together."""
        return self._pairs is not None and bool(self._pairs.pairs)
