"""Extension of a plan with plugins that hear of blocks: tells them before each step's forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slotline.builder.parts import Parts
from slotline.builder.watched_blocks import BlockLog, WatchedPool, in_kernel_blocks
from slotline.core.batch.extensions import Extensions
from slotline.core.batch.model_inputs import ModelInputs
from slotline.registry.contracts import BlockEvents, CacheBlock, ExtensionContext
from slotline.registry.descriptor import Kind
from slotline.registry.errors import ContractError

Hears = Callable[[Sequence[BlockEvents]], None]


class BlockEventsExtension:
    """Takes the events from the pool's log, and passes them on in the order of extensions, then of attention groups."""

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        assert parts.memory is not None
        assert isinstance(parts.memory.pool, WatchedPool)
        self._log: BlockLog = parts.memory.pool.log
        self._num_groups = len(parts.groups)
        self._backends = _backends(parts)
        self._extensions: tuple[Hears, ...] = ()
        self._extended = Extensions()

    def extensions_built(self, extensions: Extensions) -> None:
        """Note the extensions that hear of blocks, and those that hold blocks. All are built."""
        self._extended = extensions
        self._extensions = tuple(one.block_events for one in extensions.named.values() if hasattr(one, "block_events"))

    def fill_block(self, block: CacheBlock) -> None:
        """Note a block that another extension fills."""
        self._log.load(block)

    def prepare_inputs(self, inputs: ModelInputs) -> ModelInputs:
        """Tell all that has happened. Loads that the step waits for are ordered before it by now."""
        coming = {block for held in self._extended.held_blocks for block in held()}
        if not (events := self._log.take(self._num_groups, coming)):
            return inputs
        for hears in self._extensions:
            hears(events)
        for group, ratio, hears in self._backends:
            if own := [in_kernel_blocks(one, ratio) for one in events if one.group == group]:
                hears(own)
        return inputs


def _backends(parts: Parts) -> list[tuple[int, int, Hears]]:
    """Return the cache group, the kernel blocks of a block, and the method of each backend that hears of blocks."""
    assert parts.router is not None
    planned, found = parts.planned, list[tuple[int, int, Hears]]()
    names = [group.name for group in planned.plan.cache_groups]
    backends = {group.name: group.backend for group in planned.plan.groups}
    caches = {group.name: group.cache_group for group in planned.plan.groups}
    for group in parts.router.groups:
        declared = planned.offers[Kind.ATTENTION, backends[group.name]].capabilities.block_events
        if declared and not hasattr(group.backend, "block_events"):
            raise ContractError(
                f"{group.plugin} declares block_events and has no method of that name",
                fix="tell the author of the plugin, or choose another attention.backend",
            )
        if declared and caches[group.name]:
            index = names.index(caches[group.name])
            found.append((index, parts.groups[index].ratio, group.backend.block_events))  # type: ignore[attr-defined]
    return found
