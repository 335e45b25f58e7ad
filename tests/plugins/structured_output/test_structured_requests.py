"""Structured output from admission to compiled grammar: what is refused, what waits, what fails alone."""

from __future__ import annotations

import faulthandler
import functools
import json
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import SUPPORT

from slotline.core import LLM, SamplingParams, StructuredOutputsParams
from slotline.planner.plan import SMALL_MODEL
from slotline.plugins.structured_output.json_schema import refuse
from slotline.plugins.structured_output.regex import shortest
from slotline.registry.errors import NegotiationError, PluginError, PluginNotFoundError, RequestError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(102)]

Engines = Callable[..., LLM]
WAYWARD = f"{SUPPORT / 'structured_cases.py'}:Wayward"
MODES: dict[str, dict[str, Any]] = {
    "plain": {"scheduler.async": False},
    "asynchronous": {"scheduler.async": True},
    "drafted": {"drafter.name": "ngram", "drafter.tokens": 4},
    "overlapped": {"drafter.name": "eagle3", "drafter.tokens": 4, "scheduler.async": True},
}
FREE = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def choice(*texts: str, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=texts), **settings)


def wayward(engines: Engines, mode: str = "plain", **settings: Any) -> LLM:
    named = {"plugins.inline": (WAYWARD,), "structured_output.backend": "wayward"}
    return engines(None, **{**named, **MODES[mode], **settings})


# --- what is refused


WRONG: dict[str, dict[str, Any]] = {
    "no constraint": {},
    "two constraints": {"regex": "a", "choice": ["a"]},
    "no choices": {"choice": []},
    "a choice that is no text": {"choice": [1]},
    "a choice that is a text": {"choice": "yes"},
    "a schema that is no JSON": {"json": {"a": object()}},
    "a number for an expression": {"regex": 3},
    "a flag that is no flag": {"json_object": "no"},
    "white space by a word": {"json_object": True, "disable_any_whitespace": "no"},
    "half a character in a choice": {"choice": ["a\ud800"]},
    "half a character in a schema": {"json": {"const": "a\ud800"}},
    "text nested too deeply": {"json": "[" * 100_000},
    "text that plugins would take long for": {"json": '{"items":' * 100 + "{}" + "}" * 100},
    "a mapping nested too deeply": {"json": functools.reduce(lambda inner, _: {"items": inner}, range(5000), {})},
}


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG)
def test_parameters_that_say_nothing_or_too_much_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        StructuredOutputsParams(**given)


def test_json_text_is_refused_with_line_and_column() -> None:
    with pytest.raises(RequestError, match="line 2, column 11: Expecting value"):
        StructuredOutputsParams(json='{\n  "type": }')


