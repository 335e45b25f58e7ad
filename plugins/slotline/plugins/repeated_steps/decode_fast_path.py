"""Decode fast path: steps with the same requests as the previous step, in the same order, one token each.

Only the blocks that its requests were given since are uploaded. Its tokens are placeholders, the same in each step
(`PlaceholderTokens`). Positions, lengths and the counter of each random number grow by one. The device advances the
inputs that it holds in place, so that graphs find them at the same addresses.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen

from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.core.batch.sampling_metadata import PACKED_WIDTH, STRIDE
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.kv_cache.block_table import DeviceTables
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.registry.contracts import DecodeBatch, Device
from slotline.registry.contracts.prefix_groups import StepPrefixes

Int = npt.NDArray[np.int64]


@frozen(eq=False)
class _Last:
    """A step whose inputs the device holds, until the step of the next `number` is assembled."""

    inputs: ModelInputs
    prefixes: StepPrefixes | None
    variant: int
    number: int


class DecodeFastPath:
    """Builder of `ModelInputs` for a step that repeats the previous step.

    The device reads changes of the tables directly from host memory, since they are small, and a separate copy would
    hold up the device for longer.

    Args:
        preparer: gathers the steps that do not repeat the last one.
        tables: of the device, which must be the only tables.
        last_tokens: of steps that verify no tokens.
        device: its operations advance a batch.
    """

    def __init__(
        self, preparer: InputPreparer, tables: DeviceTables, last_tokens: PlaceholderTokens, device: Device
    ) -> None:
        self._groups, self._sizes = preparer.groups, preparer.kernel_block_sizes
        self._rows, self._assembler = preparer.rows, preparer.assembler
        self._tables, self._last_tokens, self._device = tables, last_tokens, device.torch_device
        self._advance_batch, self._scope = device.ops.advance_decode_batch, device.scope
        self._wait = preparer.assembler.feeds[0].staging.begin  # for the last step's copies, those of plans too
        size = sum(len(group.versions) + group.table.size for group in self._groups)
        self._sent = device.host_empty(size, torch.int32).zero_()
        self._host = self._sent.numpy()
        self._launches: list[Any] = []  # of the steps since the last one that was kept
        self._last: _Last | None = None

    def keep(self, schedule: SchedulerOutput, inputs: ModelInputs, prefixes: StepPrefixes | None, variant: int) -> None:
        """Note that the device holds the inputs of a step that was just gathered.

        Inputs that were kept before are gone.
        """
        self._last, self._launches = None, []
        rows = schedule.rows
        if schedule.num_tokens != len(rows) or len(inputs.logits_rows) != len(rows) or inputs.stand_ins is None:
            return
        token_ids = self._rows.token_ids[rows, schedule.num_computed]
        if np.array_equal(token_ids, self._last_tokens.stand_ins(rows)):
            self._last = _Last(inputs, prefixes, variant, self._assembler.num_assembled)

    def forget(self) -> None:
        """Note that the device holds the inputs of no step."""
        self._last = None

    def next(
        self, schedule: SchedulerOutput, shape: GraphShape | None, prefixes: StepPrefixes | None, variant: int
    ) -> ModelInputs | None:
        """Return the inputs of a step that repeats the last kept one. For any other step return None and do nothing."""
        last = self._last
        if last is None or not schedule.same_batch or last.number != self._assembler.num_assembled:
            return None
        if (shape, variant) != (last.inputs.shape, last.variant) or prefixes is not last.prefixes:
            return None
        self._wait()
        inputs = self._advance(last.inputs)
        self._last = _Last(inputs, prefixes, variant, last.number)
        return inputs

    def _advance(self, inputs: ModelInputs) -> ModelInputs:
        """Return the inputs of a token further. The device changes those that it holds, in place.

        The step before is launched and its draws are, so the device's are read no more.
        """
        count = len(inputs.rows)
        changes = self._changes(inputs.rows)
        longest = inputs.batches[0].max_seq_len + 1
        seq_lens = inputs.seq_lens_cpu.copy()
        seq_lens[:count] += 1  # not of padded requests
        sampling = evolve(inputs.sampling, positions=inputs.sampling.positions + 1)
        batches = tuple(
            evolve(batch, max_seq_len=longest, seq_lens_cpu=seq_lens, block_table=table)
            for batch, table in zip(inputs.batches, self._tables.views(longest), strict=True)
        )
        with self._scope():
            if not self._launches:
                sent = inputs.positions, inputs.batches[0].seq_lens, inputs.sampling_params
                self._launches = [
                    self._launcher(index, self._tables.held(index)[0][:count], *sent, batch.slot_mapping)
                    for index, batch in enumerate(batches)
                ]
            for launch, changed in zip(self._launches, changes, strict=True):
                launch(*changed)
        return evolve(inputs, seq_lens_cpu=seq_lens, sampling=sampling, batches=batches)

    def _launcher(
        self,
        index: int,
        rows: torch.Tensor,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,
        params: torch.Tensor | None,
        slots: torch.Tensor,
    ) -> Any:
        """Return the device's launch for one cache group, called with the start of its changes and their columns."""
        _, table, taken = self._tables.held(index)
        batch = DecodeBatch(
            positions=positions,
            seq_lens=seq_lens,
            counters=positions if params is None else params.view(torch.int64),
            stride=STRIDE,
            changes=self._sent,
            rows=rows,
            table=table,
            taken=taken,
            slots=slots,
            block_size=self._sizes[index],
            first=index == 0,
            drawn=params is not None,
        )
        return self._advance_batch(batch)

    def warm_up(self) -> bool:
        """Advance a made-up request, so that no step waits for a kernel. It reads the null row's table.

        Returns:
            False if the device does not advance batches by itself.
        """
        numbers = torch.zeros(1, dtype=torch.int64, device=self._device)
        rows = torch.zeros_like(numbers)  # of its own, as kernels may differ by a tensor's alignment
        params = torch.zeros(1, PACKED_WIDTH, dtype=torch.int32, device=self._device)
        lens = torch.zeros(1, dtype=torch.int32, device=self._device)
        for index, given in product(range(len(self._groups)), (None, params)):
            with self._scope():
                launch = self._launcher(index, rows, numbers, lens, given, numbers.clone())
                if launch is None:
                    return False
                launch(0, 0)
        return True

    def _changes(self, rows: Int) -> list[tuple[int, int]]:
        """Write the changed tables for the kernel. Return the start and the columns of each cache group's changes."""
        found: list[tuple[int, int]] = []
        count, at = len(rows), 0
        for index, group in enumerate(self._groups):
            changed = self._tables.changed(index, rows)
            if len(changed) == 0:
                found.append((0, 0))
                continue
            which = rows[changed]
            width = max(len(group.blocks[row]) for row in which.tolist()) * group.ratio
            found.append((at, width))
            places, end = self._host[at : at + count], at + count + len(which) * width
            places[:] = -1
            places[changed] = np.arange(len(which))
            self._host[at + count : end].reshape(-1, width)[...] = group.table[which, :width]
            at = end
        return found
