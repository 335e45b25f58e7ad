"""GLM 4.5: `<tool_call>name`, then `<arg_key>` and `<arg_value>` for each argument."""

from __future__ import annotations

import re

from slotline.plugins.response_parsers.parser import FormParser, thinks_by_itself
from slotline.plugins.response_parsers.tagged import TaggedReader, Tags
from slotline.registry.contracts import ResponseParserContext

_TAGS = Tags(
    opening="<tool_call>",
    closing="</tool_call>",
    head=re.compile(r"([^\s<{]+)\s*(?=<)"),
    argument=re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL),
    value_end="</arg_value>",
    call_end="</tool_call>",
)


def build(context: ResponseParserContext) -> FormParser:
    """Build the parser. Required calls are a list in JSON."""
    return FormParser(reader=lambda request: TaggedReader(request, _TAGS), thinks=thinks_by_itself(context))