def test_parameters_of_another_class_are_refused() -> None:
    with pytest.raises(RequestError, match="must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


NESTED = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "strin"}}}}
TAGGED = {"structures": [{"begin": "<f>", "schema": NESTED, "end": "</f>"}], "triggers": ["<f"]}
PLUGINS = ("xgrammar", "llguidance")
REPEATED = {"type": "string", "pattern": "^(a{200}){200}$"}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("xgrammar", {"json": NESTED}, "at #/properties/a/items: .*'strin'"),
    ("llguidance", {"json": NESTED}, "at #/properties/a/items: .*strin"),
    ("xgrammar", {"json": {"anyOf": [{"type": "null"}, {"not": {}}]}}, "at #/anyOf/1: XGrammar does not enforce not"),
    ("llguidance", {"json": {"anyOf": [{"type": "null"}, {"not": {}}]}}, "at #/anyOf/1: .*not"),
    ("xgrammar", {"json": {"$defs": {"a/b": {"type": "string", "pattern": "(x"}}, "$ref": "#/$defs/a~1b"}}, "a~1b: "),
    ("llguidance", {"json": {"$defs": {"a/b": {"type": "string", "pattern": "(x"}}, "$ref": "#/$defs/a~1b"}}, "a~1b: "),
    ("xgrammar", {"json": {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}}, "at #/properties/a: "),
    ("llguidance", {"json": {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}}, "at #/properties/a: "),
    ("xgrammar", {"regex": "ab(c"}, r"regex='ab\(c': .* position 5"),
    ("llguidance", {"regex": "ab(c"}, r"regex='ab\(c': at position 2: unclosed group"),
    ("xgrammar", {"regex": "a{2,1}"}, "position 2: min repeat"),
    ("llguidance", {"regex": "a{2,1}"}, "position 1: invalid repetition"),
    ("xgrammar", {"grammar": 'root ::= "a\nb ::= "c"'}, "line 1, column 1[0-9]"),
    ("llguidance", {"grammar": 'root := "a"'}, "line 1"),
    ("xgrammar", {"structural_tag": {"structures": [{"begin": "<a>"}], "triggers": ["<"]}}, "#/structures/0: begin"),
    ("llguidance", {"structural_tag": {"type": "structural_tag"}}, "needs structures and triggers"),
    (
        "xgrammar",
        {"structural_tag": {"structures": [{"begin": "<a>", "schema": {}, "end": "x"}], "triggers": ["["]}},
        "begins with no trigger",
    ),
    ("xgrammar", {"structural_tag": {"structures": 5, "triggers": ["<"]}}, "structures is no list"),
    (
        "llguidance",
        {"structural_tag": {"structures": [{"begin": 5, "schema": {}, "end": "x"}], "triggers": ["["]}},
        "#/structures/0: begin or end is no text",
    ),
    ("xgrammar", {"structural_tag": TAGGED}, "structural_tag at #/structures/0/schema/properties/a/items: .*'strin'"),
    ("llguidance", {"structural_tag": TAGGED}, "structural_tag at #/structures/0/schema/properties/a/items: .*strin"),
    *((plugin, {"regex": "((a{1000}){1000}){1000}"}, "1,000,000,000 characters") for plugin in PLUGINS),
    *(
        (plugin, {"json": {"properties": {"a": REPEATED}, "type": "object"}}, "#/properties/a: pat")
        for plugin in PLUGINS
    ),
    ("llguidance", {"json": {"type": "object", "patternProperties": {"^(a{200}){200}$": {}}}}, "at #: .* 40,000 char"),
    *(
        ("xgrammar", {"grammar": grammar}, "is a repetition of itself and matches no text")
        for grammar in (
            "root ::= root{1,3}",
            'root ::= "a"\np ::= (p){2,}',
            "root ::= p\np ::= (q){1,3}\nq ::= (r){2,4}\nr ::= (p){0,1}",
        )
    ),
]


@pytest.mark.parametrize(("plugin", "given", "message"), REFUSED)
def test_a_wrong_constraint_is_refused_with_its_place(
    plugin: str, given: dict[str, Any], message: str, engines: Engines
) -> None:
    llm = engines(None, **{"structured_output.backend": plugin})
    with pytest.raises(RequestError, match=message):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(**given)))
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("expression", "length"),
    [
        ("", 0),
        ("a|bc", 1),
        ("(ab|c)+x?", 1),
        ("a{2}{3}", 6),
        ("(a(b|c{4}){5}){6}", 36),
        (r"\(a{2}\)", 4),
        (r"^\bab$", 2),
        (r"\d{3,5}-[^]a]{2}\.", 7),
        (r"(?i)(?P<x>ab){2,}?c*", 4),
        ("[a-z]{1,20}(?:, [a-z]){3}", 10),
        (r"\p{L}{3}\x41\u0041", 5),
        ("[[:alpha:]]{7}", 7),
    ],
)
def test_the_shortest_text_of_an_expression_is_measured(expression: str, length: int) -> None:
    assert shortest(expression) == length


@pytest.mark.parametrize("expression", ["a{10000}", "[a-z ]{0,100000}", "([a-z]{1,20}, ){1,5000}"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_long_expressions_that_ask_for_little_are_taken(plugin: str, expression: str, engines: Engines) -> None:
    llm = engines(None, **{"structured_output.backend": plugin})
    asked = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex=expression))
    assert llm.generate("x", asked)[0].outputs[0].finish_reason == "length"


