"""Reference of the configuration file, generated from the classes that define it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from slotline.registry.config.fields import admits_table, describe, is_table, rest_field, table_fields
from slotline.registry.config.schema import Config
from slotline.registry.config.toml_text import toml_value
from slotline.registry.config.tree import KeyPath


def reference(cls: type = Config) -> str:
    """Return every table and key of `cls` as Markdown: key, type, default, meaning."""
    return "\n".join(_tables(cls, ())).rstrip() + "\n"


def _tables(cls: type, path: KeyPath) -> Iterator[str]:
    fields = table_fields(cls)
    summary = (cls.__doc__ or "").strip().splitlines()[0]
    yield f"### `[{'.'.join(path)}]`\n" if path else "### Top level\n"
    yield f"{summary}\n"
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    for key, item in fields.items():
        if not is_table(item.type):
            yield _row(key, item)
    rest = rest_field(cls)
    if rest is not None:
        yield f"| *NAME* | a table | | {_escape(rest.metadata['doc'])} |"
    yield ""
    for key, item in fields.items():
        if is_table(item.type):
            yield from _tables(item.type, (*path, key))  # type: ignore[arg-type]


def _row(key: str, item: attrs.Attribute[Any]) -> str:
    value = "tables" if _holds_tables(item) else describe(item.type)
    return f"| `{key}` | {_escape(value)} | {_default(item)} | {_escape(item.metadata.get('doc', ''))} |"


def _holds_tables(item: attrs.Attribute[Any]) -> bool:
    return admits_table(item.type) and describe(item.type) == "a table of values"


def _default(item: attrs.Attribute[Any]) -> str:
    default = item.default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        default = default.factory()  # type: ignore[union-attr]
    return "" if default is None or default == {} else f"`{toml_value(default)}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
