"""Built parts of an engine that the extensions of features start from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from slotline.core.api.tokenizer import Tokenizer
from slotline.core.batch.request_table import RequestTable
from slotline.core.builder.plugin_construction import build_plugin
from slotline.core.kv_cache.kv_cache_manager import CacheGroup
from slotline.core.model_runner.step_profiler import StepProfiler
from slotline.core.sampling.logits_processors import ProcessorSlot
from slotline.planner.plan import Planned
from slotline.registry.contracts import Model
from slotline.registry.descriptor import Descriptor


@frozen(kw_only=True, eq=False)
class Parts:
    """Parts that exist before the runner, in `ExtensionContext.parts`.

    Attributes:
        planned: the plan with its descriptors and facts.
        model: the loaded weights.
        rows: the request table.
        groups: block tables, by cache group.
        tokenizer: of the model, None if it has none.
        processors: the built logits processors.
        profiler: times the parts of a step.
        named: extensions that were built before, by name.
    """

    planned: Planned
    model: Model
    rows: RequestTable
    groups: tuple[CacheGroup, ...]
    tokenizer: Tokenizer | None
    processors: tuple[ProcessorSlot, ...]
    profiler: StepProfiler
    named: Mapping[str, Any]

    def build(self, descriptor: Descriptor[Any], context: Any, fix: str) -> Any:
        """Build a plugin's object from its context, see `build_plugin`."""
        return build_plugin(self.planned.registry, descriptor, context, fix)
