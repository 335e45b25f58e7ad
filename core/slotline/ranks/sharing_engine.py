"""The engine of a replica that shares the experts of its mixtures with the other replicas."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from attrs import define, field

from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.batch.step_output import ForwardOutput
from slotline.core.engine.engine import Engine
from slotline.core.engine.engine_lock import exclusive
from slotline.core.engine.output_processor import StepResult
from slotline.kernels.device_scope import on_device
from slotline.ranks.expert_balance import ExpertBalance
from slotline.ranks.group import RankGroup, waits_in
from slotline.ranks.meetings import Meetings
from slotline.ranks.stacks import lost_others

_CAUSE = 2.0
"""Seconds in which the front finds out why this replica has lost another one."""


@define(kw_only=True, eq=False, slots=False)
class SharingEngine(Engine):
    """Engine with requests of its own, whose forward passes run in step with those of other replicas.

    Attributes:
        group: all replicas. None until `connect`.
        meetings: agree on forward passes. None until `connect`.
        balance: places experts. None without counted experts.
        is_within: whether a forward pass has begun that did not end here, so that the others wait for it.
    """

    group: RankGroup | None = field(default=None, init=False)
    meetings: Meetings | None = field(default=None, init=False)
    balance: ExpertBalance | None = field(default=None, init=False)
    is_within: bool = field(default=False, init=False)

    def connect(self, group: RankGroup, meetings: Meetings) -> None:
        """Run in step with the other replicas from now on."""
        self.group, self.meetings = group, meetings

    def disconnect(self) -> None:
        """Leave the other replicas, between two forward passes. `connect` may follow with another group."""
        if self.meetings is not None:
            self.meetings.close()
        if self.group is not None:
            self.group.close()
        self.group = self.meetings = None

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

    @exclusive
    @on_device
    @torch.inference_mode()
    def run_experts(self) -> None:
        """Run a forward pass of the other replicas, in which this one has no tokens.

        Raises:
            RankError: if a replica does not come to it.
        """
        with self._in_step(0):
            self.runner.model.idle_experts()  # type: ignore[attr-defined]

    def _launch(self, schedule: SchedulerOutput) -> ForwardOutput:
        with self._in_step(schedule.num_tokens):
            return super()._launch(schedule)

    @contextmanager
    def _in_step(self, tokens: int) -> Iterator[None]:
        """Join a forward pass of all replicas. What is raised in it leaves them waiting, so that they all must end."""
        if self.meetings is None:
            yield
            return
        self.is_within = True
        try:
            self.meetings.meet(tokens)
            yield
            if self.balance is not None:
                self.balance.after_step()
        except BaseException as error:
            if lost_others(error, waits_in(self.group)):
                time.sleep(_CAUSE)
            raise
        self.is_within = False
