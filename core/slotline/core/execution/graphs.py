"""Captured graphs: which shapes are captured, how, and their replay.

A step's forward is plain Python that calls the model's layers one after the other, so a graph can be broken anywhere:
where a layer's attention or state cannot be captured, the capture ends before it, the call is kept, and a new one
begins behind it. The other groups keep theirs. All captures share one memory pool, the largest first, results
included: a replay overwrites those of the one before.

What changes from step to step is read from the staging buffers, whose addresses never change.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from attrs import asdict, define, frozen

from slotline.core.adapters.source import AdapterSource
from slotline.core.building.progress import counted
from slotline.core.cache.cascade import Cascade
from slotline.core.drafting.hidden_states import LayerTaps
from slotline.core.execution.attention import Attend, AttentionRouter, unowned
from slotline.core.execution.inputs import InputGatherer
from slotline.core.execution.padding import padded_size
from slotline.core.execution.states import Advance, StateRouter
from slotline.core.execution.step_inputs import GraphShape, StepInputs, even_split
from slotline.core.scheduling.scheduler import Schedule
from slotline.registry.contracts import Model
from slotline.registry.errors import CapacityError, IntegrityError, ModelError
from slotline.registry.negotiation import GroupPlan, Plan, StateGroupPlan, capture_sizes

logger = logging.getLogger("slotline")
AUTO_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Token counts of uniform batches where none are named: fine, since nearly every step is padded to one."""
AUTO_MIXED_SIZES = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Token counts of mixed batches where none are named: few, since each may take a graph for every layer."""
WARM_UPS = 1
"""Eager runs before a capture: they compile kernels and let libraries take their workspaces."""


@frozen(eq=False)
class Captured:
    """One captured shape: what to call in order, and where the results lie.

    Attributes:
        parts: replays of graphs and eager calls between them.
        addresses: of what the graphs read of a step's inputs.
        hidden_states: [num_tokens, hidden_size]; logits: [num_tokens, vocab_size], or None for a mixed batch, whose
            wanted tokens differ from step to step.
        layers: [num_tokens, layers * hidden_size], the inputs of the layers that a drafter reads, if any.
    """

    parts: tuple[Callable[[], None], ...]
    addresses: tuple[int, ...]
    hidden_states: torch.Tensor
    logits: torch.Tensor | None
    layers: torch.Tensor | None


@frozen(kw_only=True)
class CaptureReport:
    """What capturing took.

    Attributes:
        shapes: captured shapes.
        graphs: graphs that they consist of; more than shapes where attention breaks them.
        memory: bytes of device memory.
        seconds: wall-clock time.
    """

    shapes: int = 0
    graphs: int = 0
    memory: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


@define(eq=False)
class _Recorder:
    """Captures one forward in as many graphs as it is broken into."""

    pool: Any
    parts: list[Callable[[], None]]
    graph: torch.cuda.CUDAGraph | None = None
    graphs: int = 0

    def begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(pool=self.pool)

    def end(self) -> None:
        assert self.graph is not None
        self.graph.capture_end()
        self.parts.append(self.graph.replay)
        self.graph = None
        self.graphs += 1

    def cut(self, call: Callable[[], None]) -> None:
        """Keep an eager call between what was captured so far and what follows."""
        self.end()
        self.parts.append(call)
        self.begin()


class Capturing:
    """A stream to capture on and a memory pool; errors become typed, and there is a report at the end.

    Args:
        fix: what to do where something cannot be captured.

    Attributes:
        pool: that captures share.
        what: is being captured.
    """

    def __init__(self, fix: str) -> None:
        torch.cuda.synchronize()
        self._start, self._before = perf_counter(), torch.cuda.mem_get_info()[0]
        self.pool, self.what = torch.cuda.graph_pool_handle(), ""
        self._stream, self._fix, self._around = torch.cuda.Stream(), fix, ExitStack()
        self._stream.wait_stream(torch.cuda.current_stream())

    def __enter__(self) -> Self:
        self._around.enter_context(_no_collection())
        self._around.enter_context(torch.cuda.stream(self._stream))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave the stream.

        Raises:
            CapacityError: if the device ran out of memory; names what to lower.
            ModelError: if something cannot be captured.
        """
        self._around.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise CapacityError(
                f"capturing {self.what} does not fit into memory",
                fix='lower cache.memory or the largest of graphs.sizes, or set graphs.mode = "none"',
            ) from error
        if isinstance(error, RuntimeError):
            what = f"{self.what} cannot be captured: {str(error).splitlines()[0]}"
            raise ModelError(what, fix=self._fix) from error

    def report(self, shapes: int, graphs: int) -> CaptureReport:
        """What it took, once all is captured."""
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        memory, seconds = self._before - torch.cuda.mem_get_info()[0], perf_counter() - self._start
        message = "captured %d shapes in %d graphs: %.2f GiB, %.1f s"
        logger.info(message, shapes, graphs, memory / 2**30, seconds)
        return CaptureReport(shapes=shapes, graphs=graphs, memory=memory, seconds=seconds)