def test_a_grammar_that_forces_very_much_is_refused_while_it_compiles(engines: Engines) -> None:
    llm = engines(None, **{"structured_output.backend": "llguidance"})
    backend = llm.engine.extension("structured_output").compiler.backend
    grammar = 'root ::= a{%d}\na ::= b{20}\nb ::= "c"{50}'
    backend.compile(StructuredOutputsParams(grammar=grammar % 10).constraint)
    with pytest.raises(RequestError, match="the same 11,000 bytes, more than 10,000"):
        backend.compile(StructuredOutputsParams(grammar=grammar % 11).constraint)


XGRAMMAR_WOULD_IGNORE: list[dict[str, Any]] = [
    {"type": "array", "uniqueItems": True},
    {"type": "number", "multipleOf": 3},
    {"type": "array", "contains": {"const": 1}},
    {"allOf": [{"type": "string"}, {"minLength": 3}]},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"if": {"type": "integer"}, "then": {"minimum": 3}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "string", "pattern": "^a+$", "minLength": 3},
    {"type": "object", "properties": {"a": {}}, "required": ["b"]},
    {"minimum": 3},
    {"$ref": "https://example.org/schema.json"},
    {"type": "object", "properties": {"a": {"$ref": "#anchor"}}, "$defs": {"b": {"$anchor": "anchor"}}},
    {"enum": [1, "a"], "type": "string"},
    {"type": "integer", "multipleOf": 3, "minimum": 5},
    {"anyOf": [{"type": "integer"}, {"type": "string"}], "minimum": 4},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}, "minimum": 3},
]


@pytest.mark.parametrize("schema", XGRAMMAR_WOULD_IGNORE, ids=json.dumps)
def test_what_xgrammar_would_leave_out_without_a_word_is_refused(schema: dict[str, Any], engines: Engines) -> None:
    llm = engines(None, **{"structured_output.backend": "xgrammar"})
    with pytest.raises(RequestError, match="XGrammar does not enforce"):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))


def test_the_wrong_part_is_found_beside_references_with_no_more_than_it_needs() -> None:
    definitions = {f"d{i}": {"type": "object", "properties": {"a": {"type": "string"}}} for i in range(200)}
    definitions["d7"] = {"anyOf": [{"$ref": "#/$defs/d8"}, {"type": "null"}]}
    schema = {
        "type": "object",
        "properties": {"x": {"type": "string"}, "y": {"$ref": "#/properties/x"}, "z": {"$ref": "#/$defs/d7"}},
        "anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(200)],
        "$defs": {**definitions, "wrong/one": {"items": {"type": "strin"}}},
    }
    seen: list[Any] = []

    def refusal(text: str) -> str | None:
        seen.append(json.loads(text))
        return "no such type" if "strin" in text.replace("string", "") else None

    with pytest.raises(RequestError, match=r"^here #/[$]defs/wrong~1one/items: no such type"):
        refuse(json.dumps(schema), refusal, "correct it", "here #")
    assert max(len(part.get("$defs", {})) for part in seen[1:]) <= 2
    del schema["$defs"]["wrong/one"]
    schema["properties"]["w"] = {"$ref": "#/$defs/nowhere"}

    def misses(text: str) -> str | None:
        parts = json.loads(text)
        return "it is missing" if "nowhere" in text and "nowhere" not in parts.get("$defs", {}) else None

    with pytest.raises(RequestError, match=r"^here #/properties/w: it is missing"):
        refuse(json.dumps(schema), misses, "correct it", "here #")


def test_a_kind_of_constraint_that_the_plugin_does_not_take_is_refused(engines: Engines) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.regex: the plugin 'wayward' does not take it"):
        wayward(engines).generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))


def test_where_no_plugin_can_be_used_the_plan_and_the_refusal_say_why(engines: Engines) -> None:
    blocked = ("structured_output:xgrammar", "structured_output:llguidance")
    llm = engines(None, **{"plugins.block": blocked})
    setting = next(s for s in llm.plan.settings if s.key == "structured_output.backend")
    assert setting.resolved == "none"
    assert "xgrammar: " in setting.origin
    with pytest.raises(RequestError, match=r"structured_outputs cannot be had: auto: llguidance: (.|\n)*slotline\[str"):
        llm.generate("x", choice("a"))


