"""Detection of Python code in a model's folder. The code is named in messages and never run."""

from __future__ import annotations

import json
from pathlib import Path

FILES = (
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "config.json",
)
"""Files of a Hugging Face folder that may name code under `auto_map`."""


def remote_code(folder: Path, *auto_classes: str) -> str | None:
    """Return the file and the class in a folder that one of transformers' Auto classes would run.

    Args:
        folder: a Hugging Face folder. Missing or broken files are ignored.
        auto_classes: names of Auto classes, for example ``AutoTokenizer``.
    """
    for name in FILES:
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        table = content.get("auto_map") if isinstance(content, dict) else None
        if isinstance(table, list):  # an old spelling, of tokenizers only
            table = {"AutoTokenizer": table}
        for auto_class in auto_classes:
            if isinstance(table, dict) and (found := _named(table.get(auto_class))):
                return f"{name} names {found!r:.80} under auto_map"
    return None


def _named(value: object) -> str | None:
    """Return the class named by an entry, which is one name or the names of a slow and a fast tokenizer."""
    names = value if isinstance(value, list) else [value]
    return next((name for name in names if isinstance(name, str)), None)
