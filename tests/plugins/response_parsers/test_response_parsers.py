"""Each form's texts, whole and in any pieces."""

# ruff: noqa: RUF001

from __future__ import annotations

import importlib
import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from response_texts import FORMS, TOOLS, Said, read

from slotline.planner.response_parser import AnswerFacts
from slotline.plugins.response_parsers import descriptors
from slotline.registry.contracts import ResponseParser, ResponseParserContext, ResponseRequest

NAMES = sorted({name for name, _, _ in FORMS})
PIECES = st.lists(
    st.sampled_from(
        [
            *(text[i : i + 9] for _, text, _ in FORMS for i in range(0, len(text), 9)),
            *("<tool_call>", "</tool_call>", "{", "}", '"', "\\", "<", "[", "]", " ", "\n", "<think>", "</think>"),
        ]
    ),
    max_size=14,
).map("".join)


def parser_of(name: str, template: str = "", tokenizer: object = None) -> ResponseParser:
    context = ResponseParserContext(
        contract=1, tokenizer=tokenizer, chat_template=template, special_tokens=(), model_type=""
    )
    parser: ResponseParser = importlib.import_module(f"slotline.plugins.response_parsers.{name}").build(context)
    return parser


def split(text: str, places: list[int]) -> list[str]:
    cuts = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in pairwise(cuts)]


@pytest.mark.parametrize(("name", "text", "expected"), FORMS)
def test_a_text_says_what_its_form_means(name: str, text: str, expected: Said) -> None:
    parser = parser_of(name)
    assert read(parser, [text]) == expected
    assert read(parser, list(text)) == expected
    assert all(read(parser, [text[:i], text[i:]]) == expected for i in range(len(text)))


@pytest.mark.parametrize("name", NAMES)
@given(text=PIECES, places=st.lists(st.integers(0, 400), max_size=12))
def test_what_any_text_says_hangs_on_no_splitting(name: str, text: str, places: list[int]) -> None:
    parser = parser_of(name)
    assert read(parser, split(text, places)) == read(parser, [text])


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text("abc {}[]\"':,\n", max_size=60).filter(lambda text: not text.lstrip().startswith(("{", "["))))
def test_a_text_without_markers_is_content_to_the_letter(name: str, text: str) -> None:
    assert read(parser_of(name), [text], ResponseRequest()) == Said("", text)


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_that_the_prompt_opened(name: str) -> None:
    parser = parser_of(name)
    begin, end = ("[THINK]", "[/THINK]") if name == "mistral" else ("<think>", "</think>")
    if name in ("llama", "harmony"):
        return
    request = ResponseRequest(prompt=f"assistant: {begin}\n")
    assert read(parser, [f"hm{end}so"], request) == Said("hm", "so")
    assert parser.reasoning_end(request) == end
    assert parser.reasoning_end(ResponseRequest(prompt=f"{begin}{end}")) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("choice", ["required", "named"])
def test_what_holds_a_required_call_is_read_as_one(name: str, choice: str) -> None:
    parser = parser_of(name)
    request = ResponseRequest(tools=TOOLS, tool_choice=choice, function="weather" if choice == "named" else None)
    constraint = parser.constraint(request)
    assert constraint is not None
    if constraint.structural_tag is None:
        text = json.dumps([{"name": "weather", "arguments": {"city": "Bern", "days": 2}}])
    else:
        (structure,) = constraint.structural_tag["structures"]  # type: ignore[index]
        assert structure["schema"] == TOOLS[0]["function"]["parameters"]
        text = structure["begin"] + '{"city": "Bern", "days": 2}' + structure["end"]
    said = read(parser, list(text), request)
    assert said == Said("", "", [["weather", '{"city": "Bern", "days": 2}']])


def test_the_checkpoints_own_template_is_read_by_transformers() -> None:
    template = {
        "defaults": {"role": "assistant"},
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "content": {"close": "<end>"},
            "tool_calls": {"open": "<call>", "close": "</call>", "content": "json", "repeats": True},
        },
        "start_anchor": "assistant:",
    }
    parser = parser_of("template", tokenizer=SimpleNamespace(response_template=template))
    text = '<think>hm</think>so<call>{"name": "weather", "arguments": {"days": 2}}</call>'
    said = read(parser, [text], ResponseRequest(tools=TOOLS, prompt="assistant:"))
    assert (said.reasoning, said.content) == ("hm", "so")
    assert said.calls == [["weather", '{"days": 2}']]
    assert read(parser, list(text), ResponseRequest(tools=TOOLS, prompt="assistant:")) == said


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>{...}</tool_call> <think> </think>", "hermes"),
        ("<tool_call>\n<function=name>\n<parameter=x></tool_call>", "qwen_coder"),
        ("<tool_call>{name}<arg_key>k</arg_key><arg_value>v</arg_value></tool_call><think></think>", "glm"),
        ("<｜tool▁call▁begin｜>f<｜tool▁sep｜> <think></think>", "deepseek"),
        ("<|tool_call_begin|>f<|tool_call_argument_begin|>", "kimi"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<minimax:tool_call><think></think>", "minimax"),
        ('<|start_header_id|> {"name": f, "parameters": {}}', "llama"),
        ("<think></think>", "think"),
        ("{{ message.content }}", None),
    ],
)
def test_a_chat_template_speaks_for_its_parser(template: str, name: str | None) -> None:
    facts = AnswerFacts(chat_template=template)
    fit = [one for one in vars(descriptors).values() if getattr(one, "kind", None) == "response_parser"]
    fit = [one for one in fit if facts.evidence(one.capabilities)]
    best = max(fit, key=lambda one: one.capabilities.priority, default=None)
    assert (best and best.name) == name
