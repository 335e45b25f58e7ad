"""Methods that attrs and dataclasses write are compiled once for all starts."""

from __future__ import annotations

import builtins
import dataclasses
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


def fail_inside() -> None:
    with kept_code():
        assert "compile" in vars(_make)
        raise KeyError
