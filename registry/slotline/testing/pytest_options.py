"""Options of the pytest plugin: command line and configuration file."""

from __future__ import annotations

import tomllib
from argparse import SUPPRESS
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from slotline.registry.config.toml_text import parse_toml_value
from slotline.registry.errors import ConfigError
from slotline.testing.check import Level
from slotline.testing.expectations import Expectations, read_expectations

_EXPECTED, _DISABLED = "slotline_expected_failures", "slotline_disabled"


@frozen(kw_only=True)
class Asked:
    """Options given by the user.

    Attributes:
        plugin: the text that names the plugin, empty if there is none.
        folder: the folder that its relative file refers to.
        level: the highest level.
        device: ``cpu``, ``cuda`` or None for the available one.
        wanted: prefixes of check ids, or whole keys. Empty for all.
        exhaustive: True to run all combinations instead of one case for each value.
        seed: changes every random choice.
        options: the plugin's own table.
        expected, disabled: checks that are expected to fail, and checks that are disabled.
    """

    plugin: str
    folder: Path
    level: Level
    device: str | None
    wanted: tuple[str, ...]
    exhaustive: bool
    seed: int
    options: Mapping[str, Any]
    expected: Expectations
    disabled: Expectations


def add_options(parser: pytest.Parser) -> None:
    """Add the options to pytest's parser."""
    group = parser.getgroup("slotline", "slotline's conformance suite")
    name = "NAME, kind:NAME, module:attribute or ./file.py:attribute of the plugin to test"
    group.addoption("--slotline-plugin", metavar="NAME", help=name)
    group.addoption("--slotline-level", metavar="L3", help="the highest level to run (default: L5)")
    group.addoption("--slotline-report", metavar="FILE", help="write the report as JSON")
    group.addoption(
        "--slotline-device", metavar="cpu|cuda", help="where to test (default: a GPU that the plugin takes)"
    )
    group.addoption("--slotline-exhaustive", action="store_true", help="all combinations, for nightly runs")
    group.addoption("--slotline-seed", type=int, default=0, metavar="N", help="other random choices (default: 0)")
    group.addoption(
        "--slotline-check",
        action="append",
        default=[],
        metavar="ID",
        help="this check, or those below this name; repeatable",
    )
    group.addoption(
        "--slotline-options",
        action="append",
        default=[],
        metavar="key=value",
        help="the plugin's own table; repeatable",
    )
    group.addoption("--slotline-stream", metavar="FILE", help=SUPPRESS)  # for `slotline conform`
    parser.addini("slotline_plugin", name, default="")
    parser.addini("slotline_options", "key=value of the plugin's own table", type="linelist", default=[])
    parser.addini(_EXPECTED, "checks that are expected to fail: id=reason, or tables", type="linelist", default=[])
    parser.addini(_DISABLED, "checks that are switched off: id=reason, or tables", type="linelist", default=[])


def asked_of(config: pytest.Config) -> Asked:
    """Return the options' values.

    Raises:
        ConfigError: naming the wrong option.
    """
    option = config.getoption("--slotline-plugin")
    file = config.inipath
    in_file = not option and file is not None
    return Asked(
        plugin=option or config.getini("slotline_plugin"),
        folder=file.parent if in_file and file is not None else config.invocation_params.dir,
        level=_level(config.getoption("--slotline-level")),
        device=config.getoption("--slotline-device"),
        wanted=tuple(config.getoption("--slotline-check")),
        exhaustive=config.getoption("--slotline-exhaustive"),
        seed=config.getoption("--slotline-seed"),
        options=read_settings([*config.getini("slotline_options"), *config.getoption("--slotline-options")]),
        expected=read_expectations(_entries(config, _EXPECTED), _EXPECTED),
        disabled=read_expectations(_entries(config, _DISABLED), _DISABLED),
    )


def read_settings(texts: Iterable[str]) -> dict[str, Any]:
    """Return ``key=value`` texts as a mapping. A value is TOML, or text without quotes.

    Raises:
        ConfigError: for a text without ``=``.
    """
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{text!r} is not of the form key=value")
        parsed = parse_toml_value(value.strip())
        found[key.strip()] = value.strip() if parsed is None else parsed
    return found


def _level(text: str | None) -> Level:
    try:
        return Level.ENGINE if text is None else Level.parse(text)
    except ValueError as error:
        raise ConfigError(f"--slotline-level: {error}") from error


def _entries(config: pytest.Config, name: str) -> list[Any]:
    """Return the entries of a list. pytest itself accepts only texts, so tables are read from the file."""
    try:
        return list(config.getini(name))
    except (TypeError, pytest.UsageError) as error:  # by pytest's version
        found = _raw(config.inipath).get(name)
        if not isinstance(found, list):
            raise ConfigError(str(error)) from error
        return found


def _raw(path: Path | None) -> Mapping[str, Any]:
    if path is None or path.suffix != ".toml":
        return {}
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    found: Mapping[str, Any] = tree.get("pytest") or tree.get("tool", {}).get("pytest") or {}
    return found
