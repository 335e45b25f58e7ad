"""Whether an answer has the form that the server's OpenAPI document says."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator


def assert_fits(document: dict[str, Any], operation: dict[str, Any], status: int, kind: str, text: str) -> int:
    """An answer has a status, a content type and a form that the document names. Return its number of events.

    Args:
        operation: the part of the document.
        kind: the content type.
    """
    content = operation["responses"][str(status)]["content"]
    named = next(one for one in content if kind.startswith(one))
    schema = content[named]["schema"]
    values: list[Any] = [text]
    if named == "application/json":
        values = [json.loads(text)]
    elif named == "text/event-stream":
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        values = [json.loads(line) for line in lines if line != "[DONE]"]
        schema = schema["properties"]["data"]["anyOf"][1]["contentSchema"]
    for value in values:
        Draft202012Validator({**schema, "components": document["components"]}).validate(value)
    return len(values)
