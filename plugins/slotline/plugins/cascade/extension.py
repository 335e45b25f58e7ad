"""Extension of a plan with cascade attention: it builds the finder of common prefixes."""

from __future__ import annotations

from collections.abc import Sequence

from slotline.builder.parts import Parts
from slotline.plugins.cascade.prefixes import Cascade, CascadeGroup
from slotline.registry.contracts import CascadeBackend, ExtensionContext


class CascadeExtension:
    """Builder of the finder, which the engine's builder asks once the backends are there."""

    def __init__(self, context: ExtensionContext) -> None:
        self._parts: Parts = context.parts

    def common_prefixes(self, backends: Sequence[Sequence[CascadeBackend]]) -> Cascade:
        """Build the finder.

        Args:
            backends: by cache group, those that serve a prefix apart and read the group. Empty for none.
        """
        sizes = [group.kernel_block_size for group in self._parts.planned.plan.cache_groups]
        groups = [
            CascadeGroup(cache, size, tuple(own)) if own else None
            for cache, size, own in zip(self._parts.groups, sizes, backends, strict=True)
        ]
        return Cascade(groups, self._parts.rows)
