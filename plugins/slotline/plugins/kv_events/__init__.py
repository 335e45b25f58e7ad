"""Descriptor of the extension `kv_events`: routers are told over ZeroMQ which prefixes the cache holds."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

from attrs import field, frozen

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind

SCHEMES = ("tcp://", "ipc://", "inproc://")


def probe(device: DeviceInfo) -> Any:
    """Return the offer, if the packages are installed."""
    for name in ("zmq", "msgspec"):
        if find_spec(name) is None:
            return f"the package {name} is not installed; `pip install 'slotline[events]'` brings it"
    return descriptor.capabilities


def _is_endpoint(_options: Any, attribute: Any, value: str) -> None:
    if not value.startswith(SCHEMES) and (value or attribute.name == "endpoint"):
        raise ValueError(f"{attribute.name} = {value!r} is no endpoint: begin with {', '.join(SCHEMES)}")


def _is_positive(_options: Any, attribute: Any, value: int) -> None:
    if value < 1:
        raise ValueError(f"{attribute.name} = {value} is not allowed: 1 is the least")


@frozen(kw_only=True)
class KVEventsOptions:
    """Options of the extension, in `[extensions.kv_events]`, with the names and defaults of vLLM."""

    endpoint: str = field(
        default="tcp://*:5557",
        validator=_is_endpoint,
        metadata={
            "doc": "where batches are published; with '*', ipc:// or inproc:// it is bound, otherwise connected to. "
            "Replica k of parallel.data takes the port k above, or a name with _dpk at its end"
        },
    )
    replay_endpoint: str = field(
        default="",
        validator=_is_endpoint,
        metadata={"doc": "where subscribers ask for batches that they have missed; empty for nowhere"},
    )
    topic: str = field(default="", metadata={"doc": "first frame of each message, by which subscribers filter"})
    buffer_steps: int = field(
        default=10_000, validator=_is_positive, metadata={"doc": "batches that are kept for replay, the latest"}
    )
    hwm: int = field(
        default=100_000,
        validator=_is_positive,
        metadata={"doc": "messages that wait for a subscriber; further ones are lost to it until it asks for a replay"},
    )
    max_queue_size: int = field(
        default=100_000,
        validator=_is_positive,
        metadata={"doc": "batches that wait to be published; what happens meanwhile is told in one later batch"},
    )
    hashes: Literal["int", "bytes"] = field(
        default="int", metadata={"doc": "block hashes as the last 8 bytes, an integer as vLLM's, or as all 32 bytes"}
    )


descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="kv_events",
    capabilities=ExtensionCapabilities(order=1100, needs_caches=True, prefix_events=True, requires=("prefix_caching",)),
    factory="slotline.plugins.kv_events.extension:KVEvents",
    options="slotline.plugins.kv_events:KVEventsOptions",
    probe="slotline.plugins.kv_events:probe",
    summary="tells routers over ZeroMQ, in vLLM's form, which prefixes the cache has stored and removed",
)
