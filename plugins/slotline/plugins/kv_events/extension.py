"""Extension that tells a publisher which prefixes became findable and which were lost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import finalize

import numpy as np
import numpy.typing as npt

from slotline.builder.parts import Parts
from slotline.builder.prefix_log import Key, LoggedPool
from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.batch.step_output import StepOutput
from slotline.core.kv_cache.block_hashes import hash_sizes
from slotline.plugins.kv_events.events import GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event, Hash
from slotline.plugins.kv_events.publisher import Publisher
from slotline.ranks.replicas.reports import NUMBER
from slotline.registry.contracts import BlockHash, ExtensionContext


class _Place(NamedTuple):
    """Where a prefix ends: behind so many pieces of a request."""

    request: Request
    pieces: int


class KVEvents:
    """Makes events of the pool's log before and after each step, and gives them to a publisher.

    A step never waits: while the publisher has no room, the log goes on, and keeps what is left of all changes.
    """

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        assert parts.memory is not None
        assert isinstance(parts.memory.pool, LoggedPool)
        self._rows, self._log = context.rows, parts.memory.pool.listen()
        self._piece = hash_sizes(parts.groups, 1)[0]
        self._sizes = [group.block_size for group in parts.groups]
        self._public = _last_bytes if context.options.hashes == "int" else _whole
        self._ended: dict[Request, None] = {}
        self._next: dict[Request, int] = {}  # pieces of each request whose blocks have been told of
        self._publisher: Publisher | None = None
        place = parts.planned.place
        if place.index("pipeline") == place.index("tensor") == 0:  # all ranks of a replica have the same blocks
            self._publisher = Publisher(context.options, int(os.environ.get(NUMBER, "0")))
            finalize(self, self._publisher.close)

    def before_step(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """Tell what was lost and loaded for this step, and what has happened between steps."""
        self._tell()
        return scheduled

    def after_step(self, output: StepOutput, generations: npt.NDArray[np.int64]) -> None:
        """Tell what the step has filled."""
        self._tell()

    def leave(self, request: Request) -> None:
        """Keep a request that ends until what it filled is told."""
        self._ended[request] = None

    def forget_prefixes(self) -> None:
        """Tell that no prefix can be found."""
        self._tell()

    def _tell(self) -> None:
        if self._publisher is None or not self._publisher.has_room():
            return
        changes = self._log.take()
        if changes is not None:
            events: list[Event] = [AllBlocksCleared()] if changes.cleared else []
            events += self._removed(changes.removed)
            events += self._stored(changes.stored)
            if events:
                self._publisher.publish(time.time(), events)
        for request in self._ended:
            self._next.pop(request, None)
        self._ended.clear()

    def _removed(self, keys: Sequence[Key]) -> Iterable[BlockRemoved]:
        for group in range(len(self._sizes)):
            if lost := [self._public(one) for number, one in keys if number == group]:
                yield BlockRemoved(lost, GPU, self._index(group))

    def _stored(self, keys: Sequence[Key]) -> Iterable[BlockStored]:
        """Yield an event for each run of blocks of one request, one behind the other."""
        places, run = self._places({one for _, one in keys}) if keys else {}, list[tuple[int, _Place]]()
        for group, one in sorted(keys, key=lambda key: key[0]):
            if (place := places.get(one)) is None:
                self._log.put_back([(group, one)])  # of a request that waits again, since a step has failed
                continue
            before = group, place._replace(pieces=place.pieces - self._sizes[group] // self._piece)
            if run and run[-1] != before:
                yield self._event(run)
                run = []
            run.append((group, place))
        if run:
            yield self._event(run)

    def _event(self, run: Sequence[tuple[int, _Place]]) -> BlockStored:
        (group, (request, end)), last = run[0], run[-1][1].pieces
        size, chain = self._sizes[group], request.block_hashes
        step = size // self._piece
        first = end - step
        adapter = request.inputs.get("lora_request")
        return BlockStored(
            [self._public(chain[place.pieces - 1]) for _, place in run],
            self._public(chain[first - 1]) if first else None,
            self._tokens(request, first * self._piece, last * self._piece),
            size,
            None if adapter is None else adapter.lora_int_id,
            GPU,
            None if adapter is None else adapter.lora_name,
            None,
            self._index(group),
        )

    def _places(self, hashes: set[BlockHash]) -> dict[BlockHash, _Place]:
        """Return where prefixes end. Each is one of a running request, or of one that has just ended."""
        found = dict[BlockHash, _Place]()
        known = [*(one for one in self._rows.requests if one is not None), *self._ended]
        for request in known:
            chain = request.block_hashes
            for pieces in range(self._next.get(request, 0) + 1, len(chain) + 1):
                if chain[pieces - 1] in hashes:
                    found[chain[pieces - 1]] = _Place(request, pieces)
                    self._next[request] = pieces
        if len(found) < len(hashes):  # stored again
            for request in known:
                for pieces, one in enumerate(request.block_hashes, 1):
                    if one in hashes:
                        found.setdefault(one, _Place(request, pieces))
        return found

    def _tokens(self, request: Request, start: int, end: int) -> list[int]:
        """Return the tokens [start, end) of a request."""
        if request not in self._ended:
            found: list[int] = self._rows.token_ids[request.row, start:end].tolist()
            return found
        every: list[int] = np.concatenate([request.token_array, np.array(request.output_token_ids, np.int64)]).tolist()
        return every[start:end]

    def _index(self, group: int) -> int | None:
        return group if len(self._sizes) > 1 else None


def _last_bytes(block_hash: BlockHash) -> Hash:
    return int.from_bytes(block_hash[-8:], "big")


def _whole(block_hash: BlockHash) -> Hash:
    return block_hash
