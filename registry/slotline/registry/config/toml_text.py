"""Values and keys as TOML text."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from datetime import date, time
from typing import Any

from slotline.registry.config.nesting import too_deep_at
from slotline.registry.safe_repr import safe_repr

_LONGEST_INTEGER = 10_000
_LONGEST_SHOWN = 400
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_key(key: str) -> str:
    """Return a key, in quotes if TOML needs them."""
    return key if _BARE.fullmatch(key) else toml_value(key)


def toml_value(value: Any) -> str:
    """Return a value on one line. None, which TOML lacks, is shown as ``none``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(str(k))} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER:
        return hex(value)  # Python refuses to convert this many digits
    return str(value) if isinstance(value, int | float | date | time) else safe_repr(value, 200)


def brief_value(value: Any) -> str:
    """Return a value as TOML text for a message, cut off if it is long."""
    text = toml_value(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(text):,} characters)"


def parse_toml_value(text: str) -> Any:
    """Return the value of a TOML text, or None if it is invalid or nested too deeply."""
    if too_deep_at(text) is not None:
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:  # not TOML, or a number with too many digits
        return None
    return parsed["value"] if len(parsed) == 1 else None
