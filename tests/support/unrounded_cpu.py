"""The `cpu` attention backend that leaves rounding to products, for a plugin of its own name."""

from attrs import evolve

from slotline.backends.cpu import descriptor as cpu_descriptor
from slotline.registry.capability import Set
from slotline.registry.contracts.attention_edges import ROUNDED

edges = Set(edge for edge in cpu_descriptor.capabilities.edges.values or () if edge != ROUNDED)
descriptor = evolve(
    cpu_descriptor, name="unrounded_cpu", probe=None, capabilities=evolve(cpu_descriptor.capabilities, edges=edges)
)
