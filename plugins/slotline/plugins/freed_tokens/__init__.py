"""Descriptor of the extension `freed_tokens`: requests may give up tokens in the middle."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="freed_tokens",
    capabilities=ExtensionCapabilities(order=80),  # before repeated steps, whose inputs are advanced by position
    factory="slotline.plugins.freed_tokens.extension:FreedTokensExtension",
    summary="gathers slots and lengths of requests that have freed tokens in the middle",
)
