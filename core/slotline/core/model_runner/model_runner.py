"""The runner: from a step's inputs to sampled tokens. It knows no plugin by name. Its parts were built for it.

A step has three parts, so that the host can work while the device does: `launch` starts the forward pass, the output
head's `start` starts the work after it, and its `finish` waits for the results. Nothing before it waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from slotline.core.batch.attend import Attend
from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.placeholder_tokens import PlaceholderTokens, resolved
from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.step_output import ForwardOutput, StepOutput
from slotline.core.device.torch_ops import TorchOps
from slotline.core.device.transfer_buffer import TransferBuffer
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher
from slotline.core.model_runner.graph_runner import GraphRunner
from slotline.core.model_runner.output_head import OutputHead, SamplingHead
from slotline.core.model_runner.step_profiler import StepProfiler
from slotline.core.sampling.logits_processors import ProcessorPipeline
from slotline.registry.contracts import DeviceOps, Model, TokenSampler


class ComputedPass(NamedTuple):
    """Results of a forward pass, as in `ForwardOutput`."""

    attend: Attend
    hidden: torch.Tensor
    logits: torch.Tensor | None
    extras: Mapping[str, torch.Tensor]


class ForwardPass(Protocol):
    """Plan of a step and its forward pass. `whole` says that hidden states of all tokens are wanted."""

    def __call__(self, inputs: ModelInputs, *, whole: bool) -> ComputedPass:
        """Plan and run a step."""
        ...


class ModelRunner:
    """Runner of steps. The same functions serve profiling, warm-up and real requests.

    Attributes:
        staging: of the device where tokens are sampled.
        mark: says that all copies of a step's inputs have been started, see `AttentionMetadataBuilder.mark`.
        last_tokens: where the tokens of a step in flight are found; None where no step is prepared before them.
        head: ends each step, by sampling unless an extension has another head.
        extensions: methods of the step extensions.
        ops: operations of the device where tokens are sampled; torch's by default.
        graphs: replays captured forward passes. None if none are captured.
        nan_cause: says who may have made the NaN of a request's logits.
    """

    def __init__(
        self,
        model: Model,
        router: AttentionDispatcher,
        rows: RequestTable,
        pipeline: ProcessorPipeline,
        staging: TransferBuffer,
        profiler: StepProfiler,
        last_tokens: PlaceholderTokens | None = None,
        *,
        mark: Callable[[], None],
        logprobs_mode: str = "raw_logprobs",
        count_nans: bool = False,
        plain_draws: TokenSampler | None = None,
        extensions: Extensions = NO_EXTENSIONS,
        ops: DeviceOps | None = None,
        graphs: GraphRunner | None = None,
        nan_cause: Callable[[], str] = lambda: "PluginError: the model gave NaN",
    ) -> None:
        self.model = model
        self.router = router
        self.rows = rows
        self.staging = staging
        self.mark = mark
        self.profiler = profiler
        self.last_tokens = last_tokens
        self.extensions = extensions
        self.ops: DeviceOps = ops or TorchOps()
        self._compute: ForwardPass = self._compute_whole
        for wrap in reversed(extensions.wrap_forward):  # the first sees a step first
            self._compute = wrap(self, self._compute)
        self.graphs = graphs
        self.count_nans = count_nans
        self.nan_cause = nan_cause
        self.head: OutputHead = SamplingHead(self, pipeline, logprobs_mode, plain_draws)
        for other in extensions.output_head:
            self.head = other(self)

    def run(self, inputs: ModelInputs) -> StepOutput:
        """Run one step from end to end."""
        return self.head.finish(self.head.start(self.launch(inputs)))

    @torch.inference_mode()
    def launch(self, inputs: ModelInputs) -> ForwardOutput:
        """Plan attention and start the forward pass."""
        whole = self.rows.score_prompts(inputs.rows)
        for wants in self.extensions.wants_all_hidden:
            whole = whole or wants(inputs)
        for begin in self.extensions.begin_logits:
            begin(inputs)
        attend, hidden, logits, extras = self._compute(inputs, whole=whole)
        return ForwardOutput(inputs=inputs, attend=attend, hidden=hidden, logits=logits, extras=extras, whole=whole)

    def _compute_whole(self, inputs: ModelInputs, *, whole: bool) -> ComputedPass:
        """Plan a step and run its forward pass, or replay it."""
        with self.profiler.scope("plan"):
            attend = self.plan(inputs)
        with self.profiler.scope("forward"):
            return ComputedPass(attend, *self.forward_or_replay(inputs, attend, whole=whole))

    def runs_eagerly(self, inputs: ModelInputs) -> bool:
        """Return True if a step's forward pass is no replay."""
        return inputs.shape is None or self.graphs is None

    def plan(self, inputs: ModelInputs) -> Attend:
        """Plan a step's attention and what extensions run."""
        precomputed = frozenset[str]()
        if inputs.shape is not None and self.graphs is not None:
            precomputed = self.graphs.precomputed_groups(inputs.shape)
        attend = self.router.plan(inputs.batches, inputs.wanted, precomputed)
        self.plan_others(inputs)
        return attend

    def plan_others(self, inputs: ModelInputs) -> None:
        """Plan all that a forward pass needs beside attention."""
        for extra in self.extensions.plan:
            extra(inputs)
        self.mark()

    def forward(self, inputs: ModelInputs, attend: Attend, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Run the model's forward pass: hidden states of the `wanted` tokens, or of all num_padded_tokens."""
        if wanted is not None and len(wanted) == inputs.num_padded_tokens:
            wanted = None  # each request has one token: all are wanted, in order
        token_ids = inputs.input_ids if self.last_tokens is None else self.last_tokens.resolve(inputs.input_ids)
        states: dict[str, Any] = {}
        if inputs.wanted is not None and self.router.fast_prefill:
            states["fast_prefill"] = True
        for arguments in self.extensions.forward_kwargs:
            states.update(arguments(inputs))
        embeds = () if inputs.embeds is None else (inputs.embeds,)
        return self.model.forward(token_ids, inputs.positions, attend, wanted, *embeds, **states)

    def token_ids(self, inputs: ModelInputs) -> torch.Tensor:
        """Return the step's tokens [num_padded_tokens] int64, those of a step in flight included."""
        return resolved(inputs.input_ids, self.last_tokens)

    def forward_or_replay(
        self, inputs: ModelInputs, attend: Attend, *, whole: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, Mapping[str, torch.Tensor]]:
        """Compute hidden states, and logits if a graph holds them: of all num_padded_tokens when replayed or `whole`.

        The third result is what the pass left for extensions.
        """
        if inputs.shape is not None and self.graphs is not None:
            return self.graphs.replay(inputs)
        hidden = self.forward(inputs, attend, None if whole else self.head.wanted(inputs))
        return hidden, None, self.extensions.results() if self.extensions.take_results else {}
