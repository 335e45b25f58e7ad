"""OpenAI's Responses by its official client against a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from attrs import evolve
from pydantic import BaseModel
from running_server import RunningServer
from tool_model import CITY, EMPTY, THINKS, THINKS_AND_CALLS

from slotline.core import LLM, SamplingParams

MODEL = "slotline-small"
PROMPT = "def read_file(path"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
ASKED: dict[str, Any] = {"temperature": 0.8, "max_output_tokens": 24, "extra_body": {"seed": 7}}
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=24)
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "of a city", "parameters": CITY},
    {"type": "function", "name": "clock", "parameters": EMPTY},
]
THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tools(tool_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_is_left(server: RunningServer, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    server.everything_returned()
    if "tools" in request.fixturenames:
        request.getfixturevalue("tool_server").everything_returned()


PARTS = {"output_text": "text", "reasoning_text": "text", "function_call_arguments": "arguments"}


def added_up(events: Sequence[Any]) -> Any:
    """The answer at the end of a stream, whose events come in the right order and add up to it."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    first, second, *between, last = events
    assert (first.type, second.type) == ("response.created", "response.in_progress")
    assert first.response.status == second.response.status == "in_progress"
    assert first.response.output == []
    assert last.type == f"response.{last.response.status}"
    rest = iter(between)
    for index, item in enumerate(last.response.output):
        added = next(rest)
        assert (added.type, added.output_index, added.item.id) == ("response.output_item.added", index, item.id)
        assert added.item.status == "in_progress"
        if item.type != "function_call":
            begun = next(rest)
            assert (begun.type, begun.item_id) == ("response.content_part.added", item.id)
            assert begun.part.text == ""
        total = ""
        for event in rest:
            assert (event.item_id, event.output_index) == (item.id, index)
            kind, what = event.type.removeprefix("response.").split(".")
            if what == "done":
                break
            total += event.delta
        whole = item.arguments if item.type == "function_call" else item.content[0].text
        assert total == getattr(event, PARTS[kind]) == whole
        if item.type != "function_call":
            ended = next(rest)
            assert (ended.type, ended.part.to_dict()) == ("response.content_part.done", item.content[0].to_dict())
        done = next(rest)
        assert (done.type, done.item) == ("response.output_item.done", item)
    assert next(rest, None) is None
    return last.response


def said(answer: Any) -> list[Any]:
    """What an answer says, without its ids."""
    return [
        (one.type, one.status, *((one.name, one.arguments) if one.type == "function_call" else [one.content]))
        for one in answer.output
    ]


def test_a_response_is_that_of_llm(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.chat(MESSAGES, PARAMS)
    answer = client.responses.create(model=MODEL, input=PROMPT, metadata={"a": "b"}, user="me", **ASKED)
    assert answer.output_text == expected.outputs[0].text
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.model, answer.metadata, answer.user, answer.temperature) == (MODEL, {"a": "b"}, "me", 0.8)
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(expected.prompt_token_ids)
    assert (answer.usage.output_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (24, 0)
    again = client.responses.create(model=MODEL, input=PROMPT, **ASKED)
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens == (len(expected.prompt_token_ids) - 1) // 16 * 16


def test_forms_of_the_same_input_are_answered_alike(client: openai.OpenAI, llm: LLM) -> None:
    system = {"role": "system", "content": "be brief"}
    (expected,) = llm.chat([system, *MESSAGES], PARAMS)
    text = {"type": "input_text", "text": PROMPT}
    inputs: list[Any] = [
        {"input": PROMPT, "instructions": "be brief"},
        {"input": [system, *MESSAGES]},
        {
            "input": [
                {"type": "message", "role": "developer", "content": "be brief"},
                {"role": "user", "content": [text]},
            ]
        },
    ]
    for asked in inputs:
        assert client.responses.create(model=MODEL, **asked, **ASKED).output_text == expected.outputs[0].text


def test_a_conversation_goes_on_with_the_items_of_an_answer(client: openai.OpenAI, llm: LLM) -> None:
    first = client.responses.create(model=MODEL, input=PROMPT, **ASKED)
    next_one = {"role": "user", "content": "and then"}
    history: Any = [*MESSAGES, *first.output, next_one]
    answer = client.responses.create(model=MODEL, input=history, **ASKED)
    (expected,) = llm.chat([*MESSAGES, {"role": "assistant", "content": first.output_text}, next_one], PARAMS)
    assert answer.output_text == expected.outputs[0].text


def test_a_stream_adds_up_to_the_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input=PROMPT, **ASKED)
    raw = added_up(list(client.responses.create(model=MODEL, input=PROMPT, stream=True, **ASKED)))
    assert said(raw) == said(whole)
    with client.responses.stream(
        model=MODEL, input=PROMPT, **{**ASKED, "extra_body": {"seed": 7, "stop": ["\n"]}}
    ) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed"
    assert "".join(texts) == final.output_text == whole.output_text.split("\n")[0]


