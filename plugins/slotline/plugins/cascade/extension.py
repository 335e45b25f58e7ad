"""Extension of a plan with cascade attention: it builds the finder of prefixes that requests share."""

from __future__ import annotations

from collections.abc import Sequence

from slotline.builder.parts import Parts
from slotline.core.model_runner.attention_dispatcher import AttentionGroup
from slotline.plugins.cascade.prefixes import LEVELS, Cascade, CascadeGroup
from slotline.registry.contracts import ExtensionContext


class CascadeExtension:
    """Builder of the finder, which the engine's builder asks once the backends are there."""

    def __init__(self, context: ExtensionContext) -> None:
        self._parts: Parts = context.parts

    def prefix_finder(self, attention: Sequence[Sequence[AttentionGroup]]) -> Cascade:
        """Build the finder.

        Args:
            attention: by cache group, those that serve a prefix apart and read the group. Empty for none.
        """
        sizes = [group.kernel_block_size for group in self._parts.planned.plan.cache_groups]
        groups = [
            CascadeGroup(
                cache,
                size,
                tuple(one.backend for one in own),  # type: ignore[misc]
                min(LEVELS[one.cascade_prefixes] for one in own),
            )
            if own
            else None
            for cache, size, own in zip(self._parts.groups, sizes, attention, strict=True)
        ]
        return Cascade(groups, self._parts.rows)
