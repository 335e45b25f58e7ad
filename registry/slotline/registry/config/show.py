"""Output of a resolved configuration as TOML text."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from slotline.registry.config.fields import is_table, rest_field, table_fields
from slotline.registry.config.load import LoadedConfig
from slotline.registry.config.structure import dotted
from slotline.registry.config.toml_text import toml_key, toml_value
from slotline.registry.config.tree import KeyPath, Origin


@frozen
class _Line:
    table: KeyPath
    text: str
    origin: Origin | None


def show(loaded: LoadedConfig, *, origins: bool = False) -> str:
    """Return the whole configuration as a TOML document, defaults included. It loads to the same configuration.

    Args:
        loaded: the result of `load_config`.
        origins: True to end each line with a comment that names the origin of its value.
    """
    lines = list(_table_lines(loaded, type(loaded.config), loaded.config, ()))
    width = max(len(line.text) for line in lines if line.origin) if origins else 0
    blocks: dict[KeyPath, list[str]] = {}
    for line in lines:
        comment = f"  # {line.origin.where}" if origins and line.origin else ""
        blocks.setdefault(line.table, []).append(f"{line.text:<{width}}{comment}".rstrip())
    return "\n".join(_block(table, texts) for table, texts in blocks.items())


def _block(table: KeyPath, texts: list[str]) -> str:
    header = f"[{dotted(table)}]\n" if table else ""
    return header + "".join(f"{text}\n" for text in texts if text)


def _table_lines(loaded: LoadedConfig, cls: type, value: object, path: KeyPath) -> Iterator[_Line]:
    tables = []
    for key, item in table_fields(cls).items():
        inner = getattr(value, item.name)
        if is_table(item.type) or (isinstance(inner, dict) and inner):
            tables.append((key, item, inner))
        elif inner is not None:
            text = f"{toml_key(key)} = {toml_value(inner)}"
            yield _Line(path, text, loaded.origins.get(dotted((*path, key))))
    for key, item, inner in tables:
        if is_table(item.type):
            yield from _table_lines(loaded, item.type, inner, (*path, key))  # type: ignore[arg-type]
        else:
            yield from _free_lines(loaded, inner, (*path, key))
    rest = rest_field(cls)
    for key, inner in getattr(value, rest.name).items() if rest else ():
        yield from _free_lines(loaded, inner, (*path, key))


def _free_lines(loaded: LoadedConfig, values: dict[str, object], path: KeyPath) -> Iterator[_Line]:
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    if not values:
        yield _Line(path, "", None)
    for key, value in values.items():
        if key not in tables:
            yield _Line(path, f"{toml_key(key)} = {toml_value(value)}", loaded.origins.get(dotted((*path, key))))
    for key, value in tables.items():
        yield from _free_lines(loaded, value, (*path, key))
