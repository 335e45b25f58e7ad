"""GGUF files run from their path, with their own tokenizer and metadata."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gguf")

import gguf_files
import torch
from attrs import evolve
from quantized_engines import answer, engine, expected, same

from slotline.plugins.weight_formats.gguf.blocks import TYPES, decoded
from slotline.registry.errors import ModelError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.plain(tmp_path_factory.mktemp("plain"))


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", TYPES)
def test_a_file_answers_like_its_dequantized_model(kind: str, plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    gguf_files.write(plain, file, tmp_path / "meant", kind)
    llm = engine(file)
    same(answer(llm), expected(tmp_path / "meant"))
    assert {group.scheme for group in llm.plan.weight_groups} == {evolve(TYPES[kind].scheme, activation="")}
    assert "gguf (slotline" in llm.plan.explain()
    assert llm.tokenizer.encode("import os")


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_mean_what_the_library_says(kind: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = gguf_files.blocks(torch.randn(6, 512).numpy(), kind)
    found = decoded(TYPES[kind], torch.from_numpy(rows))
    found.check("weight")
    wanted = torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind]))
    torch.testing.assert_close(found.dequantize(), wanted, atol=1e-5, rtol=1e-5)


def test_a_file_is_unpacked_once_and_found_in_a_folder(plain: Path, tmp_path: Path, own_cache: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    gguf_files.write(plain, folder / "tiny.gguf", tmp_path / "meant", "Q8_0")
    engine(folder)
    (unpacked,) = (own_cache / "unpacked").iterdir()
    before = (unpacked / "model.safetensors").stat().st_mtime_ns
    engine(folder / "tiny.gguf")
    assert [*(own_cache / "unpacked").iterdir()] == [unpacked]
    assert (unpacked / "model.safetensors").stat().st_mtime_ns == before
    (folder / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"holds 2 checkpoints: other\.gguf, tiny\.gguf"):
        engine(folder)


@pytest.mark.parametrize("keep", [0.001, 0.02, 0.6])
def test_a_file_that_was_cut_is_refused(keep: float, plain: Path, tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    gguf_files.write(plain, file, tmp_path / "meant", "Q8_0")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ModelError, match=r"tiny\.gguf cannot be read as GGUF") as refused:
        engine(file)
    assert "it may have been cut" in str(refused.value.fix)
    assert not [*(own_cache / "unpacked").iterdir()]


def test_the_first_tensor_that_a_cut_file_lacks_is_named_with_the_numbers(plain: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    gguf_files.write(plain, file, tmp_path / "meant", "Q8_0")
    content = file.read_bytes()
    file.write_bytes(content[:-1000])
    with pytest.raises(ModelError, match=rf"tensor \S+ ends at byte \d+, and the file has {len(content) - 1000}"):
        engine(file)
