"""Checkpoints that bring a `response_template`: transformers' own streaming parser of it reads the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from slotline.plugins.response_parsers.json_calls import JsonCallsReader, list_schema
from slotline.plugins.response_parsers.reader import Reader, as_arguments, merged
from slotline.registry.contracts import (
    ResponseEvent,
    ResponseParserContext,
    ResponseRequest,
    ResponseStream,
    StructuredOutputsParams,
)
from slotline.registry.errors import PluginError

_REASONING = ("thinking", "reasoning_content", "reasoning")


class TemplateReader(Reader):
    """Reader whose regions are found by transformers. Calls are known at the end of their region."""

    def __init__(self, request: ResponseRequest, template: dict[str, Any]) -> None:
        super().__init__(request)
        from transformers.utils.chat_parsing import ResponseParser

        self._parser = ResponseParser(template, request.prompt, tools=list(request.tools))
        self._streamed: set[str] = set()

    def append(self, text: str) -> Sequence[ResponseEvent]:
        """See the contract."""
        return self._read(self._parser.feed(text))

    def finish(self) -> Sequence[ResponseEvent]:
        """See the contract. A region that cannot be read is left out, as its end is missing."""
        try:
            return self._read(self._parser.finalize()[1])
        except ValueError:
            return []

    def _read(self, found: Sequence[dict[str, Any]]) -> Sequence[ResponseEvent]:
        for event in found:
            self._one(event["field"], event)
        events, self._events = self._events, []
        return merged(events)

    def _one(self, name: str, event: dict[str, Any]) -> None:
        emit = self.say if name == "content" else self.reason if name in _REASONING else None
        if event["type"] == "region_open":
            self._streamed.discard(name)
        elif event["type"] == "region_chunk" and emit is not None and not event["dirty"]:
            self._streamed.add(name)
            emit(event["text"])
        elif event["type"] == "region_close" and emit is not None and name not in self._streamed:
            emit(str(event["value"]))
        elif event["type"] == "region_close" and name == "tool_calls":
            for call in event["value"] if isinstance(event["value"], list) else [event["value"]]:
                self._call(call)

    def _call(self, call: Any) -> None:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(name := function.get("name"), str):
            self.begin(name, call.get("id"))
            self.argue(as_arguments(function.get("arguments")))
        else:
            self.say(as_arguments(call))


@frozen
class TemplateParser:
    """Parser of a checkpoint's template. Required calls are a list in JSON."""

    template: dict[str, Any]

    def start(self, request: ResponseRequest) -> ResponseStream:
        """See the contract."""
        required = request.calls and request.tool_choice in ("required", "named")
        return JsonCallsReader(request) if required else TemplateReader(request, self.template)

    def constraint(self, request: ResponseRequest) -> StructuredOutputsParams | None:
        """See the contract."""
        required = request.tool_choice in ("required", "named")
        return StructuredOutputsParams(json=list_schema(request)) if required else None

    def reasoning_end(self, request: ResponseRequest) -> str | None:
        """See the contract: the end of the reasoning's region, if the prompt opened it and its end is one text."""
        fields = self.template.get("fields", {})
        for name in _REASONING:
            region = fields.get(name, {})
            begin, end = region.get("open"), region.get("close")
            if isinstance(begin, str) and isinstance(end, str) and request.prompt.rstrip().endswith(begin.rstrip()):
                return end
        return None


def build(context: ResponseParserContext) -> TemplateParser:
    """Build the parser.

    Raises:
        PluginError: if the tokenizer has no template, or one that transformers does not take.
    """
    template = getattr(context.tokenizer, "response_template", None)
    if not isinstance(template, dict):
        raise PluginError("the tokenizer has no response_template", fix="name another parser in response_parser.name")
    try:
        TemplateReader(ResponseRequest(), template)
    except (TypeError, ValueError, KeyError) as error:
        raise PluginError(f"transformers refuses the response_template: {error}", fix="correct it") from error
    return TemplateParser(template)
