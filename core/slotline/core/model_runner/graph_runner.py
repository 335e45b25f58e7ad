"""Captured graphs: capture and replay of a forward pass.

A step's forward is plain Python that calls the model's layers one after the other, so a graph can be broken anywhere:
if a layer's attention or state cannot be captured, the capture ends before it, the call is kept, and a new one begins
after it. The other groups keep theirs. All captures share one memory pool, the largest first, results included: a
replay overwrites the results of the previous replay.

Inputs that change from step to step are read from the staging buffers, whose addresses never change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from attrs import frozen

from slotline.core.api.progress import counted
from slotline.core.batch.attend import Attend
from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.graph_dispatcher import GraphDispatcher, GraphShape
from slotline.core.batch.model_inputs import ModelInputs, even_split
from slotline.core.batch.placeholder_tokens import PlaceholderTokens, resolved
from slotline.core.device.torch_device import TorchDevice
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher, alias_without_ownership
from slotline.core.model_runner.common_prefixes import CommonPrefixes
from slotline.core.model_runner.graph_capture import WARM_UPS, CaptureReport, GraphCapture, Recorder, note_lacking
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.registry.contracts import Device, MissingKernels, Model
from slotline.registry.errors import IntegrityError, ModelError
from slotline.registry.negotiation import GroupPlan, Plan, StateGroupPlan


@frozen(eq=False)
class CapturedGraph:
    """One captured shape: the calls in order, and the memory of the results.

    Attributes:
        parts: replays of graphs and eager calls between them.
        addresses: of the step's inputs that the graphs read.
        hidden_states: [num_tokens, hidden_size]. logits: [num_tokens, vocab_size], or None for a mixed batch, whose
            wanted tokens differ from step to step.
        extras: [num_tokens, ...] each, what the pass left for extensions, by name.
    """

    parts: tuple[Callable[[], None], ...]
    addresses: tuple[int, ...]
    hidden_states: torch.Tensor
    logits: torch.Tensor | None
    extras: Mapping[str, torch.Tensor]


class GraphRunner:
    """Captures shapes and replays them.

    Attributes:
        shapes: the captured shapes.
        report: time and memory of the captures.
        plans_anew: whether the attention of each step is planned, even if a replay does not need it.
    """

    def __init__(
        self,
        model: Model,
        router: AttentionDispatcher,
        gatherer: InputPreparer,
        plan: Plan,
        shapes: GraphDispatcher,
        cascade: CommonPrefixes,
        last_tokens: PlaceholderTokens | None = None,
        extensions: Extensions = NO_EXTENSIONS,
        device: Device | None = None,
        *,
        plans_anew: bool = False,
    ) -> None:
        self.device = device or TorchDevice("cpu", "cpu")
        self.shapes = shapes
        self.report = CaptureReport()
        self._model = model
        self._router = router
        self._gatherer = gatherer
        self._plan = plan
        self._cascade = cascade
        self._last_tokens = last_tokens
        self.plans_anew = plans_anew
        self._extensions = extensions
        self._captured: dict[GraphShape, CapturedGraph] = {}
        self._precomputed: dict[GraphShape, frozenset[str]] = {}

    @property
    def memory(self) -> int:
        """Bytes of device memory that the captures took."""
        return self.report.memory

    @torch.inference_mode()
    def capture(self, *, progress: bool = False) -> None:
        """Capture every shape, once, before the first request.

        Raises:
            CapacityError: if the device runs out of memory. It names the setting to lower.
            ModelError: if a forward cannot be captured, or if the graphs are there already.
        """
        if self._captured:
            raise ModelError("the graphs are captured already", fix="capture once, when the engine is built")
        count = 0
        with GraphCapture(
            'set graphs.mode = "none", and tell the author of the model family or backend', self.device
        ) as capturing:
            for shape in counted(self.shapes.largest_first, "capturing graphs", show=progress):
                capturing.what = f"the forward of {shape.num_tokens} tokens"
                self._captured[shape], graphs = self._capture(shape, capturing.pool)
                count += graphs
        self.report = capturing.report(len(self._captured), count)

    def note_lacking(self, missing: MissingKernels) -> None:
        """Note the kernels that captures will launch and that are not loaded, see `note_lacking`."""
        note_lacking(
            map(self._recorded, self.shapes.largest_first), missing, "captured steps", replayed=True, device=self.device
        )

    def replay(self, inputs: ModelInputs) -> tuple[torch.Tensor, torch.Tensor | None, Mapping[str, torch.Tensor]]:
        """Run a step whose inputs have a captured shape. Return the results of all tokens in `CapturedGraph`.

        The attention of the step must have been planned. The results are overwritten by the next replay.

        Raises:
            IntegrityError: if the shape was not captured, or the inputs are not where its graph reads them.
        """
        captured = None if inputs.shape is None else self._captured.get(inputs.shape)
        if captured is None:
            raise IntegrityError(f"no graph of {inputs.shape} was captured")
        if self.addresses(inputs) != captured.addresses:
            raise IntegrityError(f"the inputs of {inputs.shape} are not where its graph reads them")
        for part in captured.parts:
            part()
        return captured.hidden_states, captured.logits, captured.extras

    def precomputed_groups(self, shape: GraphShape) -> frozenset[str]:
        """Return the names of the attention groups that a replay of a shape runs by the plans made at its capture."""
        found = self._precomputed.get(shape)
        if found is None:
            if self.plans_anew:
                return frozenset()
            names = frozenset(group.name for group in self._router.groups if group.plan_once)
            found = self._precomputed[shape] = frozenset() if shape.cascade else names - self._broken(shape)
        return found

    def results(self, shape: GraphShape) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the hidden states and the extensions' tensors that a replay writes, as in `CapturedGraph`."""
        captured = self._captured[shape]
        return captured.hidden_states, captured.extras

    def made_up(self, shape: GraphShape) -> tuple[ModelInputs, Attend]:
        """Make up inputs of a shape that write to no block, at the addresses of all steps, and plan their attention."""
        rows = self._gatherer.rows
        # The longest sequences: sizes that a backend derives from them, such as splits of the keys, must serve all
        # replays. Short ones if no attention or state is captured: all keys of the requests would be read in vain. A
        # prefix that they share is as long as it may be, though, and they are longer.
        lens, broken = self._query_lens(shape), self._broken(shape)
        captured = any(group.name not in broken for group in self._groups())
        prefixes = self._cascade.longest(np.asarray(lens), rows.max_model_len) if shape.cascade else ()
        inputs = self._gatherer.dummy(
            lens,
            seq_len=rows.max_model_len if captured or prefixes else None,
            shape=shape,
            prefixes=prefixes,
            variant=shape.variant,
        )
        attend = self._router.plan(inputs.batches)
        self._gatherer.assembler.mark()
        return inputs, attend

    def _capture(self, shape: GraphShape, pool: Any) -> tuple[CapturedGraph, int]:
        """Capture one shape. Return it with the number of its graphs."""
        inputs, attend = self._planned(shape)
        for _ in range(WARM_UPS):
            self._forward(inputs, attend, self._arguments(inputs, frozenset(), lambda call: call()))
        self.device.synchronize()
        recorder = Recorder(pool, [])
        recorder.begin()
        hidden, logits, extras = self._record(recorder, shape, inputs)
        recorder.end()
        # Only one replay's results count at a time, so all shapes share the memory of theirs.
        captured = CapturedGraph(
            tuple(recorder.parts),
            self.addresses(inputs),
            alias_without_ownership(hidden),
            None if logits is None else alias_without_ownership(logits),
            {name: alias_without_ownership(result) for name, result in extras.items()},
        )
        return captured, recorder.graphs

    def _planned(self, shape: GraphShape) -> tuple[ModelInputs, Attend]:
        """Make up inputs of a shape, with the attention and extensions of the step planned."""
        inputs, attend = self.made_up(shape)
        for plan in self._extensions.plan:
            plan(inputs)
        self._gatherer.assembler.mark()
        return inputs, attend

    def _recorded(self, shape: GraphShape) -> Callable[[Recorder], object]:
        """Return the capture of a shape's planned forward pass."""
        inputs, _ = self._planned(shape)
        return lambda recorder: self._record(recorder, shape, inputs)

    def _record(
        self, recorder: Recorder, shape: GraphShape, inputs: ModelInputs
    ) -> tuple[torch.Tensor, torch.Tensor | None, Mapping[str, torch.Tensor]]:
        """Capture a forward pass, broken at the shape's groups. The results are in the graphs' memory."""
        broken = self._broken(shape)
        attend = self._router.breaking(broken, recorder.cut, zeroed=shape.num_requests > 0)
        return self._forward(inputs, attend, self._arguments(inputs, broken, recorder.cut))

    def _arguments(
        self, inputs: ModelInputs, broken: frozenset[str], cut: Callable[[Callable[[], None]], None]
    ) -> dict[str, Any]:
        """Return further arguments of a forward pass that is captured, or run before its capture."""
        further: dict[str, Any] = {}
        for arguments in self._extensions.capture_kwargs:
            further |= arguments(inputs, broken, cut)
        return further

    def _query_lens(self, shape: GraphShape) -> list[int]:
        """Return the query tokens of the made-up requests.

        A mixed batch whose attention is captured has the fewest and longest requests, and others without query tokens,
        since a launch for these serves any other division of the same number of tokens. Each has a past, which a
        backend might serve in another way than a prompt that begins.
        """
        rows = self._gatherer.rows
        if shape.num_requests:
            return even_split(shape.num_tokens, -(-shape.num_tokens // max(1, rows.max_model_len - 1)))
        return even_split(shape.num_tokens, min(shape.num_tokens // (shape.query_len or 1), rows.max_requests))

    def _forward(
        self, inputs: ModelInputs, attend: Attend, further: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None, Mapping[str, torch.Tensor]]:
        assert inputs.shape is not None
        hidden = self._model.forward(resolved(inputs.input_ids, self._last_tokens), inputs.positions, attend, **further)
        logits = self._model.compute_logits(hidden) if inputs.shape.query_len else None
        return hidden, logits, self._extensions.results()

    def addresses(self, inputs: ModelInputs) -> tuple[int, ...]:
        """Return the addresses of the tokens and of the inputs of captured attention and extensions.

        Not every mixed batch captures the latter.
        """
        read = [inputs.input_ids, inputs.positions]
        if inputs.shape is not None and inputs.shape.padded_requests:
            for _, tensors in self._extensions.captured_inputs:
                read += tensors(inputs)
            for batch in inputs.batches:
                read += [batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_table]
                read += [] if batch.common_prefix is None else [batch.common_prefix]
        return tuple(tensor.data_ptr() for tensor in read)

    def _broken(self, shape: GraphShape) -> frozenset[str]:
        """Return the groups that break the graph of a shape."""
        phase = {0: "mixed", 1: "decode"}.get(shape.query_len, "verify")
        cut = {group.name for group in self._groups() if not group.captured(phase)}
        if shape.cascade:
            cut |= {group.name for group in self._router.groups if group.cascade and not group.cascade_captured}
        return frozenset(cut)

    def _groups(self) -> tuple[GroupPlan | StateGroupPlan, ...]:
        return (*self._plan.groups, *self._plan.state_groups)
