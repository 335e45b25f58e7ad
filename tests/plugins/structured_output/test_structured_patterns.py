"""Expressions in schemas: a plugin refuses one, or every text that it lets through is JSON and matches it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from structured_texts import PLUGINS, Texts

from slotline.plugins.structured_output.regex import misread
from slotline.registry.errors import RequestError

pytestmark = pytest.mark.behaviour(102)

PATTERNS = (
    *('^a"b$', r"^a\\b$", r"^\S+$", "^.+$", "^[^x]+$", r"^\W$", r"^\D$", r"^\s$", r"^\x22$", r"^\u0022$", r"^\x5c$"),
    *(r"^\n$", r"^[\t]$", r"^[\x00-\x7f]$", '^["a]$', "^[!-/]$", '^[^"]$', r"^[^\\]$", r'^[^"\\]{1,3}$', r"^[\]\\]$"),
    *("^\x01$", "^\t$", r"^\f$", "^[\x01-\x10]$", r"^[\s\S]$", '"', "^é.$", "^[^é]+$", r"^é\S$", "^日|[^a]$", r"^\é.$"),
    *("^[à-ü]+$", "^[^]$", '^("|a)$', '^(?:"|[^b])$', r"^[^\n\"]$", r"^[\x00-\x1f]|a$", r"^\w+é?$", '^[^😀"]$'),
    *('^(?=").$', "^(?!a).$", "a$b|c", "^x(^a)|b$", r"^\P{P}$", r'^[^\p{L}"]$'),
)
IN_PYTHON = {
    r"^\P{P}$": r'^[^"\\]$',
    r'^[^\p{L}"]$': r'^[^a-zA-Zéà日"]$',
    "^[^]$": r"^[\s\S]$",
    r"^\é.$": "^é.$",
    r"^\W$": "^[^A-Za-z0-9_]$",
}
PIECES = (
    *map(chr, range(128)),
    *(
        "",
        "é",
        "à",
        "日",
        "😀",
        'a"b',
        r"a\b",
        '""',
        r"\"",
        r"\n",
        r"\t",
        r"\u0022",
        r"\u005c",
        r"\u0001",
        r"\b",
        r"\f",
    ),
    *(r"\r", r"\/", r"a\"b", r"a\\b", r"\\", r"\x", 'é"', "é\\", "é\n", "éa", "aa", "xa", "ab", "c"),
)
STRING: Callable[[str], Any] = lambda pattern: {"type": "string", "pattern": pattern}  # noqa: E731
PLACES: dict[str, tuple[Callable[[str], Any], str]] = {
    "string": (STRING, '"{}"'),
    "name": (
        lambda pattern: {
            "type": "object",
            "patternProperties": {pattern: {"type": "null"}},
            "additionalProperties": False,
        },
        '{{"{}": null}}',
    ),
    "names": (lambda pattern: {"type": "object", "propertyNames": STRING(pattern)}, '{{"{}": null}}'),
    "nested": (
        lambda pattern: {
            "type": "array",
            "items": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]},
            "$defs": {"a": STRING(pattern)},
        },
        '["{}"]',
    ),
    "beside a length": (
        lambda pattern: {"type": "array", "prefixItems": [STRING(pattern), {"type": "string", "maxLength": 2}]},
        '["{}"]',
    ),
}


def innermost(value: Any) -> str:
    """The string that a text of `PLACES` holds."""
    while not isinstance(value, str):
        value = next(iter(value))
    return value


@pytest.fixture(scope="module", params=PLUGINS)
def texts(request: pytest.FixtureRequest) -> Texts:
    return Texts(request.param)


def matches(pattern: str, text: str) -> bool:
    return re.search(IN_PYTHON.get(pattern, pattern), text) is not None


@pytest.mark.parametrize("place", PLACES)
def test_every_text_of_an_expression_is_json_and_matches_it(place: str, texts: Texts) -> None:
    schema, form = PLACES[place]
    taken = 0
    for pattern in PATTERNS:
        try:
            grammar = texts.compiled(json=schema(pattern))
        except RequestError:
            continue
        for piece in PIECES:
            text = form.format(piece)
            if texts.follows(grammar, text):
                taken += 1
                assert matches(pattern, innermost(json.loads(text))), (pattern, text)
    assert taken > 300 or (texts.plugin, place) == ("llguidance", "names")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (STRING('^a"b$'), "at #: XGrammar does not enforce pattern .* characters that JSON writes as escapes"),
        ({"properties": {"a": STRING(r"\\")}, "type": "object"}, "at #/properties/a: .* JSON writes as escapes"),
        ({"type": "array", "items": STRING("^\t$")}, "at #/items: .* JSON writes as escapes"),
        (STRING("^(?!a)b$"), "at position 1: what stands around is not looked at"),
        (STRING("^a(b$|c)d"), "an anchor is in the middle"),
        ({"type": "string", "format": "relative-json-pointer"}, "format 'relative-json-pointer'"),
    ],
)
def test_xgrammar_s_expressions_are_refused_with_their_place_and_cause(schema: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        Texts("xgrammar").compiled(json=schema)
    assert "llguidance" in refused.value.fix


def test_a_quotation_mark_that_a_class_leaves_out_is_not_escaped_either() -> None:
    texts = Texts("llguidance")
    for pattern in ('^[^"]*$', r"^[^\\/:*?\"<>|]+$", r'^(a|[^"]){1,3}$'):
        grammar = texts.compiled(json=STRING(pattern))
        assert texts.follows(grammar, '"a-é"')
        assert not texts.follows(grammar, r'"a\""')
    with pytest.raises(RequestError, match=r"patternProperties .* that a class in it leaves out"):
        texts.compiled(json={"type": "object", "patternProperties": {'^[^"]$': {}}})


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("^a|b$", False), ("(^|,)a(,|$)", False), (r"[$^]\$a\^", False), ("(?:a$|(?<n>b))", False), ("(^a)b", False),
        ("a^b", True), ("a$b", True), ("(a$)b", True), ("x(^a)", True), ("((a$)|b)c", True), ("(a$)+", True),
        ("(?=a)b", True), ("a(?<!b)", True),
    ],
)  # fmt: skip
def test_anchors_and_assertions_that_an_engine_would_leave_out_are_found(expression: str, wrong: bool) -> None:
    assert (misread(expression) is not None) == wrong
