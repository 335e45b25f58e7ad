"""Descriptor of the KV connector `lmcache`: prefix blocks in a store that LMCache has a client for."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from attrs import field, frozen

from slotline.plugins.kv_connectors.stores.options import StagedOptions, positive
from slotline.registry.capability import Flag, Set
from slotline.registry.contracts.kv_connector import KVConnectorCapabilities
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind


def probe(device: DeviceInfo) -> Any:
    """Return the offer, if the package is installed."""
    if find_spec("lmcache") is None:
        return "the package lmcache is not installed; `pip install 'slotline[lmcache]'` brings it"
    return descriptor.capabilities


def _is_url(_options: Any, _field: Any, value: str) -> None:
    if "://" not in value:
        raise ValueError(f"{value!r} has no scheme: write it as lm://HOST:PORT")


def _is_time(_options: Any, _field: Any, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"must be 0 or more seconds, not {value}")


@frozen(kw_only=True)
class LMCacheOptions(StagedOptions):
    """Options of the plugin, in `[kv_connector.lmcache]`."""

    url: str = field(
        default="lm://127.0.0.1:65432",
        validator=_is_url,
        metadata={"doc": "the store, as LMCache's remote_url: lm://, redis://, fs:// and others"},
    )
    timeout: float = field(
        default=5.0,
        validator=_is_time,
        metadata={"doc": "seconds after which the store counts as gone; it is then asked again from time to time"},
    )
    lookup: float = field(
        default=0.005,
        validator=_is_time,
        metadata={"doc": "seconds that a step waits to hear what the store has; later answers serve later steps"},
    )
    threads: int = field(default=2, validator=positive, metadata={"doc": "threads that read, with a connection each"})


descriptor = Descriptor(
    kind=Kind.KV_CONNECTOR,
    name="lmcache",
    capabilities=KVConnectorCapabilities(
        devices=Set(("cpu", "cuda")),
        saves="filled",
        asynchronous=Flag(True),
        counts=Flag(True),
        damage="slotline.plugins.kv_connectors.lmcache.damage:damage",
    ),
    factory="slotline.plugins.kv_connectors.lmcache.store:build_lmcache",
    options="slotline.plugins.kv_connectors.lmcache:LMCacheOptions",
    probe="slotline.plugins.kv_connectors.lmcache:probe",
    summary="keeps prefix blocks in a store that LMCache has a client for, such as its own server or Redis",
)
