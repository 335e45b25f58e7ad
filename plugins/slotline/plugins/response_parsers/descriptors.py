"""Descriptors of the response parsers. They are chosen by markers that chat templates and vocabularies hold."""

from __future__ import annotations

from typing import Any

from slotline.registry.contracts import ResponseParserCapabilities
from slotline.registry.descriptor import Descriptor, Kind


def _parser(name: str, summary: str, **capabilities: Any) -> Descriptor[ResponseParserCapabilities]:
    return Descriptor(
        kind=Kind.RESPONSE_PARSER,
        name=name,
        capabilities=ResponseParserCapabilities(**capabilities),
        factory=f"slotline.plugins.response_parsers.{name}:build",
        summary=summary,
    )


hermes = _parser(
    "hermes",
    "Hermes and Qwen: <tool_call>{JSON}</tool_call>, reasoning between <think> and </think>",
    evidence=(("<tool_call>", "</tool_call>"), ("<tool_call>", "</tool_call>", "<think>", "</think>")),
    priority=10,
)
