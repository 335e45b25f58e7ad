"""Where in a JSON schema an error lies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slotline.plugins.structured_output.regex import too_long
from slotline.registry.errors import RequestError

_SUBSCHEMAS = frozenset({"additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_DEFINITIONS = ("$defs", "definitions")
_TABLES = frozenset({*_DEFINITIONS, "patternProperties", "properties"})


def subschemas(schema: Any, pointer: str = "#") -> Iterator[tuple[str, Any]]:
    """Every schema inside `schema`, innermost first, with its JSON pointer; `schema` itself comes last.

    Definitions come before what refers to them.
    """
    if isinstance(schema, Mapping):
        for key in sorted(schema, key=lambda key: key not in _DEFINITIONS):
            value = schema[key]
            at = f"{pointer}/{_escaped(key)}"
            if key in _SUBSCHEMAS:
                yield from subschemas(value, at)
            elif key in _LISTS and isinstance(value, list):
                for index, item in enumerate(value):
                    yield from subschemas(item, f"{at}/{index}")
            elif key in _TABLES and isinstance(value, Mapping):
                for name, item in value.items():
                    yield from subschemas(item, f"{at}/{_escaped(name)}")
    yield pointer, schema


def refuse(text: str, refusal: Callable[[str], str | None], fix: str, place: str) -> None:
    """Refuse a schema that an engine cannot compile, naming the innermost part that it cannot.

    Args:
        text: the schema.
        refusal: why the engine cannot compile a schema, or None.
        place: the parameter that the schema stands in, and where in it, such as ``structured_outputs.json at #``.

    Raises:
        RequestError: with the JSON pointer of that part.
    """
    why = refusal(text)
    if why is None:
        return
    root = json.loads(text)
    for pointer, part in subschemas(root):
        if pointer != "#" and not isinstance(part, bool) and (alone := _alone(part, root)) is not None:
            found = refusal(json.dumps(alone))
            if found is not None:
                raise RequestError(f"{place}{pointer[1:]}: {found}", fix=fix)
    raise RequestError(f"{place}: {why}", fix=fix)


def refuse_long_patterns(text: str, place: str) -> None:
    """Refuse a schema with an expression that asks for too much text (`regex.too_long`); `place` as for `refuse`.

    Raises:
        RequestError: with the JSON pointer of the schema that has it.
    """
    for pointer, part in subschemas(json.loads(text)):
        if isinstance(part, Mapping):
            properties = part.get("patternProperties")
            names = list(properties) if isinstance(properties, Mapping) else []
            for pattern in (part.get("pattern"), *names):
                if isinstance(pattern, str) and (why := too_long(pattern)):
                    raise RequestError(f"{place}{pointer[1:]}: pattern {pattern!r:.60}: {why}", fix="repeat less")


def _alone(part: Any, root: Any) -> Any:
    """A part of a schema with the definitions that it needs and no others, of which there may be hundreds; None if it
    refers to other parts, so that it means nothing by itself."""
    if not isinstance(part, Mapping):
        return part
    needed: dict[str, dict[str, Any]] = {}
    left: list[Any] = [part]
    while left:
        for reference in _references(left.pop()):
            if reference == "#":
                continue
            _, table, name = [*reference.split("/", 3)[:3], "", ""][:3]
            if table not in _DEFINITIONS:
                return None
            name = name.replace("~1", "/").replace("~0", "~")
            known, found = root.get(table), needed.setdefault(table, {})
            if isinstance(known, Mapping) and name in known and name not in found:
                found[name] = known[name]
                left.append(known[name])
    return {**needed, **part}


def _references(value: Any) -> Iterator[str]:
    """Every `$ref` in JSON."""
    if isinstance(value, Mapping):
        if isinstance(reference := value.get("$ref"), str):
            yield reference
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _escaped(key: str) -> str:
    """A key as a part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")
