"""Bounds of numbers in a JSON schema, rewritten into a form that every engine keeps.

Engines read bounds as 64-bit floats and convert them to regular expressions. This fails for a bound that a float cannot
represent, and for an exclusive bound at an integer: llguidance 1.9.1 allows 0 in the open interval from 0 to 0.5. Here
these bounds become inclusive, moved inwards to a safe value: a decimal of `_DIGITS` digits, or an integer that is a
float. Every text that the rewritten schema allows is allowed by the original.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

from slotline.plugins.structured_output.json_schema import subschemas
from slotline.registry.errors import RequestError

_DIGITS = 15
_SMALLEST_EXPONENT = -22
"""Decimals of so many digits, and no finer ones, are read exactly also by parsers that round twice."""
_EXACT = 2**53
"""Up to here every whole number is a float."""
_MOST = 2**63 - 1024
"""The largest float that fits into 64 bits; engines count no further."""
_OUT_OF_RANGE = 400
"""Decimal exponent from which on no float follows."""
_INWARDS = {
    side: Context(prec=_DIGITS, rounding=rounding, Emin=_SMALLEST_EXPONENT + _DIGITS - 1, Emax=10**6, traps=[])
    for side, rounding in (("minimum", ROUND_CEILING), ("maximum", ROUND_FLOOR))
}
_EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}


def with_kept_bounds(text: str, place: str) -> str:
    """Rewrite the bounds of numbers in a schema. A schema without any is unchanged.

    Args:
        text: the schema.
        place: the parameter with the schema, and the place in it, e.g. ``structured_outputs.json at #``.

    Raises:
        RequestError: with the JSON pointer of bounds that no number satisfies, or that are out of range.
    """
    root = json.loads(text, parse_float=Decimal)
    changed = False
    for pointer, part in subschemas(root):
        if isinstance(part, dict) and any(key in part for pair in _EXCLUSIVE.items() for key in pair):
            changed |= _rewrite(part, f"{place}{pointer[1:]}")
    return json.dumps(root, ensure_ascii=False, default=float) if changed else text


def refuse_uncounted_multiples(text: str, place: str, fix: str) -> None:
    """Refuse values of `multipleOf` that do not fit into 32 bits, nor does what llguidance makes of several.

    It multiplies without a look at overflow where schemas are merged: of 65537 and 65539 it made 262147.

    Raises:
        RequestError: naming the values.
    """
    parts = [(pointer, part) for pointer, part in subschemas(json.loads(text, parse_float=Decimal))]
    found: set[Decimal] = set()
    merged = False
    for pointer, part in parts:
        if not isinstance(part, Mapping):
            continue
        merged |= "allOf" in part or (len(part) > 1 and bool({"$ref", "anyOf", "oneOf"} & set(part)))
        value = part.get("multipleOf")
        if isinstance(value, int | Decimal) and not isinstance(value, bool):
            if value <= 0:
                raise RequestError(f"{place}{pointer[1:]}: multipleOf={value}", fix="multipleOf must be above 0")
            if not _fits([Decimal(value)], whole="number" not in str(part.get("type", "number"))):
                raise RequestError(f"{place}{pointer[1:]}: multipleOf={value} has too many digits", fix=fix)
            found.add(Decimal(value))
    if merged and found and not _fits(found, whole=True, merged=True):
        values = ", ".join(sorted(map(str, found)))
        raise RequestError(f"{place}: the multiples of {values} together do not fit into 32 bits", fix=fix)


def _fits(values: Collection[Decimal], *, whole: bool, merged: bool = False) -> bool:
    """Return whether the products on the way to a common multiple of values, and of 1 if it is `whole`, are exact.

    Those of more than nine digits are not: they are read as floats and multiplied by 10 until they have no fraction.
    """
    if any(v.adjusted() > 9 or v.adjusted() < -9 or len(v.normalize().as_tuple().digits) > 9 for v in values):
        return False
    scale: int = 10 ** max(0, *(-int(value.normalize().as_tuple().exponent) for value in values))
    scaled = [int(value * scale) for value in values]
    if not merged:
        return bool(scale <= 10**9) and math.prod(scaled) * (scale if whole else 1) < 2**32
    return bool(math.lcm(scale, *scaled) * max(scale, *scaled) < 2**32)


def _rewrite(part: dict[str, Any], place: str) -> bool:
    """Rewrite the bounds of one schema in place, and return True if anything changed."""
    before = dict(part)
    _read_flags(part)
    keys = [key for pair in _EXCLUSIVE.items() for key in pair if key in part]
    if not all(isinstance(part[key], int | Decimal) and not isinstance(part[key], bool) for key in keys):
        return False  # the engine names what is no number
    if "enum" not in part and "const" not in part:  # these are compared, and no expression is made of the bounds
        whole = _only_integers(part)
        shown = ", ".join(f"{key}={part[key]}" for key in keys)
        for side, exclusive in _EXCLUSIVE.items():
            given = [(Decimal(part.pop(key)), key == exclusive) for key in (side, exclusive) if key in part]
            if given:
                bound, excluded = _kept(side, given, f"{place}: {shown:.200}", whole=whole)
                part[exclusive if excluded else side] = bound
        if part.get("type") in ("integer", "number") and _is_empty(part):
            raise RequestError(f"{place}: no {part['type']} lies between {shown}", fix="widen the bounds")
    return part != before


def _read_flags(part: dict[str, Any]) -> None:
    """Turn the exclusive bounds of JSON Schema's draft 4, which are flags, into those of later ones."""
    for side, exclusive in _EXCLUSIVE.items():
        if isinstance(part.get(exclusive), bool) and part.pop(exclusive) and side in part:
            part[exclusive] = part.pop(side)


