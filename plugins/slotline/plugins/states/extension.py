"""Extension of a model with state layers: their part of each step, and prefixes that requests resume from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slotline.builder.parts import Parts
from slotline.core.batch.input_batch_cpu import InputBatchCPU
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.batch.step_output import StepOutput
from slotline.core.kv_cache.block_hashes import extend_hashes, hash_sizes
from slotline.planner.state_specs import StateSpecBuilder
from slotline.plugins.states.batches import NAME, StateBatches
from slotline.plugins.states.checkpoints import Checkpoints
from slotline.plugins.states.rules import rules_of
from slotline.plugins.states.slots import build_dispatcher
from slotline.registry.contracts import BlockHash, ExtensionContext
from slotline.registry.output_checks import OutputChecks

Int = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class StateLayers:
    """Runs the state layers of each step, and lets requests resume only where a state is kept.

    Attributes:
        dispatcher: the backends and the states.
        batches: builds the part of a step's inputs that they read.
        checkpoints: the kept states.
    """

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        planned, memory = parts.planned, parts.planned.plan.states
        assert memory is not None
        held = StateSpecBuilder(planned.loaded, planned.registry, planned.offers, planned.max_model_len).build(
            planned.plan
        )
        self.dispatcher = build_dispatcher(parts, held)
        self.batches = StateBatches(parts.rows)
        self.checkpoints = Checkpoints(
            parts.rows,
            self.dispatcher,
            memory.unit,
            rules_of([one.spec for one in held]),
            [one.name for one in held],
            self.batches,
        )
        self._rows = parts.rows
        self._hash_size, self._unit = hash_sizes(parts.groups, planned.plan.block_size)
        self._shares = planned.plan.prefix_caching
        self._divides = planned.chunked_prefill
        # The drafter's steps overlap then, and states are rolled back on the device.
        self._rolled_back = planned.drafter is not None and planned.asynchronous and planned.task == "generate"
        self._strict = OutputChecks(strict=True)
        self._checks = parts.checks

    @property
    def num_slots(self) -> int:
        """Return the number of slots, those for checkpoints included."""
        return self.dispatcher.num_slots

    # The forward pass

    def gather(self, batch: InputBatchCPU, upload: Callable[[npt.NDArray[Any]], torch.Tensor]) -> Any:
        """Return the `StateBatch` of a step."""
        return self.batches.gather(batch, upload)

    def staging_bytes(self, max_tokens: int) -> int:
        """Return the bytes that `gather` uploads at most."""
        return self.batches.staging_bytes(max_tokens)

    def captured_inputs(self, inputs: ModelInputs) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a step that captured state layers read."""
        return self.batches.captured_inputs(inputs)

    def plan(self, inputs: ModelInputs) -> None:
        """Plan the state layers of a step. Outputs of made-up steps are checked strictly."""
        self.dispatcher.plan(inputs.extras[NAME], self._strict if inputs.made_up else self._checks)

    def forward_kwargs(self, inputs: ModelInputs) -> Mapping[str, Any]:
        """Return the callable that the model's state layers call."""
        return {"advance": self.dispatcher.advancing}

    def capture_kwargs(
        self, inputs: ModelInputs, broken: frozenset[str], cut: Callable[[Callable[[], None]], None]
    ) -> Mapping[str, Any]:
        """Return the callable for a forward pass that is being captured."""
        return {"advance": self.dispatcher.breaking(broken, cut)}

    def commit_there(self, rows: torch.Tensor, accepted: torch.Tensor) -> None:
        """Roll states back to accepted tokens that only the device knows, see `StateDispatcher.commit_there`."""
        self.dispatcher.commit_there(rows, accepted)

    def computed_by(self) -> list[str]:
        """Return the plugins of the state layers."""
        return [group.plugin for group in self.dispatcher.groups]

    # Prefixes and steps

    def limit_prefix_of(self, request: Request, hashes: Sequence[BlockHash]) -> int:
        """Return the longest prefix, in units, whose state is kept here or can be loaded."""
        return self.checkpoints.find(hashes, request)

    def limit_prompt(self, request: Request, computed: int, count: int) -> int:
        """Cut a request's first step where a checkpoint is to be taken."""
        return self.checkpoints.first_cut(
            self._units(request), computed, count, divisible=self._divides and not request.whole_prompt
        )

    def begin_request(self, request: Request, computed: int) -> None:
        """Give a request's row the state after its cached prefix, and choose where it leaves checkpoints."""
        units = self._units(request)
        self.checkpoints.aim(request.row, units, computed, 1, divisible=self._divides and not request.whole_prompt)
        self.checkpoints.begin(request.row, units, computed)

    def unschedule(self, request: Request) -> None:
        """Forget that a request waits for its state."""
        self.checkpoints.leave(request.row)

    def limit_tokens(self, rows: Int, counts: Int) -> Int:
        """Cut the tokens of running requests where checkpoints are to be taken."""
        return self.checkpoints.cut(rows, self._rows.num_computed_tokens[rows], counts)

    def trim_tokens(self, rows: Int, counts: Int) -> Int:
        """Cut them again, within the step's budget."""
        return self.checkpoints.cut(rows, self._rows.num_computed_tokens[rows], counts)

    def before_schedule(self, rows: Int) -> list[tuple[int, Exception]]:
        """Keep the states of running rows that are at a prefix worth resuming from."""
        failed: list[tuple[int, Exception]] = []
        for row in self.checkpoints.due(rows).tolist():
            count = int(self._rows.num_computed_tokens[row]) // self._hash_size
            request, token_ids = self._rows.request(row), self._rows.token_ids[row]
            try:
                self.checkpoints.keep(row, extend_hashes(request, token_ids, count, self._hash_size)[count - 1])
            except Exception as error:  # a plugin's code may raise anything
                self.checkpoints.restore()
                failed.append((row, error))
        return failed

    def launched(self, scheduled: SchedulerOutput) -> None:
        """Count the tokens that the states of a launched step cover."""
        self.checkpoints.advance(scheduled.rows, scheduled.num_computed, scheduled.num_scheduled)

    def roll_back(self, rows: Int, counts: Int, accepted: Int, verified: Mask) -> None:
        """Roll states back to the accepted tokens of a step."""
        self.checkpoints.commit(rows, counts, accepted, verified, done=self._rolled_back)

    def commit(self, output: StepOutput) -> None:
        """Forget all checkpoints if a step gave NaN, since one of them may be the cause."""
        if output.spoiled:
            self.checkpoints.reset()

    # Recovery and checks

    def forget_prefixes(self) -> None:
        """Forget every checkpoint."""
        self.checkpoints.reset()

    def restore(self, requests: Sequence[Request]) -> None:
        """Free what was being kept when a step was interrupted. Requests begin anew."""
        self.batches.num_accepted[:] = 1
        self.checkpoints.restore()

    def check(self) -> None:
        """Raise IntegrityError unless slots, rows and checkpoints agree."""
        self.checkpoints.check()

    def _units(self, request: Request) -> Sequence[BlockHash]:
        """Return the hashes of all prefixes at which a request could resume, as its prefix look-up has made them."""
        if not self._shares or request.whole_prompt:
            return ()
        known = len(request.token_array) if request.row < 0 else int(self._rows.num_tokens[request.row])
        step, length = self._unit // self._hash_size, (known - 1) // self._unit * self._unit
        return request.block_hashes[step - 1 : length // self._hash_size : step]
