"""Capture of an engine's graphs, when it is built.

A step's forward is plain Python that calls the model's layers one after the other, so a graph can be broken anywhere:
if a layer's attention or state cannot be captured, the capture ends before it, the call is kept, and a new one begins
after it. The other groups keep theirs. All captures share one memory pool, the largest first, results included: a
replay overwrites the results of the previous replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from slotline.builder.counted import counted
from slotline.builder.graph_capture import WARM_UPS, GraphCapture, Recorder, breaking, note_lacking
from slotline.builder.made_up import even_split, made_up_inputs
from slotline.core.batch.attend import Attend
from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.graph_dispatcher import GraphDispatcher, GraphShape
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.placeholder_tokens import PlaceholderTokens, resolved
from slotline.core.device.torch_device import TorchDevice
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher
from slotline.core.model_runner.graph_runner import CapturedGraph, GraphRunner
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.kernels.graph_capture_state import alias_without_ownership
from slotline.registry.contracts import Device, MissingKernels, Model
from slotline.registry.contracts.prefix_groups import PrefixFinder
from slotline.registry.errors import ModelError
from slotline.registry.negotiation import Plan


class GraphCapturer(GraphRunner):
    """Runner of graphs that captures them first.

    Attributes:
        device: has graphs.
    """

    def __init__(
        self,
        model: Model,
        router: AttentionDispatcher,
        gatherer: InputPreparer,
        plan: Plan,
        shapes: GraphDispatcher,
        cascade: PrefixFinder | None,
        last_tokens: PlaceholderTokens | None = None,
        extensions: Extensions = NO_EXTENSIONS,
        device: Device | None = None,
        *,
        plans_anew: bool = False,
        has_logits: bool = True,
    ) -> None:
        super().__init__(shapes, router.groups, plan, extensions, plans_anew=plans_anew)
        self._has_logits = has_logits
        self.device = device or TorchDevice("cpu", "cpu")
        self._model = model
        self._router = router
        self._gatherer = gatherer
        self._cascade = cascade
        self._last_tokens = last_tokens

    @torch.inference_mode()
    def capture(self, *, progress: bool = False) -> None:
        """Capture every shape, once, before the first request.

        Raises:
            CapacityError: if the device runs out of memory. It names the setting to lower.
            ModelError: if a forward cannot be captured, or if the graphs are there already.
        """
        if self.captured:
            raise ModelError("the graphs are captured already", fix="capture once, when the engine is built")
        count = 0
        with GraphCapture(
            'set graphs.mode = "none", and tell the author of the model family or backend', self.device
        ) as capturing:
            for shape in counted(self.shapes.largest_first, "capturing graphs", show=progress):
                capturing.what = f"the forward of {shape.num_tokens} tokens"
                self.captured[shape], graphs = self._capture(shape, capturing.pool)
                count += graphs
        self.report = capturing.report(len(self.captured), count)

    def note_lacking(self, missing: MissingKernels) -> None:
        """Note the kernels that captures will launch and that are not loaded, see `note_lacking`."""
        note_lacking(
            map(self._recorded, self.shapes.largest_first), missing, "captured steps", replayed=True, device=self.device
        )

    def made_up(self, shape: GraphShape) -> tuple[ModelInputs, Attend]:
        """Make up inputs of a shape that write to no block, at the addresses of all steps, and plan their attention."""
        rows = self._gatherer.rows
        # The longest sequences: sizes that a backend derives from them, such as splits of the keys, must serve all
        # replays. Short ones if no attention or state is captured: all keys of the requests would be read in vain. A
        # prefix that they share is as long as it may be, though, and they are longer.
        lens, broken = self._query_lens(shape), self.broken(shape)
        captured = any(group.name not in broken for group in self.groups)
        prefixes = None
        if shape.cascade and self._cascade is not None:
            prefixes = self._cascade.longest(np.asarray(lens), rows.max_model_len, shape.cascade)
        inputs = made_up_inputs(
            self._gatherer,
            lens,
            seq_len=rows.max_model_len if captured or prefixes is not None else None,
            shape=shape,
            prefixes=prefixes,
            variant=shape.variant,
        )
        for prepare in self._extensions.prepare_captured:
            inputs = prepare(inputs)
        attend = self._router.plan(inputs.batches)
        self._gatherer.assembler.mark()
        return inputs, attend

    def _capture(self, shape: GraphShape, pool: Any) -> tuple[CapturedGraph, int]:
        """Capture one shape. Return it with the number of its graphs."""
        inputs, attend = self._planned(shape)
        _shorten(inputs)
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
        broken = self.broken(shape)
        attend = breaking(self._router, broken, recorder.cut, zeroed=shape.num_requests > 0)
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
        logits = self._model.compute_logits(hidden) if inputs.shape.query_len and self._has_logits else None
        return hidden, logits, self._extensions.results()


def _shorten(inputs: ModelInputs) -> None:
    """Let eager runs of a uniform shape read few keys. Their launches are those planned for the longest sequences.

    Reading all keys of each shape's requests would take more than a second of the captures of a model of 8B parameters.
    """
    if inputs.shape is not None and inputs.shape.query_len and not inputs.shape.cascade:
        for batch in inputs.batches:
            batch.seq_lens.clamp_(max=batch.max_query_len)
