"""Extension of a plan with a KV connector: the transfers of each step, and requests whose loads failed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slotline.builder.parts import Parts
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import NO_LIMIT
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.batch.step_output import StepOutput
from slotline.core.kv_cache.block_hashes import hash_sizes
from slotline.plugins.kv_transfer.connector import build_transfers
from slotline.plugins.kv_transfer.layers import LayerCalls
from slotline.ranks.replicas.reports import BlockCounts
from slotline.registry.contracts import BlockHash, CacheBlock, ExtensionContext

PARAMS = "kv_transfer_params"
"""Argument of `Engine.add` by which a request says where its blocks are."""


class KVTransfer:
    """Starts the transfers of each step, and has requests computed again that read a block whose load failed.

    Attributes:
        transfers: what is to be saved and loaded.
    """

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        assert parts.planned.connector is not None
        assert parts.memory is not None
        self.transfers = build_transfers(parts, parts.planned.connector, parts.memory)
        self._rows = parts.rows
        self._groups = parts.groups
        self._layers: LayerCalls | None = None
        if parts.planned.connector.capabilities.layers.support and parts.router is not None:
            plan = parts.planned.own_plan
            owners = [layer.index for group in plan.cache_groups for layer in group.layers]
            size = hash_sizes(parts.groups, plan.block_size)[0]
            self._layers = LayerCalls(self.transfers, parts.router, owners, parts.groups, parts.rows, size)
        self._pool = parts.memory.pool
        self._scope = parts.profiler.scope
        self._started: tuple[CacheBlock, ...] = ()  # loads of the step that is being prepared
        self._loads: deque[tuple[CacheBlock, ...]] = deque()  # of each launched step whose results are not used yet
        self._launches: deque[tuple[float, int, int]] = deque()  # of each, its time, tokens and requests
        self._last: Request | None = None  # that has looked for blocks
        self._without: set[int] = set()  # rows of requests that load nothing any more

    @property
    def counts(self) -> BlockCounts:
        """Return the numbers of blocks and of events so far."""
        agreement = self.transfers.agreement
        return agreement.counts if agreement.size > 1 else agreement.counts._replace(events=(self.transfers.events(),))

    def validate(self, request: Request) -> None:
        """Check what a request says of its blocks.

        Raises:
            RequestError: if it is no mapping, or the connector does not read it.
        """
        if (params := request.inputs.get(PARAMS)) is not None:
            self.transfers.check(params)

    def answer(self, params: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what another engine needs to continue a request with these parameters. Any thread may call it."""
        return self.transfers.answer(params)

    def find_blocks(self, request: Request, group: int, hashes: Sequence[BlockHash]) -> Collection[BlockHash]:
        """Return those of `hashes` whose block can be loaded for a request."""
        speed = self.transfers.speed
        if request is not self._last:
            self._last = request
            speed.next_request()
        if request.row in self._without or speed.pausing:
            return ()
        return self.transfers.held(group, hashes, request.inputs.get(PARAMS))

    def fill_block(self, block: CacheBlock) -> None:
        """Load a block before the next forward pass."""
        self.transfers.want(block)

    def block_evicted(self, block: CacheBlock) -> None:
        """Save a block that the pool is about to reuse, if the connector takes those."""
        self.transfers.evicted(block)

    def blocks_filled(self, group: int, blocks: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Save blocks that became full, if the connector takes those."""
        self.transfers.filled(group, blocks, hashes)

    def before_step(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """Start the transfers of a step's forward pass."""
        if scheduled.num_tokens:
            with self._scope("transfer"):
                self._started += self.transfers.start()
                if self._layers is not None:
                    self._layers.announce(scheduled)
        return scheduled

    def prepare_inputs(self, inputs: ModelInputs) -> ModelInputs:
        """Wait for a step's loads, just before its forward pass."""
        self.transfers.wait(self._started)
        if self._layers is not None:
            self._layers.begin(self._started)
        return inputs

    def launched(self, scheduled: SchedulerOutput) -> None:
        """Keep the loads that a launched step reads."""
        self._end_layers()
        self._time_launch(scheduled)
        self._loads.append(self._started)
        self._started = ()

    def recompute(self) -> list[Request]:
        """Return the requests that hold a block whose load failed. They go on from the last good block."""
        self._time_results()
        lost = self.transfers.settle(self._loads.popleft())
        return [self._without_blocks(row, good) for row, good in self._lost_tokens(lost).items()]

    def after_step(self, output: StepOutput, generations: npt.NDArray[np.int64]) -> None:
        """Save the blocks that a step filled, without waiting for another step."""
        self.transfers.save_filled()

    def release(self, row: int) -> None:
        """Forget a row whose request has ended."""
        self._without.discard(row)

    def restore(self, requests: Sequence[Request]) -> None:
        """Forget all steps. Blocks that are not known to be loaded can be found no more."""
        if self._layers is not None:
            self._layers.stop()
        self._started = ()
        self._loads.clear()
        self._launches.clear()
        self._pool.drop(self.transfers.give_up())

    def forget_prefixes(self) -> None:
        """Forget all blocks, here and in the connector."""
        self.transfers.reset()

    def _end_layers(self) -> None:
        """End the calls of a connector at each layer of a forward pass."""
        if self._layers is not None:
            self._layers.end()

    def _time_launch(self, scheduled: SchedulerOutput) -> None:
        """Note when a step was launched."""
        self._launches.append((time.perf_counter(), scheduled.num_tokens, len(scheduled.rows)))

    def _time_results(self) -> None:
        """Measure the step whose results have come."""
        if self._launches:
            self.transfers.speed.step(*self._launches.popleft())

    def _lost_tokens(self, lost: Sequence[CacheBlock]) -> dict[int, int]:
        """Forget blocks whose load failed.

        Return the rows that hold any, with the number of tokens before the first of them.
        """
        return self._tokens_before(set(self._pool.drop(lost)))

    def _tokens_before(self, dropped: Collection[int]) -> dict[int, int]:
        """Return the rows that hold any of the blocks, with the number of tokens before the first of them."""
        found = dict[int, int]()
        for group in self._groups if dropped else ():
            for row, blocks in enumerate(group.blocks):
                index = next((i for i, block in enumerate(blocks) if block in dropped), None)
                if index is not None:
                    found[row] = min(found.get(row, NO_LIMIT), index * group.block_size)
        return found

    def _without_blocks(self, row: int, good: int) -> Request:
        """Count only the `good` cached tokens of a row's request, which loads nothing any more. Return the request."""
        request = self._rows.request(row)
        self._without.add(row)
        metrics = request.metrics
        bad = max(0, metrics.num_cached_tokens - good)
        metrics.num_cached_tokens -= bad
        metrics.num_loaded_tokens = max(0, metrics.num_loaded_tokens - bad)
        return request
