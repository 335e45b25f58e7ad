"""Qwen Coder: `<tool_call>` around `<function=name>` with a `<parameter=name>` for each argument."""

from __future__ import annotations

import re

from slotline.plugins.response_parsers.parser import FormParser, thinks_by_itself
from slotline.plugins.response_parsers.tagged import TaggedReader, Tags
from slotline.registry.contracts import ResponseParserContext

_TAGS = Tags(
    opening="<tool_call>",
    closing="</tool_call>",
    head=re.compile(r"<function=([^>]+)>"),
    argument=re.compile(r"<parameter=([^>]+)>"),
    value_end="</parameter>",
    call_end="</function>",
)


def build(context: ResponseParserContext) -> FormParser:
    """Build the parser. Required calls are a list in JSON."""
    return FormParser(reader=lambda request: TaggedReader(request, _TAGS), thinks=thinks_by_itself(context))
