"""Answers in the forms of the field, and what they say."""

# ruff: noqa: E501, RUF001

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define, field

from slotline.registry.contracts import (
    ContentDelta,
    ReasoningDelta,
    ResponseParser,
    ResponseRequest,
    ToolArgumentsDelta,
    ToolCallBegin,
)

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
)
ARGUMENTS = '{"city": "B}\\"[<|call|ern", "days": 2}'
PLAIN = '{"city": "Bern", "days": 2}'


@define
class Said:
    """What the events of an output add up to."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(factory=list)
    ids: list[str | None] = field(factory=list, eq=False)


def read(parser: ResponseParser, parts: Sequence[str], request: ResponseRequest | None = None) -> Said:
    """Return what the parts of a text say."""
    stream, said = parser.start(request or ResponseRequest(tools=TOOLS)), Said()
    events = [event for part in parts for event in stream.append(part)]
    for event in [*events, *stream.finish()]:
        match event:
            case ReasoningDelta(text):
                said.reasoning += text
            case ContentDelta(text):
                said.content += text
            case ToolCallBegin(index, name, call_id):
                assert index == len(said.calls)
                said.calls.append([name, ""])
                said.ids.append(call_id)
            case ToolArgumentsDelta(index, text):
                assert index == len(said.calls) - 1
                said.calls[index][1] += text
    return said


W = ["weather", ARGUMENTS]
P = ["weather", PLAIN]
FORMS: list[tuple[str, str, Said]] = [
    (
        "hermes",
        f'<think>\nhm\n</think>\n\nso\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        Said("hm", "so", [W]),
    ),
    (
        "hermes",
        '<tool_call>{"arguments": "{}", "name": "x"}</tool_call>\n<tool_call>{"name": "y"}</tool_call>',
        Said("", "", [["x", "{}"], ["y", "{}"]]),
    ),
    ("hermes", "a <tool_call>{bad</tool_call> b", Said("", "a<tool_call>{bad</tool_call> b")),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "B', Said("", "", [["weather", '{"city": "B']])),
    ("llama", f'{{"name": "weather", "parameters": {ARGUMENTS}}}', Said("", "", [W])),
    (
        "llama",
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "weather", "parameters": {PLAIN}}}',
        Said("", "", [W, P]),
    ),
    ("llama", '{"answer": 1} and more', Said("", '{"answer": 1} and more')),
    (
        "mistral",
        f'[THINK]hm[/THINK]so[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "weather", "arguments": {PLAIN}, "id": "abc"}}]',
        Said("hm", "so", [W, P]),
    ),
    (
        "mistral",
        f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{PLAIN}",
        Said("", "", [W, P]),
    ),
    (
        "deepseek",
        f"hm</x></think>so<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{PLAIN}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Said("", "hm</x></think>so", [W, P]),
    ),
    (
        "deepseek",
        f"<think>hm</think>so<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Said("hm", "so", [W]),
    ),
    (
        "kimi",
        f"so<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>{PLAIN}<|tool_call_end|><|tool_calls_section_end|>",
        Said("", "so", [W, P]),
    ),
    (
        "glm",
        "<think>hm</think>\nso\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>clock</tool_call>",
        Said("hm", "so", [P, ["clock", "{}"]]),
    ),
    (
        "minimax",
        '<think>hm</think>so<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bern</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
        Said("hm", "so", [P, ["clock", "{}"]]),
    ),
    (
        "qwen_coder",
        "so\n<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        Said("", "so", [P]),
    ),
    (
        "qwen_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nBe",
        Said("", "", [["weather", '{"city": "\\nBe']]),
    ),
    (
        "harmony",
        f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PLAIN}<|call|>",
        Said("hm", "", [P]),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>so <b>",
        Said("hm", "so <b>"),
    ),
    ("harmony", "plain text", Said("", "plain text")),
    ("think", "<think>\nhm\n</think>\n\nso ", Said("hm", "so ")),
]