def test_a_plugin_whose_package_is_missing_is_passed_over_with_the_remedy(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slotline.plugins.structured_output.xgrammar.find_spec", lambda name: None)
    llm = LLM(max_model_len=64, memory="4MiB")
    setting = next(s for s in llm.plan.settings if s.key == "structured_output.backend")
    assert setting.resolved == "llguidance"
    assert "xgrammar: the package xgrammar is not installed; `pip install 'slotline[structured]'`" in setting.origin
    with pytest.raises(NegotiationError, match="not installed"):
        LLM(**{"structured_output.backend": "xgrammar"})


def test_a_plugin_that_fails_while_it_checks_is_a_typed_error_and_the_engine_goes_on(engines: Engines) -> None:
    llm = wayward(engines)
    with pytest.raises(PluginError, match=r"'wayward' failed on structured_outputs.choice: ValueError: cannot check"):
        llm.generate("def f(", choice("no check"))
    assert not llm.engine.has_work
    assert llm.generate("def f(", choice("yes"))[0].outputs[0].text == "yes"


def test_a_plugin_that_is_not_there_is_an_error() -> None:
    with pytest.raises(PluginNotFoundError, match="xgrammer"):
        LLM(**{"structured_output.backend": "xgrammer"})


def test_a_plugin_that_cannot_be_built_is_an_error_with_its_cause(engines: Engines) -> None:
    inline = {"plugins.inline": (WAYWARD.replace(":Wayward", ":Unbuildable"),)}
    message = "structured_output:unbuildable of .* cannot be built for this model: ValueError: no such vocabulary"
    with pytest.raises(PluginError, match=message):
        LLM(**inline, **{"structured_output.backend": "unbuildable"})
    llm = engines(None, **inline)
    assert llm.engine.extension("structured_output").name == "unbuildable"
    with pytest.raises(PluginError, match=message):
        llm.generate("x", choice("a"))
    assert not llm.engine.has_work


def test_a_model_without_a_tokenizer_has_no_structured_output(tmp_path: Path) -> None:
    shutil.copytree(SMALL_MODEL, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tokenizer*"))
    llm = LLM(tmp_path, max_model_len=64, memory="4MiB")
    with pytest.raises(RequestError, match="structured_outputs cannot be had: the model has no tokenizer"):
        llm.generate([[5, 6, 7]], choice("a"))


@pytest.mark.parametrize("eos_token_id", [None, 5000])
def test_a_model_without_an_end_of_sequence_token_has_no_structured_output(
    eos_token_id: int | None, tmp_path: Path
) -> None:
    shutil.copytree(SMALL_MODEL, tmp_path, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps({**settings, "eos_token_id": eos_token_id}))
    llm = LLM(tmp_path, max_model_len=64, memory="4MiB")
    with pytest.raises(RequestError, match="the model names no end-of-sequence token"):
        llm.generate([[5, 6, 7]], choice("a"))


def test_none_is_honoured(engines: Engines) -> None:
    llm = engines(None, **{"structured_output.backend": "none"})
    with pytest.raises(RequestError, match=r'structured_output\.backend = "none"'):
        llm.generate("x", choice("a"))


# --- what waits


@pytest.mark.parametrize("mode", MODES)
def test_a_request_waits_for_its_grammar_and_the_others_do_not(mode: str, engines: Engines) -> None:
    llm = wayward(engines, mode)
    gate = llm.engine.extension("structured_output").compiler.backend.gates["held"] = threading.Event()
    engine = llm.engine
    held = engine.add("held", [1, 2, 3], choice("held back", "held up"))
    other = engine.add("other", [1, 2, 3], FREE)
    quick = engine.add("quick", [1, 2, 3], choice("quick"))
    while not (other.finished and quick.finished):
        engine.step()
    assert held.row < 0
    assert quick.text == "quick"
    gate.set()
    while engine.has_work:
        engine.step()
    assert held.text in ("held back", "held up")
    assert held.finish_reason == "stop"


@pytest.mark.parametrize("plugin", ["xgrammar", "llguidance"])
def test_one_of_thousands_of_choices_that_begin_alike(plugin: str, engines: Engines) -> None:
    llm = engines(None, **{"structured_output.backend": plugin})
    texts = [f"a{number}" for number in range(3000)]
    (output,) = llm.generate("a = ", choice(*texts))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text in texts


@pytest.mark.parametrize(
    ("wanted", "cause"),
    [
        ({"regex": r"[^\s\S]"}, "RequestError: no text fits structured_outputs"),
        ({"json": {"$ref": "#"}}, "RequestError: no text fits structured_outputs"),
        ({"grammar": 'root ::= "a" root'}, "RequestError: structured_outputs.grammar: every text begins with the same"),
    ],
)
def test_what_llguidance_cannot_go_on_with_ends_its_request_with_its_own_words(
    wanted: dict[str, Any], cause: str, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    llm = engines(None, **{"structured_output.backend": "llguidance"})
    asked = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(**wanted))
    with caplog.at_level(logging.CRITICAL):
        wrong, free = (output.outputs[0] for output in llm.generate([[5, 6, 7]] * 2, [asked, FREE]))
    assert wrong.finish_reason == "error"
    assert str(wrong.stop_reason).startswith(cause)
    assert free.token_ids == llm.generate([[5, 6, 7]], FREE)[0].outputs[0].token_ids


def test_a_grammar_that_forces_text_without_an_end_does_not_hold_the_engine(engines: Engines) -> None:
    """llguidance 1.9.1 does not come back from the mask behind ``baba`` where it looks for forced text."""
    llm = engines(None, **{"structured_output.backend": "llguidance"})
    backend = llm.engine.extension("structured_output").compiler.backend
    rules = 'root ::= (("a" | p) | s) (q s | [ \\n])\np ::= ([b-dx])*\nq ::= (("b" | "ab")){1,3} s\ns ::= ("c")+'
    state = backend.start(backend.compile(StructuredOutputsParams(grammar=rules).constraint))
    tokens = llm.tokenizer.transformers.encode("baba", add_special_tokens=False)
    faulthandler.dump_traceback_later(60, exit=True)  # it cannot be interrupted
    try:
        assert state.accept(tokens) == len(tokens)
        bitmask = np.zeros((1, -(-llm.engine.limits.vocab_size // 32)), np.int32)
        backend.fill([state], [[]], [0], bitmask)
        assert bitmask.any()
        asked = SamplingParams(
            max_tokens=8, structured_outputs=StructuredOutputsParams(grammar='root ::= [xy] m\nm ::= "a" m')
        )
        assert llm.generate([[5, 6, 7]], asked)[0].outputs[0].finish_reason == "length"
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(engines: Engines) -> None:
    llm = wayward(engines)
    gate = llm.engine.extension("structured_output").compiler.backend.gates["slow"] = threading.Event()
    llm.engine.add("slow", [1, 2, 3], choice("slow one"))
    assert llm.engine.abort("slow").finish_reason == "abort"
    gate.set()
    assert not llm.engine.has_work
    assert llm.generate([[1, 2, 3]], choice("slow one"))[0].outputs[0].text == "slow one"


def test_equal_constraints_are_compiled_once_and_the_least_recent_is_forgotten(engines: Engines) -> None:
    llm = wayward(engines, **{"structured_output.cached_grammars": 2})
    backend = llm.engine.extension("structured_output").compiler.backend
    for texts in (("a",), ("a",), ("b",), ("a",), ("c",), ("a",), ("b",)):
        llm.generate([[1, 2, 3]] * 2, choice(*texts))
    assert backend.compiled == backend.checked == ['["a"]', '["b"]', '["c"]', '["b"]']


# --- what fails alone


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("uncompilable", "RequestError: line 1, column 7: too hard"),
        ("no start", "ValueError: cannot start"),
        ("no mask", "ValueError: cannot fill"),
        ("all ones", "ContractError: structured-output plugin 'wayward' let token"),
    ],
)
def test_a_request_whose_grammar_goes_wrong_ends_alone(
    text: str, cause: str, mode: str, engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    llm = wayward(engines, mode)
    with caplog.at_level(logging.CRITICAL):
        outputs = llm.generate([[5, 6, 7]] * 3, [choice(text), choice("right"), FREE])
    wrong, right, free = (o.outputs[0] for o in outputs)
    assert wrong.finish_reason == "error"
    assert str(wrong.stop_reason).startswith(cause)
    assert (right.text, right.finish_reason) == ("right", "stop")
    assert free.token_ids == llm.generate([[5, 6, 7]], FREE)[0].outputs[0].token_ids
