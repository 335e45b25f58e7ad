"""Extension of a plan with async scheduling: the device advances the inputs of steps that repeat the last batch."""

from __future__ import annotations

from collections.abc import Sequence

from slotline.builder.parts import Parts
from slotline.core.batch.request import Request
from slotline.core.kv_cache.block_table import DeviceTables
from slotline.core.model_runner.input_preparer import InputPreparer
from slotline.plugins.repeated_steps.decode_fast_path import DecodeFastPath
from slotline.registry.contracts import ExtensionContext


class RepeatedStepsExtension:
    """Builder of the fast path, as soon as there are buffers of a step.

    Attributes:
        path: None if each step is gathered anew.
    """

    def __init__(self, context: ExtensionContext) -> None:
        self._parts: Parts = context.parts
        self.path: DecodeFastPath | None = None

    def gather_shortcut(self, preparer: InputPreparer) -> DecodeFastPath | None:
        """Build the fast path."""
        self.path = _path_for(self._parts, preparer)
        return self.path

    def restore(self, requests: Sequence[Request]) -> None:
        """Go on from no step: rows and tables have been made again."""
        if self.path is not None:
            self.path.forget()


def _path_for(parts: Parts, preparer: InputPreparer) -> DecodeFastPath | None:
    """Build the fast path, or return None if each step is gathered anew.

    That is so without async scheduling, if steps verify tokens (the host then knows only an upper bound of token
    counts), on a CPU (there is nothing to upload), over several devices, if a cache group has keys that do not come
    from a request's tokens, and if the device does not advance a batch by itself.
    """
    last_tokens, (feed, *later), planned = parts.last_tokens, preparer.assembler.feeds, parts.planned
    tables = feed.tables
    if last_tokens is None or last_tokens.max_spec_tokens or later or not isinstance(tables, DeviceTables):
        return None
    if not preparer.groups or any(group.fixed_len is not None for group in preparer.groups):
        return None
    found = DecodeFastPath(preparer, tables, last_tokens, planned.hardware[planned.stages.stages[0].device])
    return found if found.warm_up() else None
