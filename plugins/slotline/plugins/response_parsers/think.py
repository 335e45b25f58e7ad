"""Models that reason between `<think>` and `</think>` and have no known form of calls."""

from __future__ import annotations

from slotline.plugins.response_parsers.parser import THINK, FormParser, thinks_by_itself
from slotline.plugins.response_parsers.reader import Reader
from slotline.registry.contracts import ResponseParserContext


def build(context: ResponseParserContext) -> FormParser:
    """Build the parser. Required calls are a list in JSON."""
    return FormParser(reader=lambda request: Reader(request, THINK), thinks=thinks_by_itself(context))
