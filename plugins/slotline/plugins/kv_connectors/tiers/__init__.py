"""Descriptor of the KV connector `tiers`: several connectors, the next of which takes what one gives up."""

from __future__ import annotations

from attrs import field, frozen

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.kv_connector import KVConnectorCapabilities
from slotline.registry.descriptor import Descriptor, Kind


@frozen(kw_only=True)
class TiersOptions:
    """Options of the plugin, in `[kv_connector.tiers]`. Each tier has a table of its own."""

    tiers: tuple[str, ...] = field(
        default=("host_memory", "disk"), metadata={"doc": "names of connectors, the fastest first"}
    )
    promote: bool = field(
        default=True, metadata={"doc": "copy what was found in a lower tier into the first one, for the next time"}
    )

    def notes(self) -> tuple[str, ...]:
        """Return the order of the tiers."""
        return (f"{', then '.join(self.tiers)}; the next takes what one gives up",)


descriptor = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="tiers",
    capabilities=KVConnectorCapabilities(
        devices=Set(("cpu", "cuda")),
        saves="evicted",
        asynchronous=Flag(True),
        counts=Flag(True),
        states=Flag(True),
        composes="tiers",
        judges=Flag(True),
    ),
    factory="slotline.plugins.kv_connectors.tiers.tiers:Tiers",
    options="slotline.plugins.kv_connectors.tiers:TiersOptions",
    summary="puts connectors in order: what one gives up goes to the next, and comes back to the first",
)
