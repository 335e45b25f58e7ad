"""Descriptor of the KV connector `handoff`: one engine computes prompts, and another one continues them."""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen

from slotline.registry.capability import Flag, Set
from slotline.registry.config import size_in_bytes
from slotline.registry.contracts.kv_connector import KVConnectorCapabilities
from slotline.registry.descriptor import Descriptor, Kind


def address_of(text: str) -> tuple[str, int]:
    """Return host and port of an address.

    Raises:
        ValueError: if it has no port.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address: write HOST:PORT")
    return host.strip("[]"), int(port)


def _is_address(_options: Any, attribute: Any, value: str) -> None:
    if address_of(value)[0] in {"0.0.0.0", "::", "*"}:
        raise ValueError(f"{attribute.name} = {value!r} names no machine: write the address that others connect to")


def _are_addresses(_options: Any, _attribute: Any, value: tuple[str, ...]) -> None:
    for one in value:
        address_of(one)


def _is_positive(_options: Any, attribute: Any, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{attribute.name} = {value} is not allowed: it must be above 0")


@frozen(kw_only=True)
class HandoffOptions:
    """Options of the plugin, in `[kv_connector.handoff]`."""

    role: Literal["prefill", "decode", "both"] = field(
        default="both",
        metadata={"doc": "prefill keeps blocks for others, decode loads them from `peers`, both does both"},
    )
    address: str = field(
        default="127.0.0.1:0",
        validator=_is_address,
        metadata={"doc": "where an engine that prefills hands out blocks, as HOST:PORT; port 0 for a free one"},
    )
    peers: tuple[str, ...] = field(
        default=(),
        validator=_are_addresses,
        metadata={"doc": "addresses of the engines that blocks are loaded from; requests can name no others"},
    )
    memory: str = field(
        default="1GiB",
        validator=lambda _options, _field, value: size_in_bytes(value),
        metadata={"doc": "host memory for blocks that others may load; the least recently used go first"},
    )
    transport: Literal["auto", "nixl"] = field(
        default="auto",
        metadata={
            "doc": "'auto' maps a peer's memory on the same machine, and takes the connection otherwise; 'nixl' reads "
            "it by NIXL's plugin UCX, which both sides must name"
        },
    )
    layers: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata={
            "doc": "copy a layer's part of blocks as soon as it has attended, while later layers are computed; 'on' "
            "refuses plans in which it cannot be, and 'off' copies blocks of whole steps"
        },
    )
    items: str = field(
        default="256MiB",
        validator=lambda _options, _field, value: size_in_bytes(value),
        metadata={"doc": "host memory for encoder outputs that others may load, beside `memory`"},
    )
    timeout: float = field(
        default=10.0,
        validator=_is_positive,
        metadata={"doc": "seconds without a byte after which a peer counts as gone and its blocks are computed"},
    )

    def by_layer(self) -> str:
        """Return whether it is to be called at each layer. An engine that decodes lands whole blocks."""
        return {"auto": "may", "on": "must", "off": "never"}[self.layers] if self.role != "decode" else "never"


descriptor = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="handoff",
    capabilities=KVConnectorCapabilities(
        devices=Set(("cpu", "cuda")),
        asynchronous=Flag(True),
        by_request=Flag(True),
        states=Flag(True),
        lasting_saves=Flag(True),
        items=Flag(True),
        layers=Flag(True),
        peers="peers",
        late_layers=Flag(True),
        room="memory",
    ),
    factory="slotline.plugins.kv_connectors.handoff.connector:Handoff",
    options="slotline.plugins.kv_connectors.handoff:HandoffOptions",
    summary="hands a prompt's blocks from an engine that prefills to one that decodes, in another process",
)
