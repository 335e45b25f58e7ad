"""What parsers share: constraints out of structural tags, or a list of calls in JSON, and the end of the reasoning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from slotline.plugins.response_parsers.json_calls import JsonCallsReader, list_schema
from slotline.plugins.response_parsers.reader import Reader
from slotline.registry.contracts import ResponseParserContext, ResponseRequest, ResponseStream, StructuredOutputsParams

THINK = ("<think>", "</think>")


@frozen
class Tag:
    """Text around the arguments of a call.

    Attributes:
        trigger: the text with which a call begins, whatever its function.
        begin: the text before the arguments, from the trigger on.
        end: the text after them.
    """

    trigger: str
    begin: str
    end: str


def thinks_by_itself(context: ResponseParserContext) -> bool:
    """Return True if the chat template has a switch for reasoning, which is on by default in all known ones."""
    return "enable_thinking" in context.chat_template


@frozen(kw_only=True)
class FormParser:
    """Parser of a form.

    Args:
        reader: makes the reader of an output.
        think: the markers around the reasoning, None for a form without.
        thinks: whether the model opens its reasoning itself, unless the prompt says that there is none.
        tag: the text around the arguments of a function's call, by its name. None if the form's arguments are no JSON.
            Then required calls are written as a list in JSON.
    """

    reader: Callable[[ResponseRequest], Reader]
    think: tuple[str, str] | None = THINK
    thinks: bool = False
    tag: Callable[[str], Tag] | None = None

    def start(self, request: ResponseRequest) -> ResponseStream:
        """See the contract."""
        if self.tag is None and request.calls and request.tool_choice in ("required", "named"):
            return JsonCallsReader(request, self.think)
        return self.reader(request)

    def constraint(self, request: ResponseRequest) -> StructuredOutputsParams | None:
        """See the contract."""
        functions, required = request.callable_functions, request.tool_choice in ("required", "named")
        if self.tag is None:
            return StructuredOutputsParams(json=list_schema(request)) if required else None
        tags = [(function, self.tag(str(function["name"]))) for function in functions]
        return StructuredOutputsParams(
            structural_tag={
                "structures": [
                    {"begin": tag.begin, "schema": schema_of(function, required=required), "end": tag.end}
                    for function, tag in tags
                ],
                "triggers": list(dict.fromkeys(tag.trigger for _, tag in tags)),
                "at_least_one": required,
                "stop_after_first": required and (request.tool_choice == "named" or not request.parallel),
            }
        )

    def reasoning_end(self, request: ResponseRequest) -> str | None:
        """See the contract: the prompt opened reasoning, or the model does unless the prompt closed it."""
        if self.think is None:
            return None
        begin, end = self.think
        prompt = request.prompt.rstrip()
        return end if prompt.endswith(begin) or (self.thinks and not prompt.endswith(end)) else None


def schema_of(function: Mapping[str, Any], *, required: bool) -> Any:
    """Return the schema that holds a function's arguments: its own if they must fit, else that of any object."""
    parameters = function.get("parameters")
    return parameters if parameters and (required or function.get("strict")) else {"type": "object"}