class GraphShapes:
    """The shapes that a plan has captured, and which one a step is padded to.

    Args:
        phases: the plan's phases and their states.
        sizes: token counts asked for, or ``auto``.
        query_len: of a uniform batch under speculation, 1 + draft tokens.
        max_requests, max_tokens: bounds on every batch.
        mixed_attention: whether a group's attention or states are inside the graphs of mixed batches, so that their
            requests are padded too.
        cascade: whether a uniform batch of so many requests, with so many query tokens each, may have a common prefix
            that is served apart.
        adapters: for a query length, 0 for mixed batches, whether shapes are captured without and with adapters; one
            that is captured with adapters alone serves steps without, too.
    """

    def __init__(
        self,
        phases: Mapping[str, str],
        sizes: Sequence[int] | str,
        *,
        query_len: int,
        max_requests: int,
        max_tokens: int,
        mixed_attention: bool = False,
        cascade: Callable[[int, int], bool] = lambda requests, query_len: False,
        adapters: Callable[[int], tuple[bool, ...]] = lambda query_len: (False,),
    ) -> None:
        mixed_sizes = AUTO_MIXED_SIZES if isinstance(sizes, str) else sizes
        sizes = AUTO_SIZES if isinstance(sizes, str) else sizes
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._most_mixed = max_requests if mixed_attention else 0
        self._adapters = adapters
        for phase, length in (("decode", 1), ("verify", query_len)):
            if phases.get(phase, "none") != "none":
                self._sizes[length] = capture_sizes(sizes, length, max_requests)
        if phases.get("mixed", "none") != "none":
            self._sizes[0] = tuple(sorted({min(size, max_tokens) for size in mixed_sizes if size > 0}))
        # One for each power of two: padding costs less than twice as many captures.
        self._cascades = {
            length: tuple(size for size in own if (size // length).bit_count() == 1 and cascade(size // length, length))
            for length, own in self._sizes.items()
            if length
        }

    @property
    def largest_first(self) -> tuple[GraphShape, ...]:
        """Every shape in the order of capture."""
        every = [
            self._shape(size, length, cascade=cascade, adapters=adapters)
            for cascade, by_length in ((False, self._sizes), (True, self._cascades))
            for length, sizes in by_length.items()
            for size in sizes
            for adapters in self._adapters(length)
        ]
        return tuple(sorted(every, key=lambda s: (-s.num_tokens, s.query_len, s.cascade, s.adapters)))

    def shape_for(self, schedule: Schedule, *, cascade: bool = False, adapters: bool = False) -> GraphShape | None:
        """The captured shape that a step is padded to; None if it runs eagerly, as with inputs besides text.

        Args:
            cascade: whether the step has a common prefix that is served apart: no other capture fits it then.
            adapters: whether a request of the step uses one.
        """
        if schedule.features:
            return None
        tokens, requests = schedule.num_tokens, len(schedule.rows)
        length = tokens // requests
        if length not in self._sizes or (schedule.num_scheduled != length).any():
            length = 0
        sizes = (self._cascades if cascade else self._sizes).get(length, ())
        captured = self._adapters(length)
        if not sizes or tokens > sizes[-1] or (adapters and True not in captured):
            return None
        return self._shape(
            padded_size(tokens, sizes), length, cascade=cascade, adapters=adapters or False not in captured
        )

    def _shape(self, num_tokens: int, query_len: int, *, cascade: bool, adapters: bool) -> GraphShape:
        num_requests = 0 if query_len else min(num_tokens, self._most_mixed)
        return GraphShape(num_tokens, query_len, num_requests, cascade, adapters)


class GraphRunner:
    """Captures shapes and replays them.

    Attributes:
        shapes: what is captured.
        report: what capturing took.
    """

    def __init__(
        self,
        model: Model,
        router: AttentionRouter,
        gatherer: InputGatherer,
        plan: Plan,
        shapes: GraphShapes,
        cascade: Cascade,
        token_ids: Callable[[StepInputs], torch.Tensor],
        taps: LayerTaps | None = None,
        states: StateRouter | None = None,
        adapters: AdapterSource | None = None,
    ) -> None:
        self.shapes = shapes
        self.report = CaptureReport()
        self._model = model
        self._router = router
        self._gatherer = gatherer
        self._plan = plan
        self._cascade = cascade
        self._token_ids = token_ids
        self._taps = taps
        self._states = states
        self._adapters = adapters
        self._captured: dict[GraphShape, Captured] = {}

    @property
    def memory(self) -> int:
        """Bytes of device memory that the captures took."""
        return self.report.memory

    @torch.inference_mode()
    def capture(self, *, progress: bool = False) -> None:
        """Capture every shape, once, before the first request.

        Raises:
            CapacityError: if the device runs out of memory; names what to lower.
            ModelError: if a forward cannot be captured, or if the graphs are there already.
        """
        if self._captured:
            raise ModelError("the graphs are captured already", fix="capture once, when the engine is built")
        count = 0
        with Capturing('set graphs.mode = "none", and tell the author of the model family or backend') as capturing:
            for shape in counted(self.shapes.largest_first, "capturing graphs", show=progress):
                capturing.what = f"the forward of {shape.num_tokens} tokens"
                self._captured[shape], graphs = self._capture(shape, capturing.pool)
                count += graphs
        self.report = capturing.report(len(self._captured), count)

    def replay(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Run a step whose inputs have a captured shape: what `Captured` has of all tokens.

        The attention of the step must have been planned; the results are overwritten by the next replay.
        """
        assert inputs.shape is not None
        captured = self._captured[inputs.shape]
        if self.addresses(inputs) != captured.addresses:
            raise IntegrityError(f"the inputs of {inputs.shape} are not where its graph reads them")
        for part in captured.parts:
            part()
        return captured.hidden_states, captured.logits, captured.layers

    def states(self, shape: GraphShape) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where a replay leaves hidden states and the inputs of layers, as in `Captured`."""
        captured = self._captured[shape]
        return captured.hidden_states, captured.layers

    def made_up(self, shape: GraphShape) -> tuple[StepInputs, Attend]:
        """Inputs of a shape that write to no block, at the addresses of any step's, and their planned attention."""
        rows = self._gatherer.rows
        # The longest sequences: what a backend sizes by them, such as splits of the keys, must serve every replay.
        lens = self._query_lens(shape)
        prefixes = self._cascade.longest(np.asarray(lens), rows.max_model_len) if shape.cascade else ()
        inputs = self._gatherer.dummy(
            lens, seq_len=rows.max_model_len, shape=shape, prefixes=prefixes, adapters=shape.adapters
        )
        return inputs, self._router.plan(inputs.batches)

    def _capture(self, shape: GraphShape, pool: Any) -> tuple[Captured, int]:
        """One shape, and the number of its graphs."""
        (inputs, attend), advance = self.made_up(shape), None
        if self._adapters is not None:
            self._adapters.plan(inputs.lora_slots)
        if self._states is not None and inputs.states is not None:
            advance = self._states.plan(inputs.states)
        for _ in range(WARM_UPS):
            self._forward(inputs, attend, advance)
        torch.cuda.synchronize()
        recorder, broken = _Recorder(pool, []), self._broken(shape)
        attend = self._router.breaking(broken, recorder.cut, zeroed=shape.num_requests > 0)
        if self._states is not None:
            advance = self._states.breaking(broken, recorder.cut)
        recorder.begin()
        hidden, logits, layers = self._forward(inputs, attend, advance)
        recorder.end()
        # Only one replay's results count at a time, so all shapes share the memory of theirs.
        captured = Captured(
            tuple(recorder.parts),
            self.addresses(inputs),
            unowned(hidden),
            None if logits is None else unowned(logits),
            None if layers is None else unowned(layers),
        )
        return captured, recorder.graphs

    def _query_lens(self, shape: GraphShape) -> list[int]:
        """Query tokens of the made-up requests.

        Of a mixed batch whose attention is captured: as few and long requests as can be, beside requests without
        query tokens, since a launch for these serves any other division of as many tokens. Each has a past, which a
        backend might serve in another way than a prompt that begins.
        """
        rows = self._gatherer.rows
        if shape.num_requests:
            return even_split(shape.num_tokens, -(-shape.num_tokens // max(1, rows.max_model_len - 1)))
        return even_split(shape.num_tokens, min(shape.num_tokens // (shape.query_len or 1), rows.max_requests))

    def _forward(
        self, inputs: StepInputs, attend: Attend, advance: Advance | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        assert inputs.shape is not None
        further: dict[str, Any] = {} if self._taps is None else {"tap": self._taps}
        if advance is not None:
            further["advance"] = advance
        hidden = self._model.forward(self._token_ids(inputs), inputs.positions, attend, **further)
        logits = self._model.compute_logits(hidden) if inputs.shape.query_len else None
        return hidden, logits, None if self._taps is None else self._taps.take()

    def addresses(self, inputs: StepInputs) -> tuple[int, ...]:
        """Where the tokens lie, and what captured attention and states read: that is not in every mixed batch."""
        read, states = [inputs.input_ids, inputs.positions], inputs.states
        if inputs.shape is not None and inputs.shape.padded_requests:
            if states is not None:
                read += [states.query_start_loc, states.slots, states.has_initial_state, states.num_accepted]
            for batch in inputs.batches:
                read += [batch.slot_mapping, batch.query_start_loc, batch.seq_lens, batch.block_table]
                read += [] if batch.common_prefix is None else [batch.common_prefix]
        return tuple(tensor.data_ptr() for tensor in read)

    def _broken(self, shape: GraphShape) -> frozenset[str]:
        """The groups that break the graph of a shape."""
        phase = {0: "mixed", 1: "decode"}.get(shape.query_len, "verify")
        groups: tuple[GroupPlan | StateGroupPlan, ...] = (*self._plan.groups, *self._plan.state_groups)
        cut = {group.name for group in groups if not group.captured(phase)}
        if shape.cascade:
            cut |= {group.name for group in self._router.groups if group.cascade and not group.cascade_captured}
        return frozenset(cut)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: it might free a tensor of the device, or a graph, in the middle of a capture."""
    gc.collect()
    gc.freeze()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        gc.unfreeze()
