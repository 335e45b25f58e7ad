"""Calls of a KV connector at each layer, while a forward pass runs: eagerly, or between captured parts of a graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

from slotline.core.batch.request_table import RequestTable
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.kv_cache.block_hashes import extend_hashes
from slotline.core.kv_cache.block_pool import NULL_BLOCK
from slotline.core.kv_cache.cache_group import CacheGroup
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher
from slotline.plugins.kv_transfer.transfers import Transfers
from slotline.registry.contracts import AttentionLayer, CacheBlock, LayerKVConnector

logger = logging.getLogger("slotline")


class LayerCalls:
    """Calls around the attention of each layer that owns a cache, in steps of requests.

    Args:
        transfers: of the connector.
        router: whose layers are called.
        layers: the indices of those that own a cache.
        groups: of the blocks.
        rows: the request table.
        hash_size: tokens of a hashed piece.
    """

    def __init__(
        self,
        transfers: Transfers,
        router: AttentionDispatcher,
        layers: Sequence[int],
        groups: Sequence[CacheGroup],
        rows: RequestTable,
        hash_size: int,
    ) -> None:
        self._transfers, self._connector = transfers, cast("LayerKVConnector", transfers.connector)
        self._groups, self._rows, self._hash_size = tuple(groups), rows, hash_size
        self._layers = tuple(layers)
        self._left: list[int] | None = None  # layers of the step that is running, None between steps
        self._loads: Sequence[CacheBlock] = ()
        for index in self._layers:
            write, forward, cache, position = router.routes[index]
            router.routes[index] = write, self._around(forward), cache, position

    def announce(self, scheduled: SchedulerOutput) -> None:
        """Tell the connector which blocks the next forward pass fills."""
        blocks = [
            block
            for row, computed, count in zip(
                scheduled.rows.tolist(), scheduled.num_computed.tolist(), scheduled.num_scheduled.tolist(), strict=True
            )
            for block in self._filled(row, computed, computed + count)
        ]
        self._call("filling", blocks)

    def begin(self, loads: Sequence[CacheBlock]) -> None:
        """Call the connector from now on, in a forward pass that reads `loads`."""
        self._left, self._loads = list(self._layers), loads

    def end(self) -> None:
        """Call it for the layers that did not attend, and no more until the next forward pass."""
        for index in self._left or ():
            self._call("wait_layer", index)
            self._call("save_layer", index)
        self.stop()

    def stop(self) -> None:
        """Call it no more until the next forward pass."""
        self._left, self._loads = None, ()

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def attend(layer: AttentionLayer, *given: Any, **more: Any) -> Any:
            if self._left is None or layer.index not in self._left:
                return forward(layer, *given, **more)
            self._left.remove(layer.index)
            self._call("wait_layer", layer.index)
            found = forward(layer, *given, **more)
            self._call("save_layer", layer.index)
            return found

        return attend

    def _call(self, method: str, given: Any) -> None:
        try:
            getattr(self._connector, method)(given)
        except Exception:  # a plugin's code may raise anything
            logger.exception("%s: %s failed", self._transfers.name, method)
            self._transfers.lose(self._loads)

    def _filled(self, row: int, computed: int, end: int) -> list[CacheBlock]:
        """Return the blocks that the tokens from `computed` to `end` of a row fill, as far as these are known."""
        end = min(end, int(self._rows.num_tokens[row] - self._rows.num_pending[row]))
        request, found = self._rows.request(row), list[CacheBlock]()
        if request.whole_prompt or end // self._hash_size <= computed // self._hash_size:
            return found
        hashes = extend_hashes(request, self._rows.token_ids[row], end // self._hash_size, self._hash_size)
        for group in self._groups:
            step = group.block_size // self._hash_size
            for index in range(computed // group.block_size, end // group.block_size):
                block = group.blocks[row][index]
                if block != NULL_BLOCK:
                    found.append(CacheBlock(group.index, hashes[(index + 1) * step - 1], block))
        return found
