"""Checks of declarations: every field of a descriptor's capabilities has the declared type.

A field transformer of attrs gives each field a validator, so that no field is missed. Mistakes are reported with the
field's name when the plugin's module is imported, not in the middle of planning.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

from slotline.registry.errors import ContractError

_PLAIN: Mapping[Any, tuple[type, str]] = {
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "a string"),
}


def declared(_cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Add a type validator to every field, and convert lists to tuples for fields of tuple type.

    This is a `field_transformer` for attrs.
    """
    return [_checked(field) for field in fields]


def _checked(field: attrs.Attribute[Any]) -> attrs.Attribute[Any]:
    validator = _declared_type if field.validator is None else attrs.validators.and_(_declared_type, field.validator)
    if field.converter is None and str(field.type).startswith("tuple["):
        return field.evolve(validator=validator, converter=_tuple_of_list)
    return field.evolve(validator=validator)


def _tuple_of_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _declared_type(instance: Any, field: attrs.Attribute[Any], value: Any) -> None:
    """Raise ContractError unless a value has the type that its field declares."""
    cls: Any = type(instance)
    wanted = _hints(cls)[field.name]
    if (expected := mismatch(value, wanted)) is not None:
        name = f"{type(instance).__name__}.{field.name}"
        raise ContractError(f"{name} is {value!r:.80}, expected {expected}", fix=_fix(field.name, value, wanted))


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def mismatch(value: Any, wanted: Any) -> str | None:
    """Return the expected type in words, or None if the value has the type `wanted`."""
    kind, arguments = get_origin(wanted) or wanted, get_args(wanted)
    if wanted is Any or isinstance(wanted, TypeVar):
        bound = getattr(wanted, "__bound__", None)
        return None if bound is None else mismatch(value, bound)
    if kind in (Union, UnionType):
        texts = [mismatch(value, one) for one in arguments]
        return None if None in texts else " or ".join(str(text) for text in texts)
    if kind is Literal:
        return None if value in arguments else f"one of {', '.join(map(repr, arguments))}"
    if wanted is NoneType:
        return None if value is None else "None"
    if kind is bool:
        return None if isinstance(value, bool) else "True or False"
    if kind in _PLAIN:
        base, text = _PLAIN[kind]
        return None if isinstance(value, base) and not isinstance(value, bool) else text
    if kind in (tuple, frozenset):
        return _unlike_elements(value, kind, arguments)
    if hasattr(kind, "refusal"):
        return _unlike_capability(value, kind, arguments)
    return None if isinstance(value, kind) else _named(kind)


def _unlike_elements(value: Any, kind: Any, arguments: tuple[Any, ...]) -> str | None:
    """Return the same for a tuple or a frozenset and its elements."""
    if kind is frozenset or arguments[1:] == (...,):
        elements = value if isinstance(value, kind) else (object(),)
        inner = next((text for one in elements if (text := mismatch(one, arguments[0]))), None)
        return None if inner is None else f"a {kind.__name__} whose elements are each {inner}"
    pair = isinstance(value, kind) and len(value) == len(arguments)
    if pair and all(mismatch(one, wanted) is None for one, wanted in zip(value, arguments, strict=True)):
        return None
    return f"a tuple of {len(arguments)}: {', '.join(str(mismatch(object(), one)) for one in arguments)}"


def _unlike_capability(value: Any, kind: type, arguments: tuple[Any, ...]) -> str | None:
    """Return the same for a capability class. Any object with its two methods is accepted."""
    alike = callable(getattr(value, "refusal", None)) and hasattr(value, "describe")
    if isinstance(value, type) or not alike:
        return _named(kind)
    if not arguments or not isinstance(value, kind):
        return None
    held = getattr(value, "value", None) if hasattr(value, "value") else value.values  # type: ignore[attr-defined]
    inner = [held] if hasattr(value, "value") else held or ()
    wrong = next((one for one in inner if mismatch(one, arguments[0])), None)
    return None if wrong is None else f"{_named(kind)} of which each is {mismatch(wrong, arguments[0])}"


def _named(kind: Any) -> str:
    name = getattr(kind, "__name__", str(kind))
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _fix(name: str, value: Any, wanted: Any) -> str:
    """Return a suggestion for the correct value, if it can be guessed."""
    kind = get_origin(wanted) or wanted
    if not attrs.has(kind) or not hasattr(kind, "refusal") or isinstance(value, type) or hasattr(value, "refusal"):
        return f"correct {name} in the descriptor"
    shown = f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else repr(value)
    if isinstance(value, str) and kind.__name__ in ("Set", "Choice"):
        shown = f"({value!r},)"
    elif kind.__name__ == "Range" and isinstance(value, int):
        shown = f"{value}, {value}"
    elif kind.__name__ == "Align":
        shown = f"exact=({value!r},)" if isinstance(value, int) else f"exact={value!r}"
    return f"write {name}={kind.__name__}({shown})"
