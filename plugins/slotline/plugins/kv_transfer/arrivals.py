"""Extension of a plan whose KV connector loads while steps run: requests wait for their blocks, and others go on.

A request that waits is admitted: it has its row and its blocks, and gets no tokens. Blocks can be found as soon as they
are to be loaded, so that a request with the same prefix shares them, and waits for them too. The pool does not reuse
them before their load has ended, since the extension holds a reference of each.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from slotline.builder.parts import Parts
from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.kv_cache.block_hashes import hash_sizes
from slotline.planner.kv_connector import waits_for_loads
from slotline.plugins.kv_transfer.connector import kept_states
from slotline.plugins.kv_transfer.extension import PARAMS, KVTransfer
from slotline.plugins.kv_transfer.items import ItemTransfers
from slotline.plugins.kv_transfer.pins import PoolPins
from slotline.plugins.kv_transfer.state_blocks import StateBlocks
from slotline.plugins.kv_transfer.transfers import AsyncTransfers
from slotline.plugins.multimodal.encoder_runner import EncoderRunner
from slotline.registry.contracts import BlockHash, CacheBlock, ExtensionContext, ItemKVConnector

Int = npt.NDArray[np.int64]
IDLE_SECONDS = 0.0005
"""Pause of a step that has nothing to do but to ask what has arrived."""


def build_extension(context: ExtensionContext) -> KVTransfer:
    """Build the extension for a plan's connector."""
    parts: Parts = context.parts
    assert parts.planned.connector is not None
    waits = waits_for_loads(parts.planned.connector, parts.planned.plan)
    return AsyncKVTransfer(context) if waits else KVTransfer(context)


