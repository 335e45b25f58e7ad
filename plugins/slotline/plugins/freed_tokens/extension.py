"""Extension of a plan in which tokens are freed in the middle of requests: steps read slots apart from positions."""

from __future__ import annotations

from slotline.builder.freed_tokens import FreeingGroup, ShiftedInputs, freed_tokens
from slotline.builder.parts import Parts
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.registry.contracts import ExtensionContext
from slotline.registry.errors import IntegrityError


class FreedTokensExtension:
    """Gathers the inputs of steps whose requests have freed tokens, and checks their blocks."""

    def __init__(self, context: ExtensionContext) -> None:
        parts: Parts = context.parts
        self._rows, self._groups = parts.rows, parts.groups
        freed = freed_tokens(parts.groups)
        assert freed is not None  # the plan has the feature
        self._freed = freed

    def gather_shortcut(self, preparer: InputPreparer) -> ShiftedInputs:
        """Return the gathering of such steps."""
        return ShiftedInputs(self._freed, preparer)

    def check(self) -> None:
        """Raise IntegrityError unless a row that has freed tokens holds blocks of its own, which nobody can find."""
        cache = self._freed.cache
        assert cache is not None  # checks follow steps
        findable = cache.pool.findable()
        for row in self._freed.count.nonzero()[0].tolist():
            freed, computed = int(self._freed.count[row]), int(self._rows.num_computed_tokens[row])
            if not 0 < freed < computed:
                raise IntegrityError(f"row {row} has freed {freed} of {computed} computed tokens")
            for group in self._groups:
                assert isinstance(group, FreeingGroup)
                for block in group.blocks[row]:
                    if cache.pool.ref_count[block] != 1 or block in findable:
                        raise IntegrityError(
                            f"block {block} of row {row}, which has freed tokens, is shared or can be found"
                        )
