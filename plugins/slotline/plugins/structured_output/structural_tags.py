"""Structural tags: free text in which the text between given tags follows a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from slotline.registry.errors import RequestError
from slotline.registry.safe_repr import safe_repr

_FORM = '{"structures": [{"begin": "<a>", "schema": {...}, "end": "</a>"}], "triggers": ["<a"]}'


@frozen
class Structure:
    """Tag with JSON that `schema` accepts between `begin` and `end`. A text that begins with `trigger` is a tag.

    `place` is the place of the schema.
    """

    trigger: str
    begin: str
    schema: Any
    end: str
    place: str


def structures(text: str) -> tuple[Structure, ...]:
    """Return the structures of a structural tag in the form of OpenAI's and vLLM's API.

    Raises:
        RequestError: naming the wrong part.
    """
    given = json.loads(text)
    if not isinstance(given, Mapping) or not given.get("structures") or not given.get("triggers"):
        raise RequestError("structured_outputs.structural_tag needs structures and triggers", fix=f"give {_FORM}")
    if not isinstance(given["structures"], list) or not _are_texts(given["triggers"]):
        raise RequestError(
            "structured_outputs.structural_tag: structures is no list, or triggers none of texts", fix=f"give {_FORM}"
        )
    demands(text)
    found = []
    for index, item in enumerate(given["structures"]):
        at = f"structured_outputs.structural_tag at #/structures/{index}"
        if not isinstance(item, Mapping) or not {"begin", "schema", "end"} <= set(item):
            raise RequestError(f"{at}: begin, schema and end are needed", fix=f"give {_FORM}")
        if not _are_texts([item["begin"]]) or not isinstance(item["end"], str):
            raise RequestError(f"{at}: begin or end is no text", fix=f"give {_FORM}")
        triggers = [trigger for trigger in given["triggers"] if item["begin"].startswith(trigger)]
        if not triggers:
            raise RequestError(f"{at}: {item['begin']!r} begins with no trigger", fix="add one to triggers")
        found.append(Structure(max(triggers, key=len), item["begin"], item["schema"], item["end"], f"{at}/schema"))
    return tuple(found)


@frozen
class Demands:
    """What a structural tag says of the whole text.

    Attributes:
        at_least_one: the text begins with a tag.
        stop_after_first: nothing follows the first tag.
    """

    at_least_one: bool
    stop_after_first: bool


def demands(text: str) -> Demands:
    """Return what a structural tag says of the whole text.

    Raises:
        RequestError: for a value that is neither true nor false.
    """
    given = json.loads(text)
    values = {name: given.get(name, False) for name in ("at_least_one", "stop_after_first")}
    for name, value in values.items():
        if not isinstance(value, bool):
            raise RequestError(
                f"structured_outputs.structural_tag: {name} is {safe_repr(value)}", fix="give true or false"
            )
    return Demands(**values)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) and value for value in values)
