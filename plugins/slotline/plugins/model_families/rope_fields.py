"""Checks of a configuration's rope parameters, field by field, as transformers reads them.

Transformers warns of most wrong values and goes on. What comes out is a TypeError in the middle of a model, or NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from slotline.registry.errors import ModelError


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**63 and isfinite(value)


def _is_length(value: Any) -> bool:
    return _is_positive(value) and value >= 1


def _are_positive(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_positive, value))


_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "factor": (_is_positive, "a number above 0"),
    "rope_theta": (_is_positive, "a number above 0"),
    "partial_rotary_factor": (lambda value: _is_positive(value) and value <= 1, "a number above 0, 1 at most"),
    "original_max_position_embeddings": (_is_length, "a number of tokens"),
    "attention_factor": (_is_positive, "a number above 0"),
    "beta_fast": (_is_positive, "a number above 0"),
    "beta_slow": (_is_positive, "a number above 0"),
    "low_freq_factor": (_is_positive, "a number above 0"),
    "high_freq_factor": (_is_positive, "a number above 0"),
    "short_factor": (_are_positive, "a list of numbers above 0"),
    "long_factor": (_are_positive, "a list of numbers above 0"),
}
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "dynamic": ("rope_theta", "factor"),
    "yarn": ("rope_theta", "original_max_position_embeddings"),
    "longrope": ("rope_theta", "original_max_position_embeddings", "short_factor", "long_factor"),
    "llama3": (
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    "proportional": ("rope_theta",),
}
"""Fields that may not be null, by rope type. Of yarn and longrope the factor may: it follows from the lengths."""


_PARTS = ("text_config", "decoder")
"""Parts of a config.json that have rope parameters of their own."""


def refuse_wrong_fields(path: Path, raw: Mapping[str, Any]) -> None:
    """Check the rope parameters that a config.json states, under their new name or the old one.

    Raises:
        ModelError: naming the field, its value and what it should be.
    """
    parts = {"": raw} | {f"{name}.": raw[name] for name in _PARTS if isinstance(raw.get(name), Mapping)}
    for prefix, part in parts.items():
        for key in ("rope_parameters", "rope_scaling"):
            for place, stated in _sets(f"{prefix}{key}", part.get(key)):
                kind = stated.get("rope_type", stated.get("type", "default"))
                _refuse_wrong(path, place, kind, stated, stated.keys())


def refuse_wrong(path: Path, config: Any) -> None:
    """Check the rope parameters of a configuration and of its text model, one set for each layer type.

    Raises:
        ModelError: naming the field, its value and what it should be.
    """
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        if getattr(part, "position_embedding_type", "rope") == "rope":
            for place, parameters in _sets("rope_parameters", getattr(part, "rope_parameters", None)):
                kind = parameters.get("rope_type", "default")
                _refuse_wrong(path, place, kind, parameters, _CHECKS)
                if kind == "longrope":
                    _refuse_lengths(path, place, parameters, part)


def _refuse_wrong(path: Path, place: str, kind: Any, parameters: Mapping[str, Any], there: Collection[str]) -> None:
    if not isinstance(kind, str):
        raise _wrong(path, place, "rope_type", kind, "a name")
    for name, (fits, wanted) in _CHECKS.items():
        value = parameters.get(name)
        needed = value is not None or (name in there and name in _NEEDED.get(kind, ()))
        if needed and not fits(value):
            raise _wrong(path, place, name, value, wanted)
    low, high = parameters.get("low_freq_factor"), parameters.get("high_freq_factor")
    if kind == "llama3" and low is not None and low == high:
        raise _wrong(path, place, "high_freq_factor", high, f"above low_freq_factor = {low}")


def _refuse_lengths(path: Path, place: str, parameters: Mapping[str, Any], config: Any) -> None:
    """Refuse lists of factors that are not one for each frequency: one factor would be taken for all."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    count = int(head_size * (parameters.get("partial_rotary_factor") or 1)) // 2
    for name in ("short_factor", "long_factor"):
        if len(parameters[name]) != count:
            raise _wrong(path, place, name, parameters[name], f"a list of {count} numbers")


def scaled_length(parameters: Mapping[str, Any] | None, length: int) -> int:
    """Return the longest sequence of rope parameters for a stated length.

    `linear` and `yarn` stretch positions by their factor, others state the stretched length, and `dynamic` is not
    stretched at all: see `rope`.
    Rope parameters by layer type (Gemma 3) come with a configuration that already states the full length, and so does
    a yarn without a factor.
    """
    parameters = parameters or {}
    kind, factor = parameters.get("rope_type"), parameters.get("factor")
    if kind not in ("linear", "yarn") or factor is None:
        return length
    original = parameters.get("original_max_position_embeddings") if kind == "yarn" else None
    return int((original or length) * float(factor))


def _sets(place: str, parameters: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return the sets of parameters with their places in the configuration: one, or one for each layer type."""
    if not isinstance(parameters, Mapping) or not parameters:
        return
    other = {name: value for name, value in parameters.items() if name not in _CHECKS}
    nested = {name: value for name, value in other.items() if isinstance(value, Mapping)}
    if not nested:
        yield place, parameters
    for name, value in nested.items():
        yield f"{place}.{name}", value


def _wrong(path: Path, place: str, name: str, value: Any, wanted: str) -> ModelError:
    return ModelError(
        f"{path / 'config.json'}: {place}.{name} = {value!r:.60} is not {wanted}",
        fix="correct it, or download config.json again",
    )
