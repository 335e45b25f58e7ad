"""The parts of a JSON schema, and where in it an error lies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from slotline.plugins.structured_output.regex import too_long
from slotline.registry.errors import RequestError

_SUBSCHEMAS = frozenset(
    {"additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"}
    | {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
)
_LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_DEFINITIONS = ("$defs", "definitions")
_TABLES = frozenset({*_DEFINITIONS, "dependencies", "dependentSchemas", "patternProperties", "properties"})


def subschemas(root: Any) -> list[tuple[str, Any]]:
    """Return every schema inside a schema, innermost first, with its JSON pointer. The schema itself comes last.

    Definitions and other targets of references come before the schemas that refer to them.
    """
    found = list(_inside(root, "#"))
    known = {id(part) for _, part in found}
    bases = [root, *(part for _, part in found if isinstance(part, Mapping) and "$id" in part)]
    referred = (target for reference in _references(root) for target in targets(reference, bases))
    elsewhere = [(pointer, part) for pointer, part in referred if id(part) not in known]
    values = set(map(id, _values(part for _, part in found))) if elsewhere else set()
    for pointer, part in elsewhere:
        if id(part) not in known and id(part) not in values:
            more = list(_inside(part, pointer))
            known |= {id(inner) for _, inner in more}
            found = more + found
    return found


def refuse_values_as_schemas(text: str, place: str) -> None:
    """Refuse a schema with a reference to a value elsewhere in it. `place` as for `refuse`.

    Raises:
        RequestError: naming the reference.
    """
    root = json.loads(text)
    parts = subschemas(root)
    known, values = {id(part) for _, part in parts}, set(map(id, _values(part for _, part in parts)))
    for reference in _references(root):
        for _, target in targets(reference, [root]):
            if id(target) in values and id(target) not in known:
                raise RequestError(
                    f"{place}: $ref {reference!r} names a value of enum or const", fix="put the schema under $defs"
                )


def refuse_uncounted_names(text: str, place: str) -> None:
    """Refuse values of `minProperties` that need several properties whose names are free.

    A grammar counts properties and cannot compare names: a text could repeat one, and have too few once it is read.

    Raises:
        RequestError: naming the value.
    """
    for pointer, part in subschemas(json.loads(text)):
        if not isinstance(part, Mapping) or not isinstance(least := part.get("minProperties"), int | float):
            continue
        required = part.get("required")
        free = least - len(set(required) if isinstance(required, list) else ())
        if free > 1 and (part.get("additionalProperties") is not False or part.get("patternProperties")):
            raise RequestError(
                f"{place}{pointer[1:]}: minProperties={least} asks for properties of free names, which could repeat",
                fix="name them under properties and required, or set additionalProperties to false",
            )


def _inside(schema: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas at the places that JSON Schema has for them, innermost first."""
    if isinstance(schema, Mapping):
        for key in sorted(schema, key=lambda key: key not in _DEFINITIONS):
            value = schema[key]
            at = f"{pointer}/{_escaped(key)}"
            if key in _LISTS and isinstance(value, list):
                for index, item in enumerate(value):
                    yield from _inside(item, f"{at}/{index}")
            elif key in _SUBSCHEMAS:
                yield from _inside(value, at)
            elif key in _TABLES and isinstance(value, Mapping):
                for name, item in value.items():
                    yield from _inside(item, f"{at}/{_escaped(name)}")
    yield pointer, schema


def targets(reference: str, bases: Sequence[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the mappings that the JSON pointer of a reference finds, from any of the bases."""
    fragment = reference.partition("#")[2]
    for value in bases if fragment.startswith("/") else ():
        for key in map(_unescaped, unquote(fragment).split("/")[1:]):
            if isinstance(value, Mapping):
                value = value.get(key)
            elif isinstance(value, list) and key.isdecimal() and len(key) < 9 and int(key) < len(value):
                value = value[int(key)]
            else:
                value = None
        if isinstance(value, Mapping):
            yield f"#{fragment}", value


def _values(parts: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings inside the values that schemas compare with."""
    for part in parts:
        for key in ("const", "enum"):
            if isinstance(part, Mapping) and key in part:
                yield from _mappings(part[key])


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every mapping in JSON."""
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _mappings(inner)


def refuse(text: str, refusal: Callable[[str], str | None], fix: str, place: str) -> None:
    """Refuse a schema that an engine cannot compile, naming the innermost part that it cannot.

    Args:
        text: the schema.
        refusal: why the engine cannot compile a schema, or None.
        place: the parameter with the schema, and the place in it, e.g. ``structured_outputs.json at #``.

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
    """Refuse a schema with an expression that requires too much text (`regex.too_long`). `place` as for `refuse`.

    Raises:
        RequestError: with the JSON pointer of the schema.
    """
    for pointer, part in subschemas(json.loads(text)):
        if isinstance(part, Mapping):
            properties = part.get("patternProperties")
            names = list(properties) if isinstance(properties, Mapping) else []
            for pattern in (part.get("pattern"), *names):
                if isinstance(pattern, str) and (why := too_long(pattern)):
                    raise RequestError(f"{place}{pointer[1:]}: pattern {pattern!r:.60}: {why}", fix="repeat less")


def _alone(part: Any, root: Any) -> Any:
    """Return a part of a schema with only the definitions that it needs, of possibly hundreds.

    None if it refers to other parts, so that it has no meaning by itself.
    """
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
            name = _unescaped(name)
            known, found = root.get(table), needed.setdefault(table, {})
            if isinstance(known, Mapping) and name in known and name not in found:
                found[name] = known[name]
                left.append(known[name])
    return {**needed, **part}


def _references(value: Any) -> Iterator[str]:
    """Yield every `$ref` in JSON."""
    if isinstance(value, Mapping):
        if isinstance(reference := value.get("$ref"), str):
            yield reference
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _escaped(key: str) -> str:
    """Return a key as a part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _unescaped(key: str) -> str:
    """Return the key that a part of a JSON pointer names."""
    return key.replace("~1", "/").replace("~0", "~")
