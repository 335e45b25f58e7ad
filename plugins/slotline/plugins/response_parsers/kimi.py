"""Kimi K2: sections of calls whose heads are ids, as `functions.name:0`."""

from __future__ import annotations

from slotline.plugins.response_parsers.parser import FormParser, Tag
from slotline.plugins.response_parsers.sections import SectionMarkers, SectionReader
from slotline.registry.contracts import ResponseParserContext

_MARKERS = SectionMarkers(
    opening="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
    begin="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    whole_heads=True,
)


def _tag(name: str) -> Tag:
    m = _MARKERS
    return Tag(m.opening, f"{m.opening}{m.begin}functions.{name}:0{m.separator}", m.end)


def build(context: ResponseParserContext) -> FormParser:
    """Build the parser."""
    return FormParser(reader=lambda request: SectionReader(request, _MARKERS), tag=_tag)
