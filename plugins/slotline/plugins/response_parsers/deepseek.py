"""DeepSeek V3, R1 and V3.1: calls between markers of their own, the older ones with the arguments in a code block."""

# ruff: noqa: RUF001

from __future__ import annotations

from slotline.plugins.response_parsers.parser import FormParser, Tag
from slotline.plugins.response_parsers.sections import SectionMarkers, SectionReader
from slotline.registry.contracts import ResponseParserContext

_MARKERS = SectionMarkers(
    opening="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    begin="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
)


def build(context: ResponseParserContext) -> FormParser:
    """Build the parser. The template says which of the two forms a required call has."""
    fenced = "```json" in context.chat_template

    def tag(name: str) -> Tag:
        m = _MARKERS
        before = f"function{m.separator}{name}\n```json\n" if fenced else f"{name}{m.separator}"
        return Tag(m.opening, f"{m.opening}{m.begin}{before}", f"{chr(10) + '```' if fenced else ''}{m.end}")

    return FormParser(reader=lambda request: SectionReader(request, _MARKERS), tag=tag)
