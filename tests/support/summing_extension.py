"""An extension that keeps a sum of each block's keys and values, as a plugin with summaries would, and checks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slotline.registry.contracts import BlockEvents, ExtensionCapabilities, ExtensionContext
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import IntegrityError

NAMES = ("returned", "given", "restored", "loaded", "moved")


class Sums:
    """Reads blocks after the steps that write them, and otherwise only when it hears of them."""

    def __init__(self, context: ExtensionContext) -> None:
        parts = context.parts
        self.pool, self.groups, routes = parts.memory.pool, parts.groups, parts.router.routes
        layers = [group.layers[0].index for group in parts.planned.plan.cache_groups]
        self.caches = [routes[index][2] for index in layers]
        self.sums: list[dict[int, float]] = [{} for _ in self.groups]
        self.held: list[set[int]] = [set() for _ in self.groups]
        self.heard = dict.fromkeys(NAMES, 0)
        self.hashes: dict[tuple[int, bytes], float] = {}
        self.written: list[set[int]] = []
        self.steps = 0

    def sum(self, group: int, block: int) -> float:
        ratio = self.groups[group].ratio
        parts = (view[block * ratio : (block + 1) * ratio] for view in self.caches[group])
        return float(sum(torch.nan_to_num(part.double()).sum() for part in parts))

    def block_events(self, events: Sequence[BlockEvents]) -> None:
        for one in events:
            for name in NAMES:
                self.heard[name] += len(getattr(one, name))
            held, sums = self.held[one.group], self.sums[one.group]
            held -= set(one.returned.tolist())
            for block in (*one.given.tolist(), *one.loaded.tolist(), *one.moved.tolist()):
                held.add(block)
                sums[block] = self.sum(one.group, block)
            held |= set(one.restored.tolist())
            named = (*one.restored.tolist(), *one.loaded.tolist())
            for block, block_hash in zip(named, one.hashes, strict=True):
                same = self.hashes.setdefault((one.group, block_hash), sums[block])
                if not np.isclose(same, sums[block], rtol=1e-5, atol=1e-4):
                    raise IntegrityError(f"equal hashes, and sums {same} and {sums[block]}")

    def plan(self, inputs: Any) -> None:
        self.steps += 1
        for group, held in enumerate(self.held):
            owned = {block for blocks in self.groups[group].blocks for block in blocks} - {0}
            if not held <= owned | set(np.flatnonzero(self.pool.ref_count).tolist()):
                raise IntegrityError(f"blocks {sorted(held - owned)} are held no more")
            for block in held:
                if self.sums[group][block] != (now := self.sum(group, block)):
                    raise IntegrityError(f"block {block} has the sum {now}, and {self.sums[group][block]} was kept")
            for row in inputs.rows.tolist():
                if missing := set(self.groups[group].blocks[row]) - held - {0}:
                    raise IntegrityError(f"row {row} reads blocks {sorted(missing)}, and nothing was heard of them")
        self.written = []
        for group, batch in zip(self.groups, inputs.batches, strict=False):
            slots = batch.slot_mapping
            kernel = batch.slot_mapping[slots >= 0] // (group.block_size // group.ratio)
            self.written.append(set((kernel // group.ratio).tolist()))

    def launched(self, scheduled: Any) -> None:
        for group, blocks in enumerate(self.written):
            for block in blocks:
                self.sums[group][block] = self.sum(group, block)


descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="sums",
    summary="keeps a sum of each block",
    capabilities=ExtensionCapabilities(needs_caches=True, block_events=True, order=2000),
    factory=Sums,
)
silent = Descriptor(
    kind=Kind.EXTENSION,
    name="silent",
    summary="has the method and does not declare it",
    capabilities=ExtensionCapabilities(needs_caches=True),
    factory=Sums,
)
