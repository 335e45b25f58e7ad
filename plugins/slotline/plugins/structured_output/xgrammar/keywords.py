"""Keywords of JSON schemas that XGrammar fully enforces.

XGrammar ignores keywords, or combinations of keywords, that it does not know. A text could then follow the grammar and
violate the schema. Everything that is not listed here is therefore refused. The list was found by compiling each
keyword separately and in pairs (XGrammar 0.2.8) and testing valid and invalid documents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

_ANNOTATIONS = frozenset(
    {"$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType", "default", "definitions"}
    | {"deprecated", "description", "discriminator", "example", "examples", "readOnly", "title", "writeOnly"}
)
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_OBJECT = frozenset({"properties", "required", "additionalProperties", "minProperties", "maxProperties"})
_ENFORCED: Mapping[str, tuple[frozenset[str], ...]] = {
    "string": (frozenset({"pattern"}), frozenset({"format"}), frozenset({"minLength", "maxLength"})),
    "integer": (_BOUNDS, frozenset({"multipleOf"})),
    "number": (_BOUNDS,),
    "boolean": (frozenset(),),
    "null": (frozenset(),),
    "array": (frozenset({"items", "prefixItems", "minItems", "maxItems"}),),
    "object": (_OBJECT, frozenset({"patternProperties", "additionalProperties"}), frozenset({"propertyNames"})),
}
"""By type, sets of keywords; a schema may have those of one set."""
_DECIMALS = 6
"""Digits behind the point of numbers with bounds, as XGrammar writes them: it takes a range without any for no text."""
_MOST_MULTIPLE = 1024
_NAMES: Mapping[type, tuple[str, ...]] = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    type(None): ("null",),
    list: ("array",),
    dict: ("object",),
}


def unenforced(schema: Any) -> str | None:
    """Return the reason why XGrammar would not enforce a schema, or None. Schemas inside it are not considered."""
    if not isinstance(schema, Mapping):
        return None  # true and false; anything else XGrammar refuses
    keys = {key for key, value in schema.items() if key not in _ANNOTATIONS and not _says_nothing(key, value)}
    for alone in ("$ref", "anyOf", "allOf"):
        if alone in keys:
            return _alone(alone, keys, schema)
    if keys & {"const", "enum"}:
        return _values(keys, schema)
    types = schema.get("type", "object" if keys & _OBJECT else None)
    if types is None:
        return f"{_words(keys)} without a type" if keys else None
    return _of_types([types] if isinstance(types, str) else types, keys - {"type"}, schema)


def _says_nothing(key: str, value: Any) -> bool:
    return key == "uniqueItems" and value is False


def _alone(key: str, keys: set[str], schema: Mapping[str, Any]) -> str | None:
    if keys != {key}:
        return f"{_words(keys - {key})} beside {key}"
    if key == "allOf" and len(schema[key]) != 1:
        return "allOf of more than one schema"
    if key == "$ref" and schema[key] != "#" and not str(schema[key]).startswith("#/"):
        return f"$ref {schema[key]!r}, which is no pointer into the schema"
    return None


def _values(keys: set[str], schema: Mapping[str, Any]) -> str | None:
    if len(keys & {"const", "enum"}) == 2 or keys - {"const", "enum", "type"}:
        return f"{_words(keys)} together"
    if "type" in keys:
        types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        values = [schema["const"]] if "const" in keys else schema["enum"]
        wrong = [value for value in values if not set(_NAMES[type(value)]) & set(types)]
        if wrong:
            return f"the value {wrong[0]!r} beside type {schema['type']!r}"
    return None


def _of_types(types: list[str], keys: set[str], schema: Mapping[str, Any]) -> str | None:
    for name in types:
        if name not in _ENFORCED:
            return f"type {name!r}"
    known = {key for name in types for group in _ENFORCED[name] for key in group}
    if keys - known:
        return f"{_words(keys - known)} for type {schema.get('type', 'object')!r}"
    for name in types:
        own = keys & {key for group in _ENFORCED[name] for key in group}
        if not any(own <= group for group in _ENFORCED[name]):
            return f"{_words(own)} together"
    if "number" in types and not _holds_a_decimal(schema):
        return f"bounds that no number of {_DECIMALS} decimals lies between"
    if "integer" in types and "multipleOf" in keys and schema["multipleOf"] not in range(1, _MOST_MULTIPLE + 1):
        return f"multipleOf {schema['multipleOf']!r}, which is no whole number from 1 to {_MOST_MULTIPLE}"
    missing = set(schema.get("required", ())) - set(schema.get("properties", ()))
    return f"required property {min(missing)!r}, which has no schema" if missing else None


def _holds_a_decimal(schema: Mapping[str, Any]) -> bool:
    """Return whether a number that XGrammar writes lies between the bounds."""
    steps: list[int] = []
    for sign, side, exclusive in ((1, "minimum", "exclusiveMinimum"), (-1, "maximum", "exclusiveMaximum")):
        value = schema.get(side, schema.get(exclusive))
        if not isinstance(value, int | float):
            return True
        exact = sign * Fraction(repr(value)) * 10**_DECIMALS
        steps.append(math.floor(exact) + 1 if exclusive in schema else math.ceil(exact))
    return steps[0] <= -steps[1]


def _words(keys: set[str]) -> str:
    return ", ".join(sorted(keys))
