"""The `torch` attention backend without edges, for a plugin of its own name: what a model does itself then."""

from attrs import evolve

from slotline.backends.torch_sdpa import descriptor as torch_descriptor
from slotline.registry.capability import Set

descriptor = evolve(
    torch_descriptor, name="plain_torch", capabilities=evolve(torch_descriptor.capabilities, edges=Set(()))
)
