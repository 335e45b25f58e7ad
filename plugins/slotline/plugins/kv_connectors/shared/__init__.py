"""Descriptor of the KV connector `shared`: prefix blocks that all engines of a machine find."""

from __future__ import annotations

from attrs import field, frozen

from slotline.plugins.kv_connectors.stores.options import StagedOptions, check_size, positive
from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.kv_connector import KVConnectorCapabilities
from slotline.registry.descriptor import Descriptor, Kind


@frozen(kw_only=True)
class SharedOptions(StagedOptions):
    """Options of the plugin, in `[kv_connector.shared]`."""

    memory: str = field(
        default="1GiB",
        validator=check_size,
        metadata={"doc": "memory for blocks of each model and rank; that of the first engine counts"},
    )
    name: str = field(default="default", metadata={"doc": "engines with the same name share their blocks"})
    folder: str = field(
        default="/dev/shm", metadata={"doc": "folder of a file system in memory, for the stores' files", "path": True}
    )
    threads: int = field(default=2, validator=positive, metadata={"doc": "threads that read"})


descriptor = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="shared",
    capabilities=KVConnectorCapabilities(
        devices=Set(("cpu", "cuda")),
        saves="filled",
        asynchronous=Flag(True),
        counts=Flag(True),
        states=Flag(True),
        room="memory",
        damage="slotline.plugins.kv_connectors.shared.damage:damage",
    ),
    factory="slotline.plugins.kv_connectors.shared.store:build_shared",
    options="slotline.plugins.kv_connectors.shared:SharedOptions",
    summary="keeps prefix blocks in memory that all engines of a machine share",
)
