"""Strict conversion of TOML values to the types of the configuration classes.

cattrs by itself is lax: "no" becomes True, 1.9 becomes 1, "12" becomes 12 and "abc" a tuple of letters. Here each value
must have the type that it has in TOML. The only widening is an integer for a float.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from slotline.registry.config.faults import similar
from slotline.registry.config.fields import describe, is_array, is_mapping, literal_values, union_members
from slotline.registry.config.toml_text import brief_value, parse_toml_value

Hook = Callable[[Any, Any], Any]


def convert(value: Any, kind: Any) -> Any:
    """Return `value` converted to `kind`.

    Raises:
        ValueError: naming the value, the allowed values, and a suggestion.
    """
    try:
        return _converter().structure(value, kind)
    except Exception as error:
        detail = _detail(error)
        raise ValueError(f"{brief_value(value)} is not {describe(kind)}{detail}{_hint(value, kind)}") from error


def _detail(error: Exception) -> str:
    from cattrs import transform_error
    from cattrs.errors import BaseValidationError

    if not isinstance(error, BaseValidationError):
        return ""
    return f" ({'; '.join(transform_error(error))})"


def _hint(value: Any, kind: Any) -> str:
    if not isinstance(value, str):
        return ""
    bare = parse_toml_value(value)
    if bare is not None and not isinstance(bare, str) and _fits(bare, kind):
        return f": write {brief_value(bare)} without quotes"
    return similar(value, (item for item in literal_values(kind) if isinstance(item, str)))


def _fits(value: Any, kind: Any) -> bool:
    try:
        _converter().structure(value, kind)
    except Exception:
        return False
    return True


@cache
def _converter() -> Any:
    from cattrs import Converter

    converter = Converter(forbid_extra_keys=True, detailed_validation=True)
    for kind in (bool, int, float, str):
        converter.register_structure_hook(kind, _strict)
    converter.register_structure_hook_factory(is_mapping, lambda kind: _mapping_hook(converter, kind))
    converter.register_structure_hook_factory(_is_plain_array, lambda kind: _array_hook(converter, kind))
    converter.register_structure_hook_factory(_is_literal, lambda _kind: _literal)
    converter.register_structure_hook_factory(_is_union, lambda kind: _union_hook(converter, kind))
    return converter


def _is_plain_array(kind: Any) -> bool:
    return (
        is_array(kind)
        and not hasattr(kind, "__attrs_attrs__")
        and not hasattr(get_origin(kind) or kind, "_member_map_")
    )


def _is_literal(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _strict(value: Any, kind: Any) -> Any:
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    raise ValueError(f"{brief_value(value)} is not {describe(kind)}")


def _literal(value: Any, kind: Any) -> Any:
    if any(type(value) is type(allowed) and value == allowed for allowed in get_args(kind)):
        return value
    raise ValueError(f"{brief_value(value)} is not {describe(kind)}")


def _mapping_hook(converter: Any, kind: Any) -> Hook:
    item = get_args(kind)[1] if get_args(kind) else Any

    def structure(value: Any, _kind: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError(f"{brief_value(value)} is not {describe(kind)}")
        return {str(key): converter.structure(inner, item) for key, inner in value.items()}

    return structure


def _array_hook(converter: Any, kind: Any) -> Hook:
    target = get_origin(kind) or kind
    build = target if target in (list, set, frozenset) else tuple
    items = get_args(kind) or (Any,)
    fixed = build is tuple and target is tuple and get_args(kind) and items[-1] is not Ellipsis

    def structure(value: Any, _kind: Any) -> Any:
        if not isinstance(value, (list, tuple)) or (fixed and len(value) != len(items)):
            raise ValueError(f"{brief_value(value)} is not {describe(kind)}")
        wanted = items if fixed else items[:1] * len(value)
        return build(converter.structure(inner, item) for inner, item in zip(value, wanted, strict=True))

    return structure


def _union_hook(converter: Any, kind: Any) -> Hook:
    members = union_members(kind)

    def structure(value: Any, _kind: Any) -> Any:
        for member in members:
            if member is type(None):
                if value is None:
                    return None
                continue
            try:
                return converter.structure(value, member)
            except Exception:  # the next alternative may fit
                continue
        raise ValueError(f"{brief_value(value)} is not {describe(kind)}")

    return structure
