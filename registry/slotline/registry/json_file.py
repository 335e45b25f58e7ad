"""Read JSON that came with a checkpoint or an adapter: a stranger's file, in which anything may stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is no JSON in UTF-8, or nested more deeply than can be read.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
