"""Reader of JSON files that come with a checkpoint or an adapter. Their content is not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slotline.registry.errors import ModelError


def read_json(file: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not JSON in UTF-8, or nested too deeply.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a checkpoint's JSON file.

    Raises:
        ModelError: if it cannot be read, or does not contain an object.
    """
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON: {error}", fix="download the file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}, not an object", fix="download the file again")
    return content
