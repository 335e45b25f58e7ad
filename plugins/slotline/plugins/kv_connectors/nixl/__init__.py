"""Descriptor of the KV connector `nixl`: prefix blocks in files that NIXL reads and writes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

from attrs import field, frozen

from slotline.plugins.kv_connectors.disk import FileOptions
from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.kv_connector import KVConnectorCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind


def probe(device: DeviceInfo) -> Any:
    """Return the offer, if the package is installed."""
    if find_spec("nixl") is None:
        return "the package nixl is not installed; `pip install 'slotline[nixl]'` brings it"
    return descriptor.capabilities


@frozen(kw_only=True)
class NixlOptions(FileOptions):
    """Options of the plugin, in `[kv_connector.nixl]`."""

    api: Literal["auto", "uring", "aio", "posix_aio"] = field(
        default="auto",
        metadata={"doc": "how NIXL's plugin POSIX asks the system for files; 'auto' leaves it to the plugin"},
    )


descriptor = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="nixl",
    capabilities=KVConnectorCapabilities(
        devices=Set(("cpu", "cuda")),
        saves="filled",
        asynchronous=Flag(True),
        counts=Flag(True),
        states=Flag(True),
        folder="folder",
        room="size",
    ),
    factory="slotline.plugins.kv_connectors.nixl.files:build_nixl",
    options="slotline.plugins.kv_connectors.nixl:NixlOptions",
    probe="slotline.plugins.kv_connectors.nixl:probe",
    summary="keeps prefix blocks in files with checksums, which NIXL's plugin POSIX reads and writes",
)