class AsyncKVTransfer(KVTransfer):
    """Starts transfers, and keeps requests without tokens until their blocks have arrived."""

    transfers: AsyncTransfers

    def __init__(self, context: ExtensionContext) -> None:
        super().__init__(context)
        planned = context.parts.planned
        self._hash_size = hash_sizes(self._groups, planned.plan.block_size)[0]
        self._states: StateBlocks | None = None
        if kept_states(context.parts) is not None:
            checkpoints, number = context.parts.named["states"].checkpoints, len(planned.own_plan.cache_groups)
            self._states = StateBlocks(checkpoints, self.transfers, self._find_states, number, self._pool.num_blocks)
            self.transfers.is_there = self._states.is_there
        self._asked: Request | None = None  # whose prefix was looked up last
        self._found: set[tuple[int, BlockHash]] = set()  # for it
        self._waiting: dict[int, set[int]] = {}  # by row, the blocks that are still to come
        self._lost: dict[int, int] = {}  # by row, the good tokens before a block whose load has failed
        if planned.connector.capabilities.lasting_saves.support:
            self.transfers.pins = PoolPins(self._pool, self._states)
        self._items = self._item_transfers(context.parts)
        self._max_loads = planned.loaded.config.kv_connector.max_loads
        self._under_way = 0  # launched steps whose results are not used yet

    def find_blocks(self, request: Request, group: int, hashes: Sequence[BlockHash]) -> Collection[BlockHash]:
        """Return those of `hashes` whose block can be loaded for a request, no more than may be under way."""
        if request is not self._asked:
            self._asked, self._found = request, set()
        if self.transfers.is_late:
            return ()
        held = super().find_blocks(request, group, hashes)
        room = self._max_loads - len(self.transfers.coming) - len(self._found)
        fresh = [one for one in hashes if one in held and (group, one) not in self._found][: max(room, 0)]
        self._found |= {(group, one) for one in fresh}
        return [one for one in hashes if one in held and (group, one) in self._found]

    def limit_prompt(self, request: Request, computed: int, count: int) -> int:
        """Admit a request without tokens if its prefix has blocks that are still to come."""
        if self._items is not None and self._is_handed_over(request) and self._items.lacking(request, computed):
            return 0
        return 0 if self._must_wait(request, computed) else count

    def fill_block(self, block: CacheBlock) -> None:
        """Load a block, and hold it until its load has ended."""
        super().fill_block(block)
        self._pool.share([block.block])

    def begin_request(self, request: Request, computed: int) -> None:
        """Note the blocks that an admitted request waits for, and load what else it lacks."""
        if self._items is not None and self._is_handed_over(request):
            self._items.begin(request, computed, request.inputs[PARAMS])
        coming = self.transfers.coming
        own = (
            {block for group in self._groups for block in group.blocks[request.row] if block in coming}
            if coming
            else ()
        )
        state = None if self._states is None else self._states.awaited(request.row)
        if own or state is not None:
            self._waiting[request.row] = {*own, *(() if state is None else (state,))}

    def limit_tokens(self, rows: Int, counts: Int) -> Int:
        """Leave requests that wait without tokens."""
        waiting = {*self._waiting, *(() if self._items is None else self._items.waiting)}
        return np.where([row in waiting for row in rows.tolist()], 0, counts) if waiting else counts

    def requeue(self) -> list[Request]:
        """Ask what has arrived. Return the requests that have a block whose load failed."""
        self._settle()
        lost, self._lost = self._lost, {}
        return [self._without_blocks(row, good) for row, good in lost.items()]

    def before_step(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """Start transfers, also if no request has tokens in this step."""
        with self._scope("transfer"):
            self.transfers.start()
            if self._layers is not None and scheduled.num_tokens:
                self._layers.announce(scheduled)
        busy = self.transfers.coming or self.transfers.saving or (self._items is not None and self._items.waiting)
        if busy and not scheduled.num_tokens and not self._under_way:
            time.sleep(IDLE_SECONDS)
        return scheduled

    def launched(self, scheduled: SchedulerOutput) -> None:
        """Count a launched step."""
        self._end_layers()
        self._time_launch(scheduled)
        self._under_way += 1

    def recompute(self) -> list[Request]:
        """Return nothing: no step has read a block whose load has not ended."""
        self._time_results()
        self._under_way = max(self._under_way - 1, 0)
        return []

    def unschedule(self, request: Request) -> None:
        """Forget what a request waited for. Its blocks stay held until their load has ended."""
        self._waiting.pop(request.row, None)
        if self._items is not None:
            self._items.leave(request.row)
        self._lost.pop(request.row, None)

    def held_blocks(self) -> Collection[int]:
        """Return the blocks that the connector may still write or read."""
        return [one for one in (*self.transfers.reserved, *self.transfers.saving) if one < self._pool.num_blocks]

    def restore(self, requests: Sequence[Request]) -> None:
        """Wait for all loads and forget them."""
        self._waiting.clear()
        self._lost.clear()
        self._under_way = 0
        if self._items is not None:
            self._items.clear()
        super().restore(requests)
        if self._states is not None:
            self._states.give_up()

    def forget_prefixes(self) -> None:
        """Wait for all loads, and forget all blocks, here and in the connector."""
        self.transfers.finish()
        self._settle()
        super().forget_prefixes()

    def _item_transfers(self, parts: Parts) -> ItemTransfers | None:
        """Return the transfers of encoder outputs, None for a connector or a model without any."""
        planned, multimodal = parts.planned, parts.named.get("multimodal")
        if planned.connector is None or not planned.connector.capabilities.items.support:
            return None
        encoder = getattr(multimodal, "encoder", None)
        if not isinstance(encoder, EncoderRunner):
            return None
        timeout = planned.loaded.config.kv_connector.load_timeout
        connector = cast("ItemKVConnector", self.transfers.connector)
        return ItemTransfers(connector, encoder, self.transfers.agreement, timeout, self.transfers.name)

    def _is_handed_over(self, request: Request) -> bool:
        """Return whether another engine has computed a request's prompt, and it may be asked."""
        params = request.inputs.get(PARAMS)
        return bool(params and params.get("do_remote_prefill")) and request.row not in self._without

    def _find_states(self, request: Request, group: int, hashes: Sequence[BlockHash]) -> Collection[BlockHash]:
        """Return those of `hashes` whose state can be loaded for a request, none if as much as may be is under way."""
        found = self._found if request is self._asked else ()
        if self.transfers.is_late or len(self.transfers.coming) + len(found) >= self._max_loads:
            return ()
        return super().find_blocks(request, group, hashes)

    def _must_wait(self, request: Request, computed: int) -> bool:
        """Return whether blocks of the first `computed` tokens are still to come, or may be to be loaded."""
        at = computed // self._hash_size
        if at and self._states is not None and self._states.is_coming(request.block_hashes[at - 1]):
            return True
        coming, found = self.transfers.coming, self._found if request is self._asked else set[tuple[int, BlockHash]]()
        if not coming and not found:
            return False
        for group in self._groups:
            step = group.block_size // self._hash_size
            for one in request.block_hashes[step - 1 : computed // self._hash_size : step]:
                block = self._pool.lookup(group.index, one)
                if (group.index, one) in found if block is None else block in coming:
                    return True
        return False

    def _settle(self) -> None:
        """Give up the blocks whose transfer has ended, and note the requests that lost any."""
        if self._items is not None:
            self._items.poll()
        self.transfers.poll_saves()
        if not self.transfers.reserved:
            return
        ended = self.transfers.poll()
        if not any(ended):
            return
        self._pool.drop([*ended.lost, *ended.late])
        self._lost |= self._tokens_before({one.block for one in (*ended.lost, *ended.late)})
        over = [*ended.done, *ended.free]
        if self._states is not None:
            self._lost |= dict.fromkeys(self._states.drop([*ended.lost, *ended.late]), 0)
            self._states.ended(over)
        self._pool.release([one.block for one in over if one.block < self._pool.num_blocks])
        blocks = [one.block for one in (*ended.done, *ended.late)]
        for row, left in list(self._waiting.items()):
            left.difference_update(blocks)
            if not left:
                del self._waiting[row]
