"""`LLM.chat`: conversations, contents and options that templates read, and refusals of what they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from chat_templates import EITHER, LISTS, LLAMA, LLAVA, PARTS, QWEN, STRICT, TEXTS

from slotline.core import LLM, SamplingParams
from slotline.planner.plan import SMALL_MODEL
from slotline.registry.errors import RequestError, SlotlineError
from slotline.text.tokenizer import Tokenizer

Engines = Callable[..., LLM]
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]
TALK = [{"role": "user", "content": " one "}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "3"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(SMALL_MODEL)


@pytest.fixture
def llm(engines: Engines) -> LLM:
    return engines(None, max_model_len=256, max_num_batched_tokens=256)


def prompt(llm: LLM, messages: Any, **options: Any) -> str:
    (output,) = llm.chat(messages, SHORT, **options)
    return llm.tokenizer.decode(output.prompt_token_ids)


def theirs(tokenizer: Tokenizer, messages: Any, **options: Any) -> str:
    """What transformers makes of the same."""
    return str(tokenizer.transformers.apply_chat_template(messages, tokenize=False, **options))


# ---- as transformers renders them


@pytest.mark.parametrize("name", [*TEXTS, *PARTS])
@pytest.mark.parametrize("begun", [True, False])
def test_templates_render_as_in_transformers(name: str, begun: bool, llm: LLM) -> None:
    template = {**TEXTS, **PARTS}[name]
    messages: list[Mapping[str, Any]] = [*TALK]
    if name in PARTS:
        messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in TALK]
    wanted = theirs(llm.tokenizer, messages, chat_template=template, add_generation_prompt=begun)
    assert prompt(llm, messages, chat_template=template, add_generation_prompt=begun) == wanted


def test_a_turn_is_begun_unless_the_call_says_otherwise(llm: LLM) -> None:
    with_turn, without = (prompt(llm, HI, add_generation_prompt=begun) for begun in (True, False))
    assert with_turn == prompt(llm, HI) == without + "<|im_start|>assistant\n"


@pytest.mark.parametrize("begun", [None, False])
@pytest.mark.parametrize("text", ["def main(", "ends with a space ", "", "<|im_end|>"])
def test_the_last_message_can_be_continued(begun: bool | None, text: str, llm: LLM) -> None:
    messages = [*HI, {"role": "assistant", "content": text}]
    options = {"continue_final_message": True, "add_generation_prompt": begun}
    assert prompt(llm, messages, **options) == theirs(llm.tokenizer, messages, continue_final_message=True)
    assert prompt(llm, messages, **options).endswith(f"<|im_start|>assistant\n{text}")
    parts = [*HI, {"role": "assistant", "content": [{"type": "text", "text": text}]}]
    assert prompt(llm, parts, **options).endswith(f"<|im_start|>assistant\n{text}")


def test_a_trimmed_message_is_continued_behind_its_text(llm: LLM) -> None:
    messages = [*HI, {"role": "assistant", "content": "def f( "}]
    text = prompt(llm, messages, continue_final_message=True, chat_template=STRICT)
    assert text.endswith("assistant\ndef f(")


def test_another_field_than_the_content_can_be_continued(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }} / {{ m.content }}{% endfor %}"
    messages = [{"role": "assistant", "content": "so", "reasoning_content": "because"}]
    text = prompt(llm, messages, continue_final_message="reasoning_content", chat_template=template)
    assert text == "assistant: because"


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        (HI, {"add_generation_prompt": True, "continue_final_message": True}, "and add_generation_prompt together"),
        (HI, {"continue_final_message": "reasoning"}, "the last message has no 'reasoning'"),
        ([{"role": "user"}], {"continue_final_message": True}, "the last message has no 'content'"),
        (HI, {"continue_final_message": "role"}, None),
        (HI, {"continue_final_message": 5}, "continue_final_message=5 is not allowed"),
        (HI, {"add_generation_prompt": "yes"}, "add_generation_prompt='yes' is not allowed"),
        (HI, {"continue_final_message": True, "chat_template": "{{ messages[0].content[:1] }}"}, "leaves out a part"),
    ],
)
def test_what_cannot_be_continued_is_refused(messages: Any, options: Any, message: str | None, llm: LLM) -> None:
    if message is None:
        assert prompt(llm, messages, **options) == "<|im_start|>user"
        return
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, **options)


# ---- options


def test_variables_of_the_template_are_read_in_either_form(llm: LLM) -> None:
    plain = prompt(llm, HI, chat_template=QWEN)
    silent = prompt(llm, HI, chat_template=QWEN, enable_thinking=False)
    assert silent == plain + "<think>\n\n</think>\n\n"
    assert prompt(llm, HI, chat_template=QWEN, chat_template_kwargs={"enable_thinking": np.bool_(False)}) == silent
    assert prompt(llm, HI, chat_template=LLAMA, date_string="today").startswith(
        "<|endoftext|><|start|>system\nToday: today"
    )
    assert "Today: 26 Jul 2024" in prompt(llm, HI, chat_template=LLAMA)
    assert prompt(llm, HI, chat_template_kwargs={"add_generation_prompt": False}).endswith("<|im_end|>\n")


def test_tools_may_be_schemas_or_functions(llm: LLM) -> None:
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: where.
        """
        return city

    for tool in (weather, {"type": "function", "function": {"name": "weather"}}):
        wanted = theirs(llm.tokenizer, HI, tools=[tool], chat_template=QWEN, add_generation_prompt=True)
        assert prompt(llm, HI, tools=[tool], chat_template=QWEN) == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_thinking": False}, "reads no 'enable_thinking'"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "reads no 'enable_thinking'"),
        ({"enable_thinkin": False, "chat_template": QWEN}, "reads no 'enable_thinkin'; did you mean 'enable_thinking'"),
        ({"add_generation_promt": False}, "did you mean 'add_generation_prompt'"),
        ({"lora_requests": None}, "did you mean 'lora_request'"),
        ({"temperature": 0}, r"no option 'temperature'\n  fix: give it as sampling_params=SamplingParams\(temperature"),
        ({"tokenize": True}, "reads no 'tokenize'"),
        ({"messages": HI, "chat_template_kwargs": {}}, None),
        ({"chat_template_kwargs": {"messages": HI}}, "reads no 'messages'"),
        ({"chat_template_kwargs": {5: HI}}, "reads no 5"),
        ({"chat_template_kwargs": [1]}, r"chat_template_kwargs=\[1\] is no mapping"),
        ({"chat_template_kwargs": {"tools": []}, "tools": [{}]}, "tools is given twice"),
        ({"chat_template_kwargs": {"x": 1}, "x": 2}, "x is given twice"),
        ({"tools": [{}]}, "reads no 'tools'"),
        ({"documents": [{}]}, "reads no 'documents'"),
        ({"tools": [5], "chat_template": QWEN}, "tools: 5 is no tool"),
        ({"tools": 5, "chat_template": QWEN}, "tools: 5 is no tool"),
        ({"chat_template": 5}, "chat_template=5 is not allowed"),
        ({"chat_template": "{% for"}, "the chat template cannot be read: line 1"),
        ({"chat_template": "{{ 1|nothing }}"}, "the chat template cannot be read: line 1: No filter named 'nothing'"),
        ({"chat_template_content_format": "list"}, "chat_template_content_format='list' is not allowed"),
        ({"progress": True, "use_tqdm": True}, "give one of them"),
        ({"use_tqdm": 5}, "use_tqdm=5 is not allowed"),
    ],
)
def test_options_that_nobody_reads_are_refused(options: Any, message: str | None, llm: LLM) -> None:
    if message is None:
        with pytest.raises(TypeError, match="multiple values for argument 'messages'"):
            llm.chat(HI, **options)
        return
    with pytest.raises(RequestError, match=message):
        llm.chat(HI, **options)
    assert not llm.engine.has_work


