"""Build the extensions of a plan."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from slotline.builder.parts import Parts
from slotline.builder.plugin_construction import build_plugin
from slotline.core.batch.extensions import Extensions
from slotline.registry.contracts import ExtensionContext
from slotline.registry.descriptor import Descriptor
from slotline.registry.errors import ContractError
from slotline.registry.loading import bind_contract


def build_extensions(parts: Parts) -> Extensions:
    """Build each extension of the plan, those that carry its features too, and resolve their methods.

    Those in `parts.named` are taken as they are. Extensions that need the caches are built once their memory is there.
    One with `bind_caches` is replaced by what it returns, once there is a router.

    Raises:
        PluginError: if one cannot be built.
        ContractError: if one passes arguments to the forward pass, says nothing of captures, and does not exclude
            captured graphs.
    """
    registry, built = parts.planned.registry, list[tuple[str, str, Any]]()
    for descriptor in parts.planned.all_extensions:
        if descriptor.capabilities.needs_caches and parts.memory is None:
            continue
        there = evolve(parts, named={name: one for name, _, one in built})
        extension = parts.named.get(descriptor.name)
        if extension is None:
            optional, context = descriptor in parts.planned.carriers, _context(there, descriptor)
            extension = build_plugin(registry, descriptor, context, "lower scheduler.max_requests", optional=optional)
        if extension is None:
            continue
        if parts.router is not None and hasattr(extension, "bind_caches"):
            extension = extension.bind_caches(parts.router)
        label = registry.full_name(descriptor)
        captured = hasattr(extension, "capture_kwargs") or "graphs" in descriptor.capabilities.excludes
        if hasattr(extension, "forward_kwargs") and not captured:
            raise ContractError(
                f"{label} has forward_kwargs and does not exclude graphs: a captured forward pass takes no arguments",
                fix='declare excludes=("graphs",) in its ExtensionCapabilities',
            )
        built.append((descriptor.name, label, extension))
    choosing = [label for _, label, one in built if hasattr(one, "graph_variant")]
    if len(choosing) > 1:
        raise ContractError(
            f"{' and '.join(choosing)} choose variants of graphs, and one may", fix="do without the others"
        )
    takers = (*parts.planned.all_extensions, parts.planned.scheduler_policy)
    inputs = frozenset(name for one in takers for name in one.capabilities.inputs)
    extensions = Extensions.of(built, inputs)
    _connect_block_events(parts, extensions)
    return extensions


def _context(parts: Parts, descriptor: Descriptor[Any]) -> ExtensionContext:
    planned, rows = parts.planned, parts.rows
    return ExtensionContext(
        contract=bind_contract(descriptor),
        rows=rows,
        max_requests=rows.max_requests,
        max_model_len=rows.max_model_len,
        vocab_size=planned.facts.vocab_size,
        device=planned.device,
        features=planned.features,
        options=planned.options(descriptor),
        parts=parts,
    )


def _connect_block_events(parts: Parts, extensions: Extensions) -> None:
    """Have the extensions that declare `block_events` hear of blocks.

    Raises:
        ContractError: if one declares it and has no method of that name, or has the method and does not declare it.
    """
    for descriptor in parts.planned.all_extensions:
        one, declared = extensions.named.get(descriptor.name), descriptor.capabilities.block_events
        if one is not None and hasattr(one, "block_events") != declared:
            what = "declares block_events without the method" if declared else "has the method block_events undeclared"
            raise ContractError(
                f"{parts.planned.registry.full_name(descriptor)} {what}",
                fix="declare block_events=True in its ExtensionCapabilities, and have the method",
            )
    if (teller := extensions.named.get("block_events")) is not None:
        teller.extensions_built(extensions)
