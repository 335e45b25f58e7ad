"""Descriptor of the KV connector `disk`: prefix blocks in files, which outlive the process."""

from __future__ import annotations

from typing import Literal

from attrs import field, frozen

from slotline.plugins.kv_connectors.stores.options import StagedOptions, check_size, positive
from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.kv_connector import KVConnectorCapabilities
from slotline.registry.descriptor import Descriptor, Kind


@frozen(kw_only=True)
class FileOptions(StagedOptions):
    """Options of connectors whose blocks are files."""

    folder: str = field(
        default="",
        metadata={"doc": "folder of the files; empty for one in the cache folder", "path": True},
    )
    size: str = field(
        default="32GiB",
        validator=check_size,
        metadata={
            "doc": "size of all files in the folder, such as '32GiB'; the least recently used files of any model go "
            "first"
        },
    )
    fsync: Literal["none", "file"] = field(
        default="none",
        metadata={
            "doc": "'none' leaves writing back to the system: a killed process loses nothing, and what a power cut "
            "tears is found by its checksum; 'file' waits for the disk before a file gets its name"
        },
    )
    threads: int = field(default=4, validator=positive, metadata={"doc": "threads that read, where threads do"})


@frozen(kw_only=True)
class DiskOptions(FileOptions):
    """Options of the plugin, in `[kv_connector.disk]`."""

    readers: Literal["processes", "threads"] = field(
        default="processes",
        metadata={
            "doc": "who reads files: 'processes' of their own, which take what steps leave of the processors, or "
            "'threads' of this one, which steps wait for. Threads read eight-bit codes in any case, and where the "
            "system has no `memfd_create`"
        },
    )


descriptor = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="disk",
    capabilities=KVConnectorCapabilities(
        devices=Set(("cpu", "cuda")),
        saves="filled",
        asynchronous=Flag(True),
        counts=Flag(True),
        states=Flag(True),
        folder="folder",
        room="size",
    ),
    factory="slotline.plugins.kv_connectors.disk.store:build_disk",
    options="slotline.plugins.kv_connectors.disk:DiskOptions",
    summary="keeps prefix blocks in files with checksums, which survive a restart",
)
