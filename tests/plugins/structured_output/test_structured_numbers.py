"""Bounds of numbers: a plugin refuses a schema, or lets through no number outside them and no text that is none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import product
from random import Random
from typing import Any

import pytest
from structured_texts import PLUGINS, Texts

from slotline.core import StructuredOutputsParams
from slotline.registry.errors import RequestError

pytestmark = pytest.mark.behaviour(102)

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
POINTS = ("-12.75", "-3.5", "-3", "-1", "-0.5", "-0.001", "-0.0", "0", "0.001", "0.25", "0.5", "1", "3", "3.5", "12.75")
LARGE = tuple(str(2**53 + i) for i in range(-1, 4)) + tuple(str(-(2**60) + i) for i in (-129, 0, 1, 129))
TEXTS = sorted(
    {"", "-", "00", "01", "-01", "+1", ".5", "5.", "1e", "-0", "-0.0", "0.00", "0e0", "-0E1", "1e0", "10e-1", "5e-1"}
    | {"-5e-1", "1e2", "1.50", "0.50", "0.49999", "0.50001", "-0.49999", "-0.50001", "0.0000001", "2.999", "3.001"}
    | {"3.4999", "3.5001", "12.7499", "12.7501", "-12.7499", "-12.7501", "-2.999", "-3.001", "0.0005", "0.0015"}
    | {"0.3", "0.30000000000000003", "0.30000000000000004", "0.30000000000000005", "0.1234567890123456789"}
    | {str(i) for i in range(-14, 15)} | {f"{i / 10:.1f}" for i in range(-40, 41)} | {*LARGE, *POINTS}
)  # fmt: skip
TESTS = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
    "multipleOf": lambda value, step: (value / step).denominator == 1,
    "type": lambda value, name: name == "number" or value.denominator == 1,
}


def exact(text: str) -> Fraction | None:
    """Return the number that a text of JSON is; None if it is none."""
    return Fraction(Decimal(text)) if NUMBER.fullmatch(text) else None


def allows(schema: Mapping[str, Any], value: Fraction | None) -> bool:
    """Return whether a schema of numbers allows one, without any rounding."""
    if value is None:
        return False
    if "allOf" in schema:
        return all(allows(part, value) for part in schema["allOf"])
    return all(
        TESTS[key](value, limit if key == "type" else Fraction(Decimal(str(limit)))) for key, limit in schema.items()
    )


VALUES = {text: exact(text) for text in TEXTS}


def wrong_texts(texts: Texts, schema: Mapping[str, Any]) -> list[str] | None:
    """Return the texts that a plugin takes and the schema does not allow; None where it refuses the schema."""
    try:
        grammar = texts.compiled(json=json.dumps(schema, default=float))
    except RequestError:
        return None
    return [text for text in TEXTS if texts.follows(grammar, text) and not allows(schema, VALUES[text])]


@pytest.fixture(scope="module", params=PLUGINS)
def texts(request: pytest.FixtureRequest) -> Texts:
    return Texts(request.param)


@pytest.mark.spread(1)
def test_no_number_outside_of_its_bounds_is_let_through(texts: Texts) -> None:
    lower = [None, *product(("minimum", "exclusiveMinimum"), POINTS)]
    upper = [None, *product(("maximum", "exclusiveMaximum"), POINTS)]
    pairs = [(a, b) for a, b in product(lower, upper) if a is None or b is None or Decimal(a[1]) <= Decimal(b[1])]
    near = [(a, b) for a, b in pairs if a and b and Decimal(b[1]) - Decimal(a[1]) <= 1]
    refused = 0
    for low, high in [*near, *Random(7).sample(pairs, 100)]:
        for name in ("number", "integer"):
            bounds = {bound[0]: Decimal(bound[1]) for bound in (low, high) if bound}
            found = wrong_texts(texts, {"type": name, **bounds})
            assert not found, (name, bounds)
            if found is None:
                refused += 1
                assert not any(allows({"type": name, **bounds}, value) for value in VALUES.values())
    assert refused > 20


MIXED: list[dict[str, Any]] = [
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": Decimal("0.5")},
    {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"exclusiveMaximum": Decimal("0.5")}]},
    {"type": "number", "minimum": Decimal("-0.25"), "exclusiveMaximum": 0, "multipleOf": Decimal("0.1")},
    {"type": "integer", "minimum": 0, "exclusiveMinimum": 3, "maximum": 12, "exclusiveMaximum": 13},
    {"type": "integer", "maximum": 2**53 + 1},
    {"type": "integer", "minimum": 2**53 + 1},
    {"type": "integer", "exclusiveMinimum": -(2**60)},
    {"type": "number", "exclusiveMaximum": -(2**60)},
    {"type": "number", "minimum": Decimal("0.30000000000000004")},
    {"type": "number", "maximum": Decimal("0.1234567890123456788")},
    {"type": "number", "minimum": Decimal("1e-7"), "maximum": Decimal("2e-7")},
    {"type": "integer", "multipleOf": Decimal("0.07")},
    {"type": "integer", "multipleOf": 2000},
    {"type": "integer", "multipleOf": 3},
    {"type": "number", "multipleOf": Decimal("0.25"), "minimum": 0, "exclusiveMaximum": 1},
]


@pytest.mark.parametrize("schema", MIXED, ids=str)
def test_bounds_that_floats_or_engines_change_are_kept_or_refused(schema: dict[str, Any], texts: Texts) -> None:
    assert not wrong_texts(texts, schema)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, "0.1 0.0001 0.499", "0 0.0 -0 0.5"),
        ({"type": "number", "exclusiveMinimum": 0}, "0.1 3 3.25 1000000", "0 0.0 -1"),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "-0.5 -0.1", "-0 0 0.1 -0.51"),
        ({"type": "number", "minimum": 3, "exclusiveMinimum": True, "maximum": 3.5}, "3.1 3.5", "3 3.0"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": False, "maximum": 12}, "3 12", "2 13"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "5 -5 9223372036854774784", str(2**63)),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, "5 0", str(2**64)),
        ({"anyOf": [{"type": "number", "exclusiveMinimum": 3, "maximum": 3.5}, {"type": "null"}]}, "3.1 null", "3"),
        ({"type": ["number", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, "0.1 null", "0"),
        ('{"type": "number", "exclusive\\u004dinimum": 0, "maximum": 0.5}', "0.1 0.5", "0"),
    ],
    ids=str,
)
def test_bounds_leave_the_numbers_between_them(schema: Any, right: str, wrong: str, texts: Texts) -> None:
    grammar = texts.compiled(json=schema)
    assert [text for text in right.split() if not texts.follows(grammar, text)] == []
    assert [text for text in wrong.split() if texts.follows(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "number", "minimum": 5, "exclusiveMaximum": 5}, "no number lies between minimum=5, exclusiveMaximum"),
        ({"properties": {"a": {"type": "integer", "minimum": 0.2, "maximum": 0.8}}}, "at #/properties/a: no integer"),
        ({"type": "integer", "minimum": 2**63}, "out of the range of 64 bits"),
        ('{"type": "number", "minimum": 1e999}', "out of the range of a float"),
    ],
)
def test_bounds_without_a_number_are_refused_with_their_place(schema: Any, message: str, texts: Texts) -> None:
    with pytest.raises(RequestError, match=message):
        texts.compiled(json=schema)


def test_schemas_that_a_reference_finds_anywhere_have_their_bounds_kept() -> None:
    texts, wrong = Texts("llguidance"), {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}
    for schema in (
        {"items": {"$ref": "#/default"}, "default": wrong},
        {"items": {"$ref": "#/components/schemas/a"}, "components": {"schemas": {"a": wrong}}},
        {"items": {"$ref": "#/%24defs/a/b"}, "$defs": {"a": {"b": wrong}}},
        {"items": {"$ref": "#here"}, "$defs": {"a": {"dependentSchemas": {"b": {"$anchor": "here", **wrong}}}}},
        {"items": {"$ref": "https://a.b/c#/$defs/d"}, "$id": "https://a.b/c", "$defs": {"d": wrong}},
        {"items": [wrong], "$schema": "http://json-schema.org/draft-07/schema#"},
    ):
        grammar = texts.compiled(json={"type": "array", **schema})
        assert texts.follows(grammar, "[0.1]"), schema
        assert not texts.follows(grammar, "[0]"), schema
    with pytest.raises(RequestError, match="'#/items/anyOf/0/enum/0' names a value"):
        texts.compiled(json={"items": {"anyOf": [{"enum": [wrong]}, {"$ref": "#/items/anyOf/0/enum/0"}]}})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"allOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]}, "65537, 65539 together do not"),
        ({"type": "integer", "multipleOf": -2}, "multipleOf=-2"),
        ({"type": "number", "multipleOf": 3_000_000_001}, "too many digits"),
        ({"x-guidance": {"item_separator": "X"}, "type": "array"}, "x-guidance sets options"),
    ],
)
def test_what_llguidance_would_count_or_read_wrongly_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Texts("llguidance").compiled(json=schema)


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_lacks_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} is no number of JSON"):
        StructuredOutputsParams(json=f'{{"type": "number", "minimum": {name}}}')
