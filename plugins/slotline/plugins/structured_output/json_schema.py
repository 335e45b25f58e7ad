"""Where in a JSON schema an error lies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slotline.registry.errors import RequestError

_SUBSCHEMAS = frozenset({"additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_TABLES = frozenset({"$defs", "definitions", "patternProperties", "properties"})


def subschemas(schema: Any, pointer: str = "#") -> Iterator[tuple[str, Any]]:
    """Every schema inside `schema`, innermost first, with its JSON pointer; `schema` itself comes last."""
    if isinstance(schema, Mapping):
        for key, value in schema.items():
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
    shared = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, Mapping) and key in root}
    for pointer, part in subschemas(root):
        if pointer != "#" and not isinstance(part, bool):
            found = refusal(json.dumps({**shared, **part} if isinstance(part, Mapping) else part))
            if found is not None:
                raise RequestError(f"{place}{pointer[1:]}: {found}", fix=fix)
    raise RequestError(f"{place}: {why}", fix=fix)


def _escaped(key: str) -> str:
    """A key as a part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")