METHODS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "generate": (([5],), {"sampling_parms": SHORT}, "did you mean 'sampling_params'"),
    "stream": (([5],), {"progress": True}, r"stream\(\) has no option 'progress'"),
    "beam_search": (([5], None), {"beam_width": 2}, r"beam_search\(\) has no option 'beam_width'"),
    "encode": (([5],), {"dimensions": 2}, r"give it as pooling_params=PoolingParams\(dimensions=...\)"),
    "embed": (([5],), {"use_tqmd": False}, "did you mean 'use_tqdm'"),
    "classify": (([5],), {"lora": None}, r"classify\(\) has no option 'lora'"),
    "add_lora": ((None,), {"name": "a"}, r"add_lora\(\) has no option 'name'"),
}


@pytest.mark.parametrize("method", METHODS)
def test_no_method_swallows_an_option(method: str, llm: LLM) -> None:
    args, options, message = METHODS[method]
    with pytest.raises(RequestError, match=message):
        getattr(llm, method)(*args, **options)
    with pytest.raises(RequestError, match=r"give it as sampling_params=SamplingParams\(temperature=...\)"):
        llm.generate([5], temperature=0)  # type: ignore[call-arg]


class Bar:
    """As much of tqdm as is used."""

    made: list[Bar]

    def __init__(self, total: int, **_: Any) -> None:
        self.total, self.done, self.closed = total, 0, False
        Bar.made.append(self)

    def update(self, count: int) -> None:
        self.done += count

    def close(self) -> None:
        self.closed = True


