"""`LLM.chat` and `AsyncLLM.chat` with `tool_choice`: each output is read as a message."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tool_model import CITY, EMPTY, THINKS_AND_CALLS, make_tool_model

from slotline.core import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from slotline.llm.turns import FunctionCall, _as_object
from slotline.registry.errors import RequestError
from slotline.server.messages_output import _input

MESSAGES: list[Any] = [{"role": "user", "content": "def read_file(path"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "clock", "parameters": EMPTY}},
]
WEATHER = {"type": "function", "function": {"name": "weather"}}
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512}


def params(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.5, max_tokens=300, seed=seed, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_model(tmp_path_factory.mktemp("model") / "tools")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, **SETTINGS)


def said(message: Any) -> Any:
    """What a message says, without the ids of its calls."""
    return {**message, "tool_calls": [{**call, "id": None} for call in message.get("tool_calls", ())]}


def test_a_named_function_is_called_with_arguments_that_fit(llm: LLM) -> None:
    outputs = llm.chat([MESSAGES] * 3, [params(seed, n=2) for seed in range(3)], tools=TOOLS, tool_choice=WEATHER)
    ids = set()
    for one in (one for output in outputs for one in output.outputs):
        assert one.message is not None
        (call,) = one.message["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert call["function"]["arguments"]["city"] in ("Bern", "Oslo")
        assert one.message["content"] == ""
        ids.add(call["id"])
    assert len(ids) == 6
    answered = [*MESSAGES, one.message, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
    (output,) = llm.chat(answered, SamplingParams(max_tokens=1), tools=TOOLS, tool_choice="none")
    prompt = llm.tokenizer.decode(output.prompt_token_ids)
    assert '"arguments": {"city": ' in prompt
    assert "Call as" not in prompt
    assert output.outputs[0].message == {"role": "assistant", "content": output.outputs[0].text}


def test_python_functions_are_tools(llm: LLM) -> None:
    def clock() -> str:
        """Return the time."""
        return "noon"

    (output,) = llm.chat(MESSAGES, params(1), tools=[clock], tool_choice="required", parallel_tool_calls=False)
    assert output.outputs[0].message is not None
    (call,) = output.outputs[0].message["tool_calls"]
    assert call["function"]["name"] == "clock"


def test_an_asynchronous_chat_reads_the_same_message(llm: LLM, folder: Path) -> None:
    held = StructuredOutputsParams(**THINKS_AND_CALLS["structured_outputs"])
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto", "enable_thinking": True}
    (whole,) = llm.chat(MESSAGES, params(1, structured_outputs=held), **asked)
    message = whole.outputs[0].message
    assert message is not None
    assert message["reasoning_content"].endswith("so")
    assert message["content"] == "yes"
    assert said(message)["tool_calls"] == [
        {"id": None, "type": "function", "function": {"name": "clock", "arguments": {}}}
    ]

    async def chats() -> None:
        async with AsyncLLM(folder, **SETTINGS) as other:
            for kind in ("delta", "cumulative", "final_only"):
                chat = other.chat(MESSAGES, params(1, structured_outputs=held), output_kind=kind, **asked)
                *parts, last = [output.outputs[0].message async for output in chat]
                assert parts == [None] * len(parts)
                assert said(last) == said(message)

    asyncio.run(chats())


def test_without_a_choice_texts_stay_unread(llm: LLM) -> None:
    (output,) = llm.chat(MESSAGES, SamplingParams(max_tokens=1), tools=TOOLS)
    assert output.outputs[0].message is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "'sometimes'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "missing"}}}, "missing"),
        ({"tool_choice": "required"}, "without tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, r"tools\[0\]"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tool_choice": "auto", "sampling_params": SamplingParams(detokenize=False)}, "detokenize"),
    ],
)
def test_wrong_choices_are_refused(asked: dict[str, Any], said: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=said):
        llm.chat(MESSAGES, **asked)
    assert not llm.engine.requests


def test_arguments_that_are_nested_too_deeply_stay_a_text() -> None:
    deep = "[" * 5000
    assert _as_object(FunctionCall("f", deep)) == {"name": "f", "arguments": deep}
    assert _input(deep) == {"INVALID_JSON": deep}
