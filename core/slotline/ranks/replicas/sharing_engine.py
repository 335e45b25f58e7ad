"""The engine of a replica that shares the experts of its mixtures with the other replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import define, evolve, field

from slotline.builder.made_up import made_up_inputs
from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.batch.step_output import ForwardOutput
from slotline.core.engine.engine import Engine
from slotline.core.engine.engine_lock import exclusive
from slotline.core.engine.output_processor import StepResult
from slotline.core.model_runner.graph_runner import GraphRunner
from slotline.kernels.device_scope import on_device
from slotline.planner.plan import Planned
from slotline.ranks.expert_balance import ExpertBalance
from slotline.ranks.group import RankGroup, waits_in
from slotline.ranks.replicas.agreed_shapes import AgreedShapes
from slotline.ranks.replicas.meetings import Meetings
from slotline.ranks.stacks import lost_others

_CAUSE = 2.0
"""Seconds in which the front finds out why this replica has lost another one."""


@define(kw_only=True, eq=False, slots=False)
class SharingEngine(Engine):
    """Engine with requests of its own, whose forward passes run in step with those of other replicas.

    Attributes:
        group: all replicas. None until `join_others`.
        meetings: agree on forward passes. None until `join_others`.
        balance: places experts. None without counted experts.
        planned: what it was built from. None until it is built.
        called: is called by another thread when another replica waits for this one.
        is_within: whether a forward pass has begun that did not end here, so that the others wait for it.
    """

    group: RankGroup | None = field(default=None, init=False)
    meetings: Meetings | None = field(default=None, init=False)
    balance: ExpertBalance | None = field(default=None, init=False)
    planned: Planned | None = field(default=None, init=False)
    called: Callable[[], None] = field(default=lambda: None, init=False)
    is_within: bool = field(default=False, init=False)
    _pieces: int = field(default=1, init=False)
    _shapes: AgreedShapes = field(factory=lambda: AgreedShapes(()), init=False)

    def make_way(self) -> None:
        """Let extensions wait only while no other replica waits for this one. Called once."""
        collect_ready = tuple(partial(self._giving_way, collect) for collect in self.extensions.collect_ready)
        self.extensions = evolve(self.extensions, collect_ready=collect_ready)

    def join_others(self, group: RankGroup, meetings: Meetings) -> None:
        """Run in step with the other replicas from now on."""
        self.group, self.meetings = group, meetings
        self._shapes = AgreedShapes(() if self.graphs is None else self.graphs.shapes.largest_first)
        meetings.called = lambda: self.called()

    def leave_others(self) -> None:
        """Leave the other replicas, between two forward passes. `join_others` may follow with another group."""
        if self.meetings is not None:
            self.meetings.close()
        if self.group is not None:
            self.group.close()
        self.group = self.meetings = None

    def capture_again(self) -> None:
        """Capture all steps anew, while the other replicas do: graphs hold the group, and the number of experts.

        Raises:
            CapacityError: if the device runs out of memory.
        """
        graphs: Any = self.graphs
        if graphs is not None:
            graphs.captured.clear()
            graphs.capture()

    @property
    def is_awaited(self) -> bool:
        """Whether another replica waits for this one to run its experts."""
        return self.meetings is not None and self.meetings.is_awaited

    @exclusive
    def step(self) -> StepResult:
        """See `Engine.step`. A step without a forward pass runs the experts if another replica waits for them.

        Raises:
            RankError: if a replica does not come to a forward pass.
        """
        before = 0 if self.meetings is None else self.meetings.passes
        result = super().step()
        if self.meetings is not None and self.meetings.passes == before and self.is_awaited:
            self.run_experts()
        return result

    def run_experts(self) -> None:
        """Run a forward pass of the other replicas, in which this one has no tokens.

        Raises:
            RankError: if a replica does not come to it.
        """
        self._run_experts(leaves=False)

    def leave_together(self) -> None:
        """Run forward passes of the other replicas until all of them call this. No pass follows for any of them.

        Raises:
            RankError: if a replica does not come to one.
        """
        assert self.meetings is not None
        while not self.meetings.all_leave:
            self._run_experts(leaves=True)

    @exclusive
    @on_device
    @torch.inference_mode()
    def _run_experts(self, *, leaves: bool) -> None:
        with self._in_pass():
            shape = self._meet(0, None, leaves=leaves)
            if shape is None or self.graphs is None:
                self.runner.model.idle_experts(self._pieces)  # type: ignore[attr-defined]
            else:
                inputs = self._made_up(shape)
                self.runner.plan(inputs)
                self.graphs.replay(inputs)

    def _giving_way(self, collect: Callable[..., Any], *, idle: bool, gives_way: Callable[[], bool]) -> Any:
        """Return what an extension has ready."""
        return collect(idle=idle, gives_way=lambda: gives_way() or self.is_awaited)

    def _launch(self, schedule: SchedulerOutput) -> ForwardOutput:
        with self._in_pass():
            if self.graphs is None:
                self._meet(schedule.num_tokens, None)
            return super()._launch(schedule)

    def _graph_shape(
        self, graphs: GraphRunner, schedule: SchedulerOutput, *, cascade: int, variant: int
    ) -> GraphShape | None:
        own = super()._graph_shape(graphs, schedule, cascade=cascade, variant=variant)
        return self._meet(schedule.num_tokens, own)

    def _meet(self, tokens: int, own: GraphShape | None, *, leaves: bool = False) -> GraphShape | None:
        """Come to the next forward pass with the other replicas. Return the captured shape in which all run it.

        Args:
            own: the shape in which this replica would run it alone. None to run eagerly.
            leaves: whether it leaves the others after this pass, if all do.
        """
        if self.meetings is None:
            return own
        self.is_within = True
        found = self.meetings.meet(tokens, self._shapes.number_of(own), leaves=leaves)
        shape, cuts = self._shapes.agreed(found), self.extension("microbatches")
        self._pieces = 1 if shape is not None or cuts is None else cuts.agree([one.tokens for one in found])
        return shape

    def _made_up(self, shape: GraphShape) -> ModelInputs:
        """Make up a step of a captured shape, whose tokens are drawn so that they go to all experts."""
        requests = shape.padded_requests or 1
        past = self.rows.max_model_len if shape.cascade else None
        lens = [shape.query_len or shape.num_tokens // requests] * requests
        lens[-1] += shape.num_tokens - sum(lens)
        prefixes = None
        if shape.cascade and self.cascade is not None:
            prefixes = self.cascade.longest(np.asarray(lens), self.rows.max_model_len, shape.cascade)
        return made_up_inputs(
            self.gatherer,
            lens,
            seq_len=past,
            vocab_size=self.limits.vocab_size,
            shape=shape,
            prefixes=prefixes,
            variant=shape.variant,
        )

    @contextmanager
    def _in_pass(self) -> Iterator[None]:
        """Enter a forward pass of all replicas. What is raised in it leaves them waiting, so that they all must end."""
        try:
            yield
            if self.balance is not None:
                self.balance.after_step()
        except BaseException as error:
            if self.is_within and lost_others(error, waits_in(self.group)):
                time.sleep(_CAUSE)
            raise
        self.is_within = False
