"""Validators of configuration values. Each raises a ValueError that names the value and the allowed values."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from ipaddress import ip_network
from typing import Any

from attrs import frozen

Validator = Callable[[Any, Any, Any], None]

SIZE_PATTERN = r"^\s*(\d+(?:\.\d+)?)\s*([KkMmGgTt][Ii]?[Bb])\s*$"
_SIZE = re.compile(SIZE_PATTERN)
_UNITS = {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def is_integer(value: object) -> bool:
    """Return True if `value` is an int but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


@frozen
class AtLeast:
    """Integer or float from `minimum` to `maximum`. With `auto`, the string 'auto' is accepted too."""

    minimum: float
    auto: bool = False
    maximum: int | None = None

    def __call__(self, _instance: Any, _attribute: Any, value: Any) -> None:
        """Raise ValueError unless the number is in the range."""
        if self.auto and value == "auto":
            return
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not value >= self.minimum:  # false for NaN
            other = " or 'auto'" if self.auto else ""
            raise ValueError(f"{value!r} is too small: use a number >= {self.minimum}{other}")
        if value > (self.maximum or sys.float_info.max):
            raise ValueError(f"{value!r} is too large: use a number <= {self.maximum or sys.float_info.max}")

    def json_schema(self) -> dict[str, Any]:
        """Return the limits as JSON Schema."""
        most = {} if self.maximum is None else {"maximum": self.maximum}
        return {"minimum": self.minimum, **most}  # JSON Schema applies it only to numbers


@frozen
class BelowOne:
    """Share from 0 to below 1."""

    def __call__(self, _instance: Any, _attribute: Any, value: Any) -> None:
        """Raise ValueError unless the number is in the range."""
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
            raise ValueError(f"{value!r} is no share: use a number from 0 to below 1")

    def json_schema(self) -> dict[str, Any]:
        """Return the limits as JSON Schema."""
        return {"minimum": 0, "exclusiveMaximum": 1}


@frozen
class VersionIs:
    """Version of the file format that this slotline reads."""

    version: int

    def __call__(self, _instance: Any, _attribute: Any, value: Any) -> None:
        """Raise ValueError unless the value is the version."""
        if not is_integer(value) or value != self.version:
            raise ValueError(f"{value!r} is not a version that this slotline reads: use {self.version}")

    def json_schema(self) -> dict[str, Any]:
        """Return the version as JSON Schema."""
        return {"const": self.version}


@frozen
class FractionOrSize:
    """Float in (0, 1], or a size in bytes, e.g. '2GiB' or '512MB'."""

    def __call__(self, _instance: Any, _attribute: Any, value: Any) -> None:
        """Raise ValueError unless the value is a fraction or a size."""
        if isinstance(value, str):
            size_in_bytes(value)
        elif not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
            raise ValueError(
                f"{value!r} is neither a share nor a size: use a number in (0, 1] or a text such as '2GiB'"
            )

    def json_schema(self) -> dict[str, Any]:
        """Return the limits as JSON Schema."""
        return {"exclusiveMinimum": 0, "maximum": 1, "pattern": SIZE_PATTERN}


@frozen
class Size:
    """Size in bytes, e.g. '2GiB' or '512MB'."""

    def __call__(self, _instance: Any, _attribute: Any, value: Any) -> None:
        """Raise ValueError unless the value is a size."""
        size_in_bytes(value)

    def json_schema(self) -> dict[str, Any]:
        """Return the form as JSON Schema."""
        return {"pattern": SIZE_PATTERN}


@frozen
class NumberOrNames:
    """Integer of at least 1, or a list of at least one name."""

    def __call__(self, _instance: Any, _attribute: Any, value: Any) -> None:
        """Raise ValueError unless the value is a count or a list of names."""
        if not (value >= 1 if is_integer(value) else isinstance(value, tuple) and value):
            raise ValueError(
                f"{value!r} is neither a number from 1 on nor a list of names: use 2 or ['cuda:0', 'cuda:1']"
            )

    def json_schema(self) -> dict[str, Any]:
        """Return the limits as JSON Schema."""
        return {"minimum": 1, "minItems": 1}


@frozen
class Counts:
    """List of integers of at least 1, or the string 'auto'."""

    def __call__(self, _instance: Any, _attribute: Any, value: Any) -> None:
        """Raise ValueError unless the value is 'auto' or a list of counts."""
        wrong = [] if value == "auto" else [one for one in value if not is_integer(one) or one < 1]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is too small: use numbers >= 1 or 'auto'")

    def json_schema(self) -> dict[str, Any]:
        """Return the limits as JSON Schema."""
        return {"items": {"type": "integer", "minimum": 1}}


@frozen
class Networks:
    """List of IP networks, e.g. '10.1.0.0/16'."""

    def __call__(self, _instance: Any, _attribute: Any, value: Any) -> None:
        """Raise ValueError unless each value is a network."""
        for one in value:
            try:
                ip_network(one)
            except ValueError as error:
                raise ValueError(f"{one!r} is no network ({error}): use addresses such as '10.1.0.0/16'") from error

    def json_schema(self) -> dict[str, Any]:
        """Return nothing, since JSON Schema has no form for networks."""
        return {}


def at_least(minimum: float) -> AtLeast:
    """Return a validator of numbers of at least `minimum`."""
    return AtLeast(minimum)


def version_is(version: int) -> VersionIs:
    """Return a validator that accepts only `version`."""
    return VersionIs(version)


LARGEST = 2**31 - 1
"""Rows, lengths and tokens are numbers of 32 bits."""
positive = AtLeast(1, maximum=LARGEST)
positive_or_auto = AtLeast(1, auto=True, maximum=LARGEST)
counts_or_auto = Counts()
fraction_or_size = FractionOrSize()
size = Size()
below_one = BelowOne()
number_or_names = NumberOrNames()
networks = Networks()


def size_in_bytes(text: str) -> int:
    """Return the bytes of a size like '2GiB' (powers of 1024) or '512MB' (powers of 1000).

    Raises:
        ValueError: if `text` is not a positive number with a unit.
    """
    match = _SIZE.match(text)
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise ValueError(f"{text!r} is not a size: use a positive number with KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return size