def test_log_probabilities_are_those_of_llm(client: openai.OpenAI, llm: LLM) -> None:
    (expected,) = llm.chat(MESSAGES, SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=3))
    asked: Any = {"model": MODEL, "input": PROMPT, "include": ["message.output_text.logprobs"], "top_logprobs": 3}
    answer: Any = client.responses.create(**asked, **ASKED)
    whole = expected.outputs[0]
    found = answer.output[0].content[0].logprobs
    assert [one.logprob for one in found] == [
        entry[token].logprob for token, entry in zip(whole.token_ids, whole.logprobs or (), strict=True)
    ]
    assert [len(one.top_logprobs) for one in found] == [3] * 24
    assert "".join(one.token for one in found) == answer.output_text
    events: Any = client.responses.create(stream=True, **asked, **ASKED)
    deltas = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    assert [one.logprob for logprobs in deltas for one in logprobs] == [one.logprob for one in found]


class Point(BaseModel):
    x: int
    y: bool


def test_a_parsed_answer_has_the_form_that_was_asked_for(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": PROMPT, "text_format": Point, "temperature": 0, "max_output_tokens": 60}
    answer = client.responses.parse(**asked)
    assert isinstance(answer.output_parsed, Point)
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed
    plain: Any = {**asked, "text": {"format": {"type": "json_object"}}}
    del plain["text_format"]
    assert client.responses.create(**plain).output_text.startswith("{")


def test_own_parameters_go_into_the_extra_body(client: openai.OpenAI) -> None:
    extra = {"structured_outputs": {"choice": ["yes", "no"]}, "top_k": 3, "cache_salt": "mine", "request_id": "mine"}
    answer = client.responses.create(model=MODEL, input=PROMPT, extra_body=extra)
    assert answer.output_text in ("yes", "no")
    assert (answer.id, answer.status) == ("mine", "completed")


@pytest.mark.spread(1)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_streamed_calls_are_those_of_the_whole(choice: Any, tools: openai.OpenAI) -> None:
    asked: Any = {"model": "tools", "input": PROMPT, "tools": TOOLS, "tool_choice": choice}
    asked |= {"parallel_tool_calls": False, "temperature": 0.5, "max_output_tokens": 300, "extra_body": {"seed": 1}}
    whole = tools.responses.create(**asked)
    (call,) = whole.output
    assert call.type == "function_call"
    assert whole.status == "completed"
    assert call.name == "weather" or choice == "required"
    assert call.call_id.startswith("call_")
    if choice == "required":
        assert said(added_up(list(tools.responses.create(stream=True, **asked)))) == said(whole)
        return
    with tools.responses.stream(**asked) as stream:
        assert said(stream.get_final_response()) == said(whole)


def test_tools_that_are_not_allowed_are_not_called(tools: openai.OpenAI) -> None:
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    asked: Any = {"model": "tools", "input": PROMPT, "tools": TOOLS, "tool_choice": choice, "max_output_tokens": 300}
    answer = tools.responses.create(parallel_tool_calls=False, temperature=0.5, **asked)
    assert [one.name for one in answer.output if one.type == "function_call"] == ["clock"]


def test_reasoning_text_and_call_are_items_in_their_order(tools: openai.OpenAI) -> None:
    asked: Any = {"model": "tools", "input": PROMPT, "tools": TOOLS, "temperature": 0.5, "max_output_tokens": 300}
    asked["extra_body"] = {"seed": 1, **THINKING, **THINKS_AND_CALLS}
    whole = tools.responses.create(**asked)
    assert [one.type for one in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output_text == "yes"
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    events: Any = list(tools.responses.create(stream=True, **asked))
    assert said(added_up(events)) == said(whole)
    assert "response.reasoning_text.delta" in {event.type for event in events}
    asked["extra_body"]["include_reasoning"] = False
    assert [one.type for one in tools.responses.create(**asked).output] == ["message", "function_call"]


def test_calls_and_reasoning_go_back_into_one_message(tools: openai.OpenAI) -> None:
    asked: Any = {"model": "tools", "tools": TOOLS, "temperature": 0.5, "max_output_tokens": 300}
    extra = {"seed": 1, **THINKING, **THINKS_AND_CALLS}
    first: Any = tools.responses.create(input=PROMPT, extra_body=extra, **asked)
    thought, text, call = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    asked |= {"max_output_tokens": 8, "extra_body": {"seed": 2}}
    answer = tools.responses.create(input=[*MESSAGES, *first.output, result], **asked)
    chat: Any = tools.chat.completions.create(
        model="tools",
        messages=[
            *MESSAGES,
            {
                "role": "assistant",
                "content": text.content[0].text,
                "reasoning_content": thought.content[0].text,
                "tool_calls": [
                    {
                        "id": call.call_id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": call.arguments},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "noon"},
        ],  # type: ignore[arg-type]
        tools=[{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS],
        temperature=0.5,
        max_tokens=8,
        seed=2,
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens


def test_asynchronous_calls_and_streams(server: RunningServer, tool_server: RunningServer) -> None:
    async def all_calls() -> None:
        async with (
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client,
            openai.AsyncOpenAI(base_url=f"{tool_server.url}/v1", api_key="any") as tools,
        ):
            asked: Any = {"model": MODEL, "input": PROMPT, **ASKED}
            whole, stream = await asyncio.gather(
                client.responses.create(**asked), client.responses.create(stream=True, **asked)
            )
            assert said(added_up([event async for event in stream])) == said(whole)
            extra = {"seed": 1, **THINKING, **THINKS}
            async with tools.responses.stream(
                model="tools", input=PROMPT, temperature=0.5, max_output_tokens=300, extra_body=extra
            ) as one:
                final = await one.get_final_response()
            assert final.output_text in ("yes", "no")

    asyncio.run(all_calls())
    tool_server.everything_returned()


def test_a_stream_that_is_closed_early_is_aborted(client: openai.OpenAI) -> None:
    stream = client.responses.create(model=MODEL, input=PROMPT, stream=True, max_output_tokens=1500)
    next(iter(stream))
    stream.close()


def test_an_aborted_stream_ends_as_failed(client: openai.OpenAI, server: RunningServer) -> None:
    llm, events = server.state.llm, []
    extra = {"request_id": "to-abort", "ignore_eos": True}
    for event in client.responses.create(
        model=MODEL, input=PROMPT, stream=True, max_output_tokens=1500, extra_body=extra
    ):
        if not events:
            llm._thread.call(lambda: llm._deliveries.abort(llm.engine, "to-abort")).result(30)
        events.append(event)
    failed = added_up(events)
    assert (failed.status, failed.output[0].status) == ("failed", "incomplete")
    assert "aborted" in failed.error.message


def test_a_stream_that_takes_too_long_ends_as_failed(client: openai.OpenAI, server: RunningServer) -> None:
    before = server.state.config
    server.state.config = evolve(before, request_timeout=0.2)
    try:
        events = list(client.responses.create(model=MODEL, input=PROMPT, stream=True, extra_body={"ignore_eos": True}))
    finally:
        server.state.config = before
    failed = added_up(events)
    assert failed.status == "failed"
    assert "request_timeout" in failed.error.message


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"input": []}, None),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "reasoning", "id": "x", "summary": [], "encrypted_content": "y"}]},
            "input[0].encrypted_content",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools[0]"),
        ({"tools": TOOLS}, "tools"),  # no parser reads this model's calls
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": "missing"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "low"}}, None),  # the template does not read it
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_tokens"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"inputs": "x"}}, "inputs"),
        ({"input": "x" * 30000, "stream": True}, None),
    ],
)
def test_what_is_not_served_is_refused_by_name(asked: dict[str, Any], param: str | None, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**{"model": MODEL, "input": PROMPT, "max_output_tokens": 4, **asked})
    assert raised.value.param == param
    assert "Traceback" not in raised.value.message