def test_use_tqdm_shows_a_bar_hides_it_or_makes_it(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    Bar.made = []
    llm.generate([[5], [6], [7]], SHORT, use_tqdm=Bar)
    llm.chat(HI, SHORT, use_tqdm=Bar)
    assert [(bar.total, bar.done, bar.closed) for bar in Bar.made] == [(3, 3, True), (1, 1, True)]
    assert capsys.readouterr().err == ""
    llm.generate([5], SHORT, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate([5], SHORT, use_tqdm=True)
    assert capsys.readouterr().err  # drawn, though nobody looks


def test_a_bar_that_fails_leaves_no_request_over(llm: LLM) -> None:
    def broken(**_: Any) -> Any:
        raise OSError("no terminal")

    with pytest.raises(OSError, match="no terminal"):
        llm.generate([[5], [6]], SHORT, use_tqdm=broken)
    assert not llm.engine.has_work


# ---- contents


@pytest.mark.parametrize("name", TEXTS)
def test_a_template_of_texts_gets_the_parts_joined(name: str, llm: LLM) -> None:
    parts: Any = [{"type": "text", "text": "one"}, "two", {"type": "text", "text": "three"}]
    for content in (parts, tuple(parts)):
        asked = [{"role": "user", "content": content}]
        joined = [{"role": "user", "content": "one\ntwo\nthree"}]
        assert prompt(llm, asked, chat_template=TEXTS[name]) == prompt(llm, joined, chat_template=TEXTS[name])
    assert "one" in prompt(llm, asked)
    assert "{" not in prompt(llm, asked)


@pytest.mark.parametrize("name", PARTS)
def test_a_template_of_parts_gets_parts_also_for_a_text(name: str, llm: LLM) -> None:
    text = prompt(llm, HI, chat_template=PARTS[name])
    assert "hi" in text
    assert text == prompt(
        llm, [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], chat_template=PARTS[name]
    )


def test_the_format_of_contents_can_be_named(llm: LLM) -> None:
    repr_of_parts = "{% for m in messages %}{{ m.content }}{% endfor %}"
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert prompt(llm, parts, chat_template=repr_of_parts) == "hi"
    assert "'type'" in prompt(llm, parts, chat_template=repr_of_parts, chat_template_content_format="openai")
    assert prompt(llm, parts, chat_template=EITHER, chat_template_content_format="string") == "user: hi\n"


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("{% set rest = messages[1:] %}{% for m in rest %}{% for c in m.content %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m['content'] %}{% for c in content %}{% endfor %}{% endfor %}", True),
        ("{% for i in range(2) %}{% set m = messages[i] %}{% for c in m.content|list %}{% endfor %}{% endfor %}", True),
        ("{% set ns.m = messages %}{% for m in ns.m %}{% for c in m.content %}{% endfor %}{% endfor %}", True),
        ("{{ messages[-1].content|selectattr('type', 'equalto', 'text')|map(attribute='text')|join }}", True),
        ("{% for m in messages %}{% for call in m.tool_calls %}{{ m.content }}{% endfor %}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content.split('x')[-1]|trim }}{% endfor %}", False),
        ("{% macro a(content) %}{{ content }}{% endmacro %}{{ a(messages[0].content) }}", False),
    ],
)  # fmt: skip
def test_loops_over_a_content_tell_a_template_of_parts(template: str, parts: bool) -> None:
    from slotline.text.template import chat_template

    assert chat_template(template).parts is parts


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ({"role": "user", "content": "hi"}, "messages is one message and no list"),
        (5, "messages=5 is no list of messages"),
        (None, "messages=None is no list of messages"),
        ("hi", "messages='hi' is no list of messages"),
        (b"hi", "is no list of messages"),
        (np.array(5), r"messages=array\(5\) is no list of messages"),
        ([], "no messages"),
        ([[]], "no messages"),
        ([HI, 5], "conversation 1=5 is no list of messages"),
        ([HI, HI[0]], "conversation 1 is one message and no list"),
        (["hi"], "conversation 0='hi' is no list"),
        ([HI[0], 5], "message 1 is no mapping: 5"),
        ([{"content": "hi"}], "message 0 has role=None"),
        ([{"role": 5, "content": "hi"}], "message 0 has role=5"),
        ([{"role": "user", "content": 5}], "content=5, which is neither text nor a list of parts"),
        ([{"role": "user", "content": {"type": "text", "text": "hi"}}], "is neither text nor a list of parts"),
        ([{"role": "user", "content": [5]}], "5 is no part of a content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a text part has text=None"),
        (
            [{"role": "user", "content": [{"type": "txt", "text": "hi"}]}],
            "type 'txt' cannot be read; did you mean 'text'",
        ),
        ([{"role": "user", "content": [{"type": ["text"], "text": "hi"}]}], "cannot be read"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "type 'image' cannot"),
        ([{"role": "user", "content": [{"type": "image", "image": 1}]}], "takes parts of type text"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, message: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(messages, SHORT)
    assert not llm.engine.has_work


def test_what_a_template_cannot_see_is_named_by_its_type(llm: LLM) -> None:
    class Loud:
        def __repr__(self) -> str:
            raise ValueError("no")

    template = "{{ messages[0].extra }} {{ messages[0].number }}"
    asked = [{"role": "user", "content": "hi", "extra": Loud(), "number": np.int64(3)}]
    assert prompt(llm, asked, chat_template=template) == "<Loud> 3"
    inner: list[Any] = []
    inner.append(inner)
    with pytest.raises(RequestError, match="nested more than 200 levels"):
        llm.chat([{"role": "user", "content": "hi", "extra": inner}])
    with pytest.raises(RequestError, match="<Loud, whose repr raises ValueError>"):
        llm.chat(Loud())  # type: ignore[arg-type]


@pytest.mark.parametrize("template", [LLAVA, "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"])
def test_images_of_a_conversation_have_placeholders_in_either_form(
    template: str, tiny_vision_model: Callable[..., Any], engines: Engines
) -> None:
    from tests.llm.test_multimodal import image

    llm = engines(tiny_vision_model())
    part = {"type": "image", "image": image(4)}
    for content in ([part, {"type": "text", "text": "what?"}], [{"type": "text", "text": "<image> what?"}, part]):
        if template == LLAVA and "<image>" in str(content[0]):
            continue
        (output,) = llm.chat([{"role": "user", "content": content}], SHORT, chat_template=template)
        assert output.outputs[0].finish_reason == "length"
    with pytest.raises(RequestError, match="a part of type 'image' has no image"):
        llm.chat([{"role": "user", "content": [{"type": "image", "link": "x"}]}], chat_template=template)
    with pytest.raises(SlotlineError, match="takes parts of type text, image"):
        llm.chat([{"role": "user", "content": [{"type": "video", "video": 1}]}], chat_template=template)


# ---- templates that do not come to an end

ENDLESS = {
    "loops in loops": ("{% for a in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3, "too many steps"),
    "a filter in a loop": (
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "steps",
    ),
    "macros": (
        "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "too many steps",
    ),
    "recursive loops": (
        "{% for i in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
        "too many steps",
    ),
    "itself": ("{% macro m(n) %}{{ m(n+1) }}{% endmacro %}{{ m(0) }}", "RecursionError"),
    "a long range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "a text doubled": (
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "longer than",
    ),
    "a text added": (
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "longer than",
    ),
    "a text multiplied": ("{{ 'a' * 10**11 }}", "longer than"),
    "a constant": ("{% if 'a' * 100000000000 %}x{% endif %}", "longer than"),
    "a power": ("{% set x = 10 ** 1000000000 %}", "bits"),
    "a width": ("{{ '%1000000000d' % 1 }}", "width"),
    "a field's width": ("{{ '{:1000000000}'.format(1) }}", "width"),
    "a method's width": ("{{ 'a'.center(10000000000) }}", "longer than"),
    "a filter's width": ("{{ 'a'|center(10000000000) }}", "longer than"),
    "many references": ("{% set x = 'a' * 10000000 %}{{ ([x] * 100000)|join }}", "longer than"),
    "many texts": ("{% set x = 'a' * 10000000 %}{{ ([x] * 100000)|map('upper')|list|length }}", "longer than"),
    "a list printed": ("{% set x = 'a' * 10000000 %}{{ [x] * 100000 }}", "longer than"),
    "a replacement": ("{{ ('a' * 10000000).replace('a', 'b' * 10000000) }}", "longer than"),
    "its own text": ("{% for i in range(99999) %}" + "y" * 100000 + "{% endfor %}", "longer than"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_stopped(name: str, llm: LLM) -> None:
    template, message = ENDLESS[name]
    with pytest.raises(RequestError, match=f"the chat template .*{message}"):
        llm.chat(HI, chat_template=template)


def test_a_long_conversation_is_no_loop_without_end(tokenizer: Tokenizer) -> None:
    from slotline.text.template import ChatOptions

    talk = [{"role": role, "content": "word " * 100} for _ in range(1000) for role in ("user", "assistant")]
    for template in (QWEN, STRICT):
        wanted = theirs(tokenizer, talk, chat_template=template)
        options = ChatOptions(chat_template=template, add_generation_prompt=False)
        assert tokenizer.decode(tokenizer.chat_prompt(talk, options)) == wanted


def test_a_loop_of_lists_reads_texts_of_both_forms(llm: LLM) -> None:
    assert prompt(llm, HI, chat_template=LISTS) == "user: hi|"
