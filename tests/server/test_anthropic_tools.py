"""The official client of Anthropic with tools and thinking."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel
from running_server import RunningServer
from tool_model import CITY, EMPTY, THINKS, THINKS_AND_CALLS

MESSAGES: list[Any] = [{"role": "user", "content": "def read_file(path"}]
TOOLS: list[Any] = [
    {"name": "weather", "description": "of a city", "input_schema": CITY, "cache_control": {"type": "ephemeral"}},
    {"name": "clock", "input_schema": EMPTY, "type": "custom"},
]
ASKED: dict[str, Any] = {"model": "tools", "messages": MESSAGES, "max_tokens": 300}
SEEDED: dict[str, Any] = {"seed": 1, "temperature": 0.5}
THINKING: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


@pytest.fixture
def client(tool_server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tool_server.url, api_key="any", max_retries=0) as client:
        yield client
    tool_server.everything_returned()


def said(message: anthropic.types.Message) -> Any:
    """What a message says, without its ids."""
    return message.stop_reason, [block.to_dict() | {"id": None} for block in message.content]


@pytest.mark.spread(1)
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_streamed_calls_are_those_of_the_whole(choice: Any, client: anthropic.Anthropic) -> None:
    asked: Any = {**ASKED, "tools": TOOLS, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    asked["extra_body"] = SEEDED
    whole = client.messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    (block,) = whole.content
    assert block.type == "tool_use"
    assert block.name == "weather"
    assert block.input["city"] in ("Bern", "Oslo")
    with client.messages.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert said(final) == said(whole)
    assert "".join(event.partial_json for event in events if event.type == "input_json").startswith('{"city"')


def test_thinking_text_and_call_are_blocks_in_their_order(client: anthropic.Anthropic) -> None:
    asked: Any = {**ASKED, "tools": TOOLS, **THINKING, "extra_body": {**SEEDED, **THINKS_AND_CALLS}}
    whole = client.messages.create(**asked)
    thought, text, call = whole.content
    assert (thought.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert thought.thinking.endswith("so")
    assert (text.text, call.name, call.input) == ("yes", "clock", {})
    with client.messages.stream(**asked) as stream:
        assert said(stream.get_final_message()) == said(whole)
    asked["messages"] = [
        *MESSAGES,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "noon"}]},
    ]
    answer = client.messages.create(**{**asked, "max_tokens": 4, "extra_body": SEEDED})
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > whole.usage.input_tokens + 30


def test_results_of_tools_are_messages_of_the_chat(client: anthropic.Anthropic, tool_server: RunningServer) -> None:
    call = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo", "days": 2}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]}
    history: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "text", "text": "let me see"}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "thanks"}]},
    ]
    message = client.messages.create(**{**ASKED, "messages": history, "max_tokens": 8, "extra_body": SEEDED})
    function = {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    messages: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": "let me see", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "user", "content": "thanks"},
    ]
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="any") as other:
        chat: Any = other.chat.completions.create(
            model="tools", messages=messages, max_tokens=8, temperature=0.5, seed=1
        )
    assert message.content[0].text == chat.choices[0].message.content  # type: ignore[union-attr]
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens


def test_reasoning_is_shown_only_if_asked_for(client: anthropic.Anthropic) -> None:
    own = {**SEEDED, **THINKS, "chat_template_kwargs": {"enable_thinking": True}}
    hidden = client.messages.create(**ASKED, extra_body=own)
    assert [block.type for block in hidden.content] == ["text"]
    shown = client.messages.create(**ASKED, thinking={"type": "adaptive"}, extra_body={**SEEDED, **THINKS})
    assert [block.type for block in shown.content] == ["thinking", "text"]
    assert shown.content[1] == hidden.content[0]


class Point(BaseModel):
    x: int
    y: bool


def test_a_parsed_message_has_the_form_that_was_asked_for(client: anthropic.Anthropic) -> None:
    message = client.messages.parse(**{**ASKED, "max_tokens": 60}, output_format=Point, extra_body={"temperature": 0})
    assert isinstance(message.parsed_output, Point)


def test_an_asynchronous_stream_has_the_call(tool_server: RunningServer) -> None:
    async def call() -> anthropic.types.Message:
        async with (
            anthropic.AsyncAnthropic(base_url=tool_server.url, api_key="any") as client,
            client.messages.stream(
                **ASKED, tools=TOOLS, **THINKING, extra_body={**SEEDED, **THINKS_AND_CALLS}
            ) as stream,
        ):
            return await stream.get_final_message()

    assert asyncio.run(call()).stop_reason == "tool_use"
    tool_server.everything_returned()


TEXT = {"type": "text", "text": "x", "colour": 1}
RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "y"}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "missing"}}, "missing"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
        ({"messages": [], "system": "be brief"}, "messages"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "tool_use_id"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}]}, "content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "redacted"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [TEXT]}]}, "content[0].colour"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1, "display": "omitted"}}, "thinking.display"),
        ({"extra_body": {"output_config": {"effort": "low"}}}, "reasoning_effort"),
    ],
)
def test_what_is_not_served_is_refused_by_name(asked: dict[str, Any], said: str, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(**{**ASKED, **asked})
    body: Any = raised.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert said in body["error"]["message"]
