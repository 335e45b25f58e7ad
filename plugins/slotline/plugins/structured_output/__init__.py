"""Structured output: the extension that carries it, and plugins that compile schemas, expressions and grammars."""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="structured_output",
    capabilities=ExtensionCapabilities(order=40),
    factory="slotline.plugins.structured_output.build:build",
    summary="bans the tokens that a request's schema, expression or grammar does not allow next",
)
