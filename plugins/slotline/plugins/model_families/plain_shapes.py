"""Functions of `torch.fx.experimental.symbolic_shapes` for plain numbers, without importing that module.

torch's operations on the meta device ask it about sizes, which are plain integers wherever nothing is compiled. It
imports SymPy, a quarter of a second. What is not plain still goes to the module itself.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from types import MappingProxyType, SimpleNamespace
from typing import Any

SHAPES = "torch.fx.experimental.symbolic_shapes"


def _itself(value: Any) -> Any:
    return value


def _all_equal(one: Any, other: Any) -> bool:
    """Compare integers, or lists of them."""
    if isinstance(one, int) != isinstance(other, int):
        raise AssertionError(f"a number and a list of numbers: {one}, {other}")
    return bool(one == other if isinstance(one, int) else list(one) == list(other))


_TRUTHS, _INTEGERS, _SIZES, _MANY = (bool,), (bool, int), (bool, int, list, tuple), 100
_PLAIN: Mapping[str, tuple[int, tuple[type, ...], Callable[..., Any]]] = MappingProxyType(
    {
        "expect_true": (1, _TRUTHS, _itself),
        "guard_bool": (1, _TRUTHS, _itself),
        "guard_int": (1, (int,), _itself),
        "guard_or_false": (1, _TRUTHS, _itself),
        "guard_or_true": (1, _TRUTHS, _itself),
        "guarding_hint_or_throw": (1, _INTEGERS, _itself),
        "guard_size_oblivious": (1, _TRUTHS, _itself),
        "has_guarding_hint": (1, _INTEGERS, lambda _: True),
        "is_nested_int": (1, (*_INTEGERS, float), lambda _: False),
        "statically_known_true": (1, _TRUTHS, _itself),
        "sym_and": (_MANY, _TRUTHS, lambda *values: reduce(operator.and_, values)),
        "sym_or": (_MANY, _TRUTHS, lambda *values: reduce(operator.or_, values)),
        "sym_eq": (2, _SIZES, _all_equal),
    }
)
"""For each function its most arguments, the types that are plain, and what it does with those."""


def plain_shapes(names: Iterable[str]) -> SimpleNamespace | None:
    """Return the functions of these names, or None if one of them is not known here."""
    return SimpleNamespace(**{name: _function(name) for name in names}) if _PLAIN.keys() >= set(names) else None


def _function(name: str) -> Callable[..., Any]:
    most, types, plain = _PLAIN[name]

    def function(*values: Any, **options: Any) -> Any:
        if not options and 0 < len(values) <= most and all(_is_plain(value, types) for value in values):
            return plain(*values)
        return getattr(importlib.import_module(SHAPES), name)(*values, **options)

    return function


def _is_plain(value: Any, types: tuple[type, ...]) -> bool:
    listed = type(value) in (list, tuple)
    return type(value) in types and (not listed or all(type(each) is int for each in value))
