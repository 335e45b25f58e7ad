"""What transformers' folder of models holds is kept from one start to the next, until a file changes."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils import import_utils

import slotline.plugins.model_families.transformers_model  # noqa: F401
from slotline.plugins.model_families.folder_contents import keep_contents


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `models` of one model, beside the module that reads it."""
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "library" / "models" / "one").mkdir(parents=True)
    (tmp_path / "library" / "utils").mkdir()
    (tmp_path / "library" / "utils" / "import_utils.py").touch()
    (tmp_path / "library" / "models" / "one" / "modeling_one.py").write_text('__all__ = ["One"]\n')
    return tmp_path / "library"


def look(library: Path, read: list[str] | None = None) -> Any:
    """What a start finds in the folder. `read` gets the folders that were read for it."""
    utils = SimpleNamespace(__file__=str(library / "utils" / "import_utils.py"))

    def plain(path: str | Path) -> Any:
        if read is not None:
            read.append(Path(path).name)
        folders = [each for each in Path(path).iterdir() if each.is_dir()]
        if folders:
            return {each.name: utils.create_import_structure_from_path(each) for each in folders}
        return import_utils.create_import_structure_from_path.__wrapped__(path)

    utils.create_import_structure_from_path = lru_cache(plain)
    keep_contents(utils, library / "models")
    return utils.create_import_structure_from_path(str(library / "models"))


def test_the_second_start_reads_no_file_and_finds_the_same(library: Path) -> None:
    first = look(library)
    assert first == {"one": {frozenset({"torch"}): {"modeling_one": {"One"}}}}
    read: list[str] = []
    assert look(library, read) == first
    assert read == []


def test_any_change_of_a_file_is_seen(library: Path) -> None:
    file = library / "models" / "one" / "modeling_one.py"
    first = look(library)
    file.write_text('__all__ = ["Own"]\n')
    second = look(library)
    assert second == {"one": {frozenset({"torch"}): {"modeling_one": {"Own"}}}} != first
    (library / "models" / "two").mkdir()
    (library / "models" / "two" / "configuration_two.py").write_text('__all__ = ["Two"]\n')
    assert look(library)["two"] == {frozenset(): {"configuration_two": {"Two"}}}


def test_a_damaged_file_is_read_again(library: Path, tmp_path: Path) -> None:
    first = look(library)
    (kept,) = (tmp_path / "cache" / "kernels").glob("*.names")
    kept.write_bytes(kept.read_bytes()[:-1] + b"?")
    read: list[str] = []
    assert look(library, read) == first
    assert read == ["models", "one"]


def test_what_is_kept_of_transformers_is_what_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))
    folder = Path(import_utils.__file__).parents[1] / "models"
    utils = SimpleNamespace(__file__=import_utils.__file__)
    for _ in range(2):
        utils.create_import_structure_from_path = lru_cache(import_utils.create_import_structure_from_path.__wrapped__)
        keep_contents(utils, folder)
        found = utils.create_import_structure_from_path(folder)
    assert found == import_utils.create_import_structure_from_path(folder)
    assert "LlamaForCausalLM" in found["llama"][frozenset({"torch"})]["modeling_llama"]
