"""Methods that attrs and dataclasses write, and regular expressions, are compiled once for all starts."""

from __future__ import annotations

import builtins
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from attr import _make
from attrs import make_class

from slotline.registry.kept_code import kept_code


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))
    return tmp_path


def made(*fields: str) -> tuple[type, type]:
    """A class of attrs and a dataclass of the same fields."""
    return make_class("Point", list(fields), frozen=True), dataclasses.make_dataclass(
        "Place", [(field, int) for field in fields], frozen=True
    )


def start(*fields: str) -> tuple[tuple[type, type], int]:
    """What a start makes, and how often it compiled."""
    plain, count = builtins.compile, 0

    def compiled(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return plain(*given, **named)

    builtins.compile = compiled
    try:
        with kept_code():
            classes = made(*fields)
    finally:
        builtins.compile = plain
    return classes, count


def test_the_second_start_compiles_nothing_and_its_classes_are_the_same() -> None:
    assert start("x", "y")[1] > 0
    classes, count = start("x", "y")
    assert count == 0
    for ours, plain in zip(classes, made("x", "y"), strict=True):
        one = ours(1, y=2)
        assert repr(one) == repr(plain(1, 2))
        assert one == ours(1, 2) != ours(2, 1)
        assert hash(one) == hash(ours(1, 2))
        assert ours.__init__.__annotations__ == plain.__init__.__annotations__
        with pytest.raises(AttributeError):
            one.x = 3
        with pytest.raises(TypeError, match="'y'"):
            ours(1)


def test_another_class_gets_code_of_its_own() -> None:
    start("x", "y")
    classes, count = start("x", "z")
    assert count > 0
    assert [repr(each(1, 2)) for each in classes] == ["Point(x=1, z=2)", "Place(x=1, z=2)"]
    assert start("x", "y")[1] == start("x", "z")[1] == 0


def test_a_damaged_file_costs_one_compilation_and_no_class(cache: Path) -> None:
    start("x")
    (file,) = cache.glob("*.code")
    file.write_bytes(file.read_bytes()[:-1])
    classes, count = start("x")
    assert count > 0
    assert [each(1).x for each in classes] == [1, 1]
    assert start("x")[1] == 0


def test_nothing_is_left_in_place_where_nothing_can_be_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("SLOTLINE_CACHE", str(cache / "file"))
    with pytest.raises(KeyError):
        fail_inside()
    assert "compile" not in vars(_make)
    assert "exec" not in vars(dataclasses)
    assert re._compiler.compile.__module__ == "re._compiler"


def fail_inside() -> None:
    with kept_code():
        assert "compile" in vars(_make)
        raise KeyError


PATTERNS = (
    (r"(?P<head>layers\.\d+)\.(?P<rest>w[123])|(x)", 0, "layers.7.w3"),
    (r"\bk\u00e4se\b", re.IGNORECASE, "K\u00c4SE"),
    (r"\w+", 0, "k\u00e4se"),
    (r"\w+", re.ASCII, "k\u00e4se"),
    (rb"\w+", 0, b"k\xe4se"),
    (rb"(?L)\w", 0, b"b"),
    ("(?x) a  b", 0, "ab"),
    ("[\udc80]", 0, "\udc80"),
)


def patterns(monkeypatch: pytest.MonkeyPatch) -> tuple[list[re.Pattern[Any]], int]:
    """The patterns as a start makes them, and how many it translated."""
    translate, count = re._compiler._code, 0

    def translated(*given: Any) -> Any:
        nonlocal count
        count += 1
        return translate(*given)

    re.purge()
    with monkeypatch.context() as patched, kept_code():
        patched.setattr(re._compiler, "_code", translated)
        made = [re.compile(pattern, flags) for pattern, flags, _ in PATTERNS]
    return made, count


def test_a_second_start_translates_no_regular_expression_and_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert patterns(monkeypatch)[1] == len(PATTERNS)
    made, count = patterns(monkeypatch)
    assert count == 0
    re.purge()
    for ours, (pattern, flags, text) in zip(made, PATTERNS, strict=True):
        plain = re.compile(pattern, flags)
        assert ours == plain
        assert (ours.flags, ours.groups, ours.groupindex) == (plain.flags, plain.groups, plain.groupindex)
        found, expected = ours.search(text), plain.search(text)
        assert found[0] == expected[0]
        assert (found.groups(), found.groupdict(), found.lastgroup) == (
            expected.groups(),
            expected.groupdict(),
            expected.lastgroup,
        )


def test_a_pattern_that_prints_does_so_in_every_start(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        re.purge()
        with kept_code():
            assert re.compile("a", re.DEBUG).match("a")
        assert "LITERAL 97" in capsys.readouterr().out


def test_a_wrong_pattern_is_an_error_in_every_start() -> None:
    for _ in range(2):
        re.purge()
        with kept_code(), pytest.raises(re.error, match="unterminated"):
            re.compile("(a")


def test_contexts_nest_and_the_last_one_keeps_what_all_of_them_made(cache: Path) -> None:
    with kept_code():
        with kept_code():
            made("x")
        assert list(cache.glob("*.code")) == []
        made("y")
    assert len(list(cache.glob("*.code"))) == 1
    assert start("x")[1] == start("y")[1] == 0