def _only_integers(part: Mapping[str, Any]) -> bool:
    types = part.get("type")
    types = types if isinstance(types, list) else [types]
    return "integer" in types and "number" not in types


def _is_empty(part: Mapping[str, Any]) -> bool:
    low, high = (part.get(side, part.get(exclusive)) for side, exclusive in _EXCLUSIVE.items())
    excluded = any(exclusive in part for exclusive in _EXCLUSIVE.values())
    return low is not None and high is not None and bool(low >= high if excluded else low > high)


def _kept(side: str, given: list[tuple[Decimal, bool]], place: str, *, whole: bool) -> tuple[int | Decimal, bool]:
    """Return a bound, and whether it is exclusive, that keeps all the `given` ones in the same form."""
    for value, _ in given:
        if value and not -_OUT_OF_RANGE < value.adjusted() < _OUT_OF_RANGE:
            raise RequestError(f"{place} is out of the range of a float", fix="give a bound that a float can hold")
    inner = max if side == "minimum" else min
    if whole:
        return _float_inside(side, inner(_next_integer(side, *bound) for bound in given), place), False
    tightest = inner(value for value, _ in given)
    value, exclusive = _decimal_inside(side, tightest, (tightest, True) in given)
    if abs(value) <= _EXACT:
        return value, exclusive
    return _float_inside(side, int(value.to_integral_value(_INWARDS[side].rounding)), place, steps=1), False


def _next_integer(side: str, value: Decimal, exclusive: bool) -> int:
    down, up = (int(value.to_integral_value(rounding)) for rounding in (ROUND_FLOOR, ROUND_CEILING))
    if side == "minimum":
        return down + 1 if exclusive else up
    return up - 1 if exclusive else down


def _decimal_inside(side: str, value: Decimal, exclusive: bool) -> tuple[Decimal, bool]:
    """Return the decimal of few digits next to a bound, inwards, and whether that is exclusive still."""
    context = _INWARDS[side]
    found = context.plus(value)
    if found != value:
        return found, False
    away_from_zero = value >= 0 if side == "minimum" else value <= 0
    if exclusive and away_from_zero and found == found.to_integral_value():
        return found.next_plus(context) if side == "minimum" else found.next_minus(context), False
    return found, exclusive


def _float_inside(side: str, value: int, place: str, *, steps: int = 0) -> int:
    """Return the next integer inside of `value` that is a float, `steps` floats further if it is large.

    Raises:
        RequestError: if it does not fit into 64 bits.
    """
    if abs(value) <= _EXACT:
        return value
    inwards = math.inf if side == "minimum" else -math.inf
    found = float(value)
    if (int(found) < value) if side == "minimum" else (int(found) > value):
        found = math.nextafter(found, inwards)
    for _ in range(steps):
        found = math.nextafter(found, inwards)
    if (found > _MOST) if side == "minimum" else (found < -_MOST):
        raise RequestError(f"{place} is out of the range of 64 bits", fix=f"numbers go from {-_MOST} to {_MOST}")
    return max(-_MOST, min(int(found), _MOST))
