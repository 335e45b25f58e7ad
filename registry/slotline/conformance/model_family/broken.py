"""L2 of folders that are no checkpoint, or a damaged one: a ModelError that says what to do, never another error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slotline.registry.descriptor import Kind
from slotline.registry.errors import ModelError
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.model_family import FamilyWorld, by_example, tensors_in
from slotline.testing.refusal_checks import UNKNOWN


def _refused(world: FamilyWorld, folder: Path, what: str, *, load: bool) -> ModelError:
    """Return the error that a folder is refused with, by `inspect` or else by `load`."""
    try:
        world.load(folder) if load else world.inspect(folder)
    except ModelError as error:
        if not error.message.strip() or not error.fix:
            raise Failed(f"{what}: the refusal names no remedy: {error}") from error
        return error
    except Exception as error:  # a plugin may raise anything
        raise Failed(f"{what}: {type(error).__name__} instead of a ModelError: {error}") from error
    raise Failed(f"{what}: it was taken")


@check(Kind.MODEL_FAMILY, "model_family.broken.config", Level.HOSTILE, cases=by_example, cost=0.3)
def broken_configurations_are_refused(run: Run) -> None:
    """A config.json that is missing, no JSON, no object, or of another architecture is refused by `inspect`."""
    world = FamilyWorld(run)
    good = json.loads((world.folder() / "config.json").read_text(encoding="utf-8"))
    texts: dict[str, str | None] = {
        "a folder without config.json": None,
        "an empty config.json": "",
        "a config.json that was cut": json.dumps(good)[: len(json.dumps(good)) // 2],
        "a config.json with a list": "[]",
        "a config.json of an unknown architecture": json.dumps({**good, "architectures": [UNKNOWN]}),
        "a config.json without an architecture": json.dumps({**good, "architectures": []}),
    }
    for what, text in texts.items():
        folder = world.copy()
        (folder / "config.json").unlink()
        if text is not None:
            (folder / "config.json").write_text(text, encoding="utf-8")
        error = _refused(world, folder, what, load=False)
        if str(folder) not in str(error) and UNKNOWN not in str(error) and "config.json" not in str(error):
            raise Failed(f"{what}: the refusal names neither the folder nor what is wrong: {error}")


@check(Kind.MODEL_FAMILY, "model_family.broken.values", Level.HOSTILE, cases=by_example, cost=2.0)
def strange_values_are_refused(run: Run) -> None:
    """A text in place of a whole number in config.json is refused, or changes nothing. It is no TypeError."""
    world = FamilyWorld(run)
    facts = world.inspect()
    config = json.loads((world.folder() / "config.json").read_text(encoding="utf-8"))
    numbers = [key for key, value in config.items() if type(value) is int]
    for key in numbers:
        folder = world.copy()
        (folder / "config.json").write_text(json.dumps({**config, key: UNKNOWN}), encoding="utf-8")
        _expect(world, folder, facts, f"{key} = {UNKNOWN!r} in config.json")


def _expect(world: FamilyWorld, folder: Path, facts: Any, what: str) -> None:
    from attrs import evolve

    try:
        found = world.inspect(folder)
    except ModelError as error:
        if not error.fix:
            raise Failed(f"{what}: the refusal names no remedy: {error}") from error
        return
    except Exception as error:  # a plugin may raise anything
        raise Failed(f"{what}: {type(error).__name__} instead of a ModelError: {error}") from error
    if evolve(found, path=facts.path) != facts:
        raise Failed(f"{what}: it was taken, and the facts are others")


@check(Kind.MODEL_FAMILY, "model_family.broken.files", Level.HOSTILE, cases=by_example, cost=0.6)
def broken_files_are_refused(run: Run) -> None:
    """Weights that are missing, empty, cut, or no weights at all are refused."""
    world = FamilyWorld(run)
    file = next(iter(tensors_in(world.folder()).values())).name
    changes: dict[str, Callable[[Path], Any]] = {
        "a folder without weights": lambda path: path.unlink(),
        "an empty file of weights": lambda path: path.write_bytes(b""),
        "a file of weights that was cut": lambda path: path.write_bytes(path.read_bytes()[:-64]),
        "a file of weights that was cut in its head": lambda path: path.write_bytes(path.read_bytes()[:40]),
        "a web page in place of weights": lambda path: path.write_text("<!doctype html><html>" * 40, encoding="utf-8"),
    }
    for what, change in changes.items():
        folder = world.copy()
        change(folder / file)
        _refused(world, folder, what, load=True)


@check(Kind.MODEL_FAMILY, "model_family.broken.dtype", Level.HOSTILE, cases=by_example, cost=0.2)
def strange_dtypes_are_refused(run: Run) -> None:
    """A dtype that no weights have is refused by `load`."""
    world = FamilyWorld(run)
    for dtype in (UNKNOWN, "int8"):
        try:
            world.load(dtype=dtype)
        except ModelError as error:
            if not error.fix:
                raise Failed(f"dtype {dtype!r}: the refusal names no remedy: {error}") from error
        except Exception as error:  # a plugin may raise anything
            raise Failed(f"dtype {dtype!r}: {type(error).__name__} instead of a ModelError: {error}") from error
        else:
            raise Failed(f"dtype {dtype!r} was taken")


@check(Kind.MODEL_FAMILY, "model_family.contract.folder", Level.CONTRACT, cost=0.05)
def no_folder_is_refused(run: Run) -> None:
    """An empty folder, and a path where nothing is, are refused by `inspect`."""
    from slotline.testing.environments.model_family import empty_folder

    family = run.subject.build(None)
    empty = empty_folder()
    for what, folder in (("an empty folder", empty), ("no folder", empty / "nothing")):
        try:
            family.inspect(folder)
        except ModelError as error:
            if not error.fix:
                raise Failed(f"{what}: the refusal names no remedy: {error}") from error
        except Exception as error:  # a plugin may raise anything
            raise Failed(f"{what}: {type(error).__name__} instead of a ModelError: {error}") from error
        else:
            raise Failed(f"{what}: it was taken")
