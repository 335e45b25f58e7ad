"""Descriptor of the KV connector `host_memory`: what the pool gives up stays in the host's memory."""

from __future__ import annotations

from attrs import field, frozen

from slotline.registry.capability import Flag, Set
from slotline.registry.config import size_in_bytes
from slotline.registry.contracts.kv_connector import KVConnectorCapabilities
from slotline.registry.descriptor import Descriptor, Kind


@frozen(kw_only=True)
class HostMemoryOptions:
    """Options of the plugin, in `[kv_connector.host_memory]`."""

    memory: str = field(
        default="4GiB",
        validator=lambda _options, _field, value: size_in_bytes(value),
        metadata={
            "doc": "host memory for blocks, such as '4GiB', of each rank and replica; pinned where the device is a GPU"
        },
    )
    policy: str = field(
        default="lru",
        metadata={
            "doc": "which blocks go first: 'lru' the least recently used, 'lfu' the least often used, or a class as "
            "'package.module:Class'"
        },
    )


descriptor = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="host_memory",
    capabilities=KVConnectorCapabilities(
        devices=Set(("cpu", "cuda")),
        saves="evicted",
        counts=Flag(True),
        spills=Flag(True),
        own_rows=Flag(True),
        states=Flag(True),
        room="memory",
    ),
    factory="slotline.plugins.kv_connectors.host_memory.memory:HostMemory",
    options="slotline.plugins.kv_connectors.host_memory:HostMemoryOptions",
    summary="keeps prefix blocks that the pool gives up in host memory, as far as a policy leaves them there",
)
