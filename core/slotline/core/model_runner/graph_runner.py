"""Replay of captured graphs of a forward pass. They are captured when the engine is built.

Inputs that change from step to step are read from the staging buffers, whose addresses never change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import frozen

from slotline.core.batch.extensions import NO_EXTENSIONS, Extensions
from slotline.core.batch.graph_dispatcher import GraphDispatcher, GraphShape
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.model_runner.attention_dispatcher import AttentionGroup
from slotline.registry.engine_reports import CaptureReport
from slotline.registry.errors import IntegrityError
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
    """Replays captured shapes.

    Attributes:
        shapes: the captured shapes.
        captured: the graphs of each.
        report: time and memory of the captures.
        plans_anew: whether the attention of each step is planned, even if a replay does not need it.
    """

    def __init__(
        self,
        shapes: GraphDispatcher,
        groups: Sequence[AttentionGroup],
        plan: Plan,
        extensions: Extensions = NO_EXTENSIONS,
        *,
        plans_anew: bool = False,
    ) -> None:
        self.shapes = shapes
        self.report = CaptureReport()
        self.captured: dict[GraphShape, CapturedGraph] = {}
        self.plans_anew = plans_anew
        self._attention_groups = tuple(groups)
        self._plan = plan
        self._extensions = extensions
        self._precomputed: dict[GraphShape, frozenset[str]] = {}

    @property
    def memory(self) -> int:
        """Bytes of device memory that the captures took."""
        return self.report.memory

    def replay(self, inputs: ModelInputs) -> tuple[torch.Tensor, torch.Tensor | None, Mapping[str, torch.Tensor]]:
        """Run a step whose inputs have a captured shape. Return the results of all tokens in `CapturedGraph`.

        The attention of the step must have been planned. The results are overwritten by the next replay.

        Raises:
            IntegrityError: if the shape was not captured, or the inputs are not where its graph reads them.
        """
        captured = None if inputs.shape is None else self.captured.get(inputs.shape)
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
            names = frozenset(group.name for group in self._attention_groups if group.plan_once)
            found = self._precomputed[shape] = frozenset() if shape.cascade else names - self.broken(shape)
        return found

    def results(self, shape: GraphShape) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the hidden states and the extensions' tensors that a replay writes, as in `CapturedGraph`."""
        captured = self.captured[shape]
        return captured.hidden_states, captured.extras

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
                read += [] if batch.prefix_groups is None else [batch.prefix_groups.segments]
        return tuple(tensor.data_ptr() for tensor in read)

    def broken(self, shape: GraphShape) -> frozenset[str]:
        """Return the groups that break the graph of a shape."""
        phase = {0: "mixed", 1: "decode"}.get(shape.query_len, "verify")
        cut = {group.name for group in self.groups if not group.captured(phase)}
        if shape.cascade:
            cut |= {group.name for group in self._attention_groups if group.cascade and not group.cascade_captured}
        return frozenset(cut)

    @property
    def groups(self) -> tuple[GroupPlan | StateGroupPlan, ...]:
        """Return the planned groups of all layers."""
        return (*self._plan.groups, *self._plan.state_groups)
