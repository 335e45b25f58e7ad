"""Building of the plugins that multiply by a model's quantized weights."""

from __future__ import annotations

from slotline.planner.plan import Planned
from slotline.planner.weights import kernel_context
from slotline.registry.contracts.weights import ModelWeights, PlannedModule


def build_weights(planned: Planned) -> ModelWeights | None:
    """Return the quantized modules of a plan with their reader and built plugins, or None for plain weights."""
    choice = planned.weights
    if choice is None:
        return None
    modules: dict[str, PlannedModule] = {}
    for group in choice.groups:
        descriptor = choice.descriptors[group.kind, group.plugin]
        context = kernel_context(
            planned.loaded,
            planned.registry,
            descriptor,
            group.modules[0],
            group.scheme,
            planned.plan.dtype,
            planned.device,
        )
        kernel = planned.registry.build(descriptor, context)
        modules |= {m.name: PlannedModule(module=m, scheme=group.scheme, kernel=kernel) for m in group.modules}
    return ModelWeights(
        format=choice.source.format, online=choice.source.online, modules=modules, method=choice.source.method
    )
