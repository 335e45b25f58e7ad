"""Build the extensions of a plan."""

from __future__ import annotations

from slotline.core.batch.request_table import RequestTable
from slotline.core.builder.plugin_construction import build_plugin
from slotline.core.engine.extensions import Extensions
from slotline.planner.plan import Planned
from slotline.registry.contracts import ExtensionContext
from slotline.registry.errors import ContractError
from slotline.registry.loading import bind_contract


def build_extensions(planned: Planned, rows: RequestTable) -> Extensions:
    """Build each extension that the plan names and resolve its methods.

    Raises:
        PluginError: if one cannot be built.
        ContractError: if one passes arguments to the forward pass and does not exclude captured graphs.
    """
    built = []
    for descriptor in planned.extensions:
        context = ExtensionContext(
            contract=bind_contract(descriptor),
            rows=rows,
            max_requests=rows.max_requests,
            max_model_len=rows.max_model_len,
            vocab_size=planned.facts.vocab_size,
            device=planned.device,
            features=planned.features,
            options=planned.options(descriptor),
        )
        extension = build_plugin(planned.registry, descriptor, context, "lower scheduler.max_requests")
        label = planned.registry.full_name(descriptor)
        if hasattr(extension, "forward_kwargs") and "graphs" not in descriptor.capabilities.excludes:
            raise ContractError(
                f"{label} has forward_kwargs and does not exclude graphs: a captured forward pass takes no arguments",
                fix='declare excludes=("graphs",) in its ExtensionCapabilities',
            )
        built.append((label, extension))
    return Extensions.of(built)
