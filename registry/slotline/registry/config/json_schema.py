"""JSON Schema (draft 2020-12) of the configuration file, made from the classes, installed plugins' tables included."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, get_args, get_origin

import attrs

from slotline.registry.config.fields import is_array, is_mapping, is_table, rest_field, table_fields, union_members
from slotline.registry.config.plugin_tables import PLUGIN_TABLES
from slotline.registry.config.schema import Config
from slotline.registry.descriptor import Kind

Schema = dict[str, Any]

_PRIMITIVES: tuple[tuple[Any, str], ...] = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"))
_BOUNDS = {">=": "minimum", ">": "exclusiveMinimum", "<=": "maximum", "<": "exclusiveMaximum"}


def json_schema(option_classes: Mapping[tuple[Kind, str], type] | None = None) -> Schema:
    """Return the schema of a whole file.

    Args:
        option_classes: the options class of each installed plugin that has one, by kind and name.
    """
    schema = _table(Config)
    properties = schema["properties"]
    properties["extends"] = {
        "description": "files that this one builds on, relative to it; later ones win",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    for (kind, name), cls in sorted((option_classes or {}).items()):
        _add_plugin_table(properties[PLUGIN_TABLES[kind]], name, cls)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "slotline run.toml", **schema}


def _add_plugin_table(outer: Schema, name: str, cls: type) -> None:
    tables = outer.setdefault("properties", {})
    both = name in tables and tables[name] != _table(cls)  # an attention and a state backend may share a name
    tables[name] = {"anyOf": [tables[name], _table(cls)]} if both else _table(cls)


def _table(cls: type) -> Schema:
    fields = table_fields(cls)
    schema: Schema = {"type": "object"}
    if cls.__doc__:
        schema["description"] = cls.__doc__.strip().splitlines()[0]
    schema["properties"] = {key: _key(item) for key, item in fields.items()}
    required = [key for key, item in fields.items() if item.default is attrs.NOTHING]
    if required:
        schema["required"] = required
    schema["additionalProperties"] = {"type": "object"} if rest_field(cls) is not None else False
    return schema


def _key(item: attrs.Attribute[Any]) -> Schema:
    schema = _type(item.type) | _limits(item.validator)
    if "short" in item.metadata:
        schema = {"anyOf": [schema, schema["properties"][item.metadata["short"]]]}
    if "doc" in item.metadata:
        schema["description"] = item.metadata["doc"]
    default = item.default
    if default is not attrs.NOTHING and default is not None and not hasattr(default, "factory"):
        schema["default"] = list(default) if isinstance(default, tuple) else default
    return schema


def _type(kind: Any) -> Schema:
    members = [member for member in union_members(kind) if member is not type(None)]
    if len(members) != 1:
        return {"anyOf": [_type(member) for member in members]}
    kind = members[0]
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if is_table(kind):
        return _table(kind)
    if is_mapping(kind):
        return {"type": "object", "additionalProperties": _type(get_args(kind)[1]) if get_args(kind) else True}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if is_array(kind):
        return {"type": "array"} | ({"items": _type(get_args(kind)[0])} if get_args(kind) else {})
    return next(({"type": name} for primitive, name in _PRIMITIVES if kind is primitive), {})


def _limits(validator: Any) -> Schema:
    """Return the schema of a validator's limits on numbers and texts.

    Our validators have a method `json_schema`. Those of attrs are read.
    """
    if validator is None:
        return {}
    if hasattr(validator, "json_schema"):
        limits: Schema = validator.json_schema()
        return limits
    inner = getattr(validator, "_validators", ())
    merged = {key: value for part in inner for key, value in _limits(part).items()}
    bound = _BOUNDS.get(getattr(validator, "compare_op", ""))
    return merged | ({bound: validator.bound} if bound else {})
