"""Descriptor of the KV connector `shared`: prefix blocks that all engines of a machine find."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from slotline.plugins.kv_connectors.stores.options import LOSSY, check_size, positive
from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.kv_connector import KVConnectorCapabilities
from slotline.registry.descriptor import Descriptor, Kind


@frozen(kw_only=True)
class SharedOptions:
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
    staging: str = field(
        default="512MiB",
        validator=check_size,
        metadata={"doc": "host memory for blocks on their way, three quarters of it for saves"},
    )
    threads: int = field(default=2, validator=positive, metadata={"doc": "threads that read"})
    codec: Literal["none", "int8"] = field(
        default="none",
        metadata={
            "doc": "'int8' rounds keys and values to eight bits with a scale for each token and head, so that texts "
            "may differ; 'none' keeps their bytes"
        },
    )

    def notes(self) -> tuple[str, ...]:
        """Return what a codec changes."""
        return () if self.codec == "none" else (LOSSY,)


descriptor = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="shared",
    capabilities=KVConnectorCapabilities(
        devices=Set(("cpu", "cuda")), saves="filled", asynchronous=Flag(True), counts=Flag(True)
    ),
    factory="slotline.plugins.kv_connectors.shared.store:build_shared",
    options="slotline.plugins.kv_connectors.shared:SharedOptions",
    summary="keeps prefix blocks in memory that all engines of a machine share",
)
