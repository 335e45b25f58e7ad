"""The official client of OpenAI with tools, against a model whose chat template has the Hermes form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from running_server import RunningServer, running_server

from slotline.planner.plan import SMALL_MODEL

MESSAGES: list[Any] = [{"role": "user", "content": "def read_file(path"}]
EMPTY = {"type": "object", "additionalProperties": False}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "clock", "parameters": EMPTY},
    },
]
TEMPLATE = """{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call as <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
ASKED: dict[str, Any] = {"model": "tools", "messages": MESSAGES, "tools": TOOLS, "temperature": 0.5, "max_tokens": 300}
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("model") / "tools"
    shutil.copytree(SMALL_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"structured_output.backend": request.param, "observability.check_integrity": True}
    with running_server(model=str(folder), dtype="float32", **settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_is_left(server: RunningServer) -> Iterator[None]:
    yield
    server.everything_returned()


def _fits(call: Any) -> bool:
    arguments = json.loads(call.function.arguments)
    return call.function.name == "weather" and arguments["city"] in ("Bern", "Oslo") and 1 <= arguments["days"] <= 9


def test_the_plan_says_which_parser_reads_and_why(server: RunningServer) -> None:
    (setting,) = [one for one in server.state.llm.plan.settings if one.key == "response_parser.name"]
    assert setting.resolved == "hermes"
    assert "the chat template has '<tool_call>'" in setting.origin


@pytest.mark.spread(3)
@pytest.mark.parametrize("seed", range(4))
def test_a_named_function_is_called_with_arguments_that_fit(seed: int, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(tool_choice=WEATHER, seed=seed, **ASKED)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert _fits(call)
    assert call.type == "function"
    assert call.id


@pytest.mark.spread(3)
@pytest.mark.parametrize("seed", range(4))
def test_streamed_calls_are_those_of_the_whole(seed: int, client: openai.OpenAI) -> None:
    asked: Any = {**ASKED, "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
    (whole,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or ()
    names, arguments, ids, reasons = [], "", [], []
    for chunk in client.chat.completions.create(stream=True, **asked):
        (choice,) = chunk.choices
        reasons += [choice.finish_reason] if choice.finish_reason else []
        assert not choice.delta.content
        for call in choice.delta.tool_calls or ():
            assert call.index == 0
            assert call.function is not None
            names += [call.function.name] if call.function.name else []
            ids += [call.id] if call.id else []
            arguments += call.function.arguments or ""
    assert (names, arguments) == ([whole.function.name], whole.function.arguments)
    assert whole.function.name in ("weather", "clock")
    json.loads(arguments)
    assert len(ids) == 1
    assert reasons == ["tool_calls"]


def test_calls_and_their_answers_go_back_into_the_template(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(tool_choice=WEATHER, seed=1, **ASKED).choices[0].message
    assert first.tool_calls is not None
    answered = [*MESSAGES, first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}]
    answer = client.chat.completions.create(**{**ASKED, "messages": answered, "max_tokens": 4}).choices[0]
    assert answer.message.tool_calls is None
    assert answer.finish_reason == "length"


def test_without_a_call_the_answer_is_content(client: openai.OpenAI) -> None:
    plain = {**ASKED, "max_tokens": 8, "seed": 3}
    none = client.chat.completions.create(tool_choice="none", **plain).choices[0].message
    absent = client.chat.completions.create(**{name: value for name, value in plain.items() if name != "tools"})
    assert none.content == absent.choices[0].message.content
    assert none.tool_calls is None


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "missing"}}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, None),
    ],
)
def test_wrong_tools_are_refused(asked: dict[str, Any], param: str | None, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**{**ASKED, **asked})
    assert raised.value.param == param


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a model whose template opens reasoning, which the small model never ends by itself."""
    folder = tmp_path_factory.mktemp("model") / "thinks"
    shutil.copytree(SMALL_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("assistant: ", "assistant: <think>"))
    with (
        running_server(model=str(folder), dtype="float32") as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client
        running.everything_returned()


def test_reasoning_that_the_prompt_opened_is_shown_apart(thinking: openai.OpenAI) -> None:
    asked: Any = {"model": "thinks", "messages": MESSAGES, "temperature": 0.5, "seed": 3, "max_tokens": 24}
    whole = thinking.chat.completions.create(**asked).choices[0]
    said: Any = whole.message.model_extra
    assert whole.message.content == ""
    assert said["reasoning"] == said["reasoning_content"] != ""
    assert whole.finish_reason == "length"
    streamed = ""
    for chunk in thinking.chat.completions.create(stream=True, **asked):
        delta: Any = chunk.choices[0].delta
        assert not delta.content
        streamed += (delta.model_extra or {}).get("reasoning_content") or ""
    assert streamed == said["reasoning_content"]
    hidden = thinking.chat.completions.create(extra_body={"include_reasoning": False}, **asked).choices[0]
    assert not hidden.message.model_extra
    assert hidden.message.content == ""


def test_the_form_of_an_answer_does_not_hold_its_reasoning(thinking: openai.OpenAI) -> None:
    asked: Any = {"model": "thinks", "messages": MESSAGES, "temperature": 0.5, "seed": 3, "max_tokens": 24}
    free: Any = thinking.chat.completions.create(**asked).choices[0].message.model_extra
    formed = thinking.chat.completions.create(response_format={"type": "json_object"}, **asked).choices[0]
    assert formed.message.model_extra == free  # the reasoning never ends, so the form never begins
    assert formed.message.content == ""
    chosen: Any = {"structured_outputs": {"choice": ["yes", "no"], "after": " "}}
    said: Any = thinking.chat.completions.create(extra_body=chosen, **asked).choices[0].message.model_extra
    assert said["reasoning"].endswith(("yes", "no"))
