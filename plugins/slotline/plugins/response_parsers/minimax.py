"""MiniMax M2: `<minimax:tool_call>` around `<invoke name="...">` with a `<parameter name="...">` for each argument."""

from __future__ import annotations

import re

from slotline.plugins.response_parsers.parser import FormParser
from slotline.plugins.response_parsers.tagged import TaggedReader, Tags
from slotline.registry.contracts import ResponseParserContext

_TAGS = Tags(
    opening="<minimax:tool_call>",
    closing="</minimax:tool_call>",
    head=re.compile(r"<invoke name=\"?([^\">]+)\"?>"),
    argument=re.compile(r"<parameter name=\"?([^\">]+)\"?>"),
    value_end="</parameter>",
    call_end="</invoke>",
)


def build(context: ResponseParserContext) -> FormParser:
    """Build the parser. Required calls are a list in JSON."""
    return FormParser(reader=lambda request: TaggedReader(request, _TAGS))
