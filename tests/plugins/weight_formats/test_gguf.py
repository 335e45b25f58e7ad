"""GGUF files run from their path, with their own tokenizer and metadata."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("gguf")

import gguf_files
import torch
from attrs import evolve
from quantized_engines import answer, engine, expected, same

from slotline.plugins.weight_formats.gguf.blocks import TYPES, decoded
from slotline.plugins.weight_formats.gguf.metadata import refuse_ignored
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


IGNORED: dict[str, tuple[object, ...]] = {
    "llama.rope.scaling.type": ("linear", "yarn"),
    "llama.rope.scaling.factor": (4.0,),
    "llama.rope.scaling.attn_factor": (0.5,),
    "llama.rope.scaling.yarn_log_multiplier": (0.1,),
    "llama.rope.scale_linear": (2.0,),
    "llama.attention.key_length": (32,),
    "llama.attention.value_length": (32,),
    "llama.attention.scale": (1.0,),
    "llama.attention.sliding_window": (16,),
    "llama.attention.clamp_kqv": (8.0,),
    "llama.attention.max_alibi_bias": (8.0,),
    "llama.attention.causal": (False,),
    "llama.attention.layer_norm_epsilon": (0.1,),
    "llama.attn_logit_softcapping": (50.0,),
    "llama.final_logit_softcapping": (30.0,),
    "llama.logit_scale": (0.1,),
    "llama.embedding_scale": (12.0,),
    "llama.residual_scale": (0.5,),
    "llama.expert_count": (4,),
    "llama.expert_used_count": (2,),
    "llama.expert_weights_scale": (2.5,),
    "llama.leading_dense_block_count": (1,),
    "llama.nextn_predict_layers": (1,),
    "llama.swin_norm": (True,),
    "general.type": ("adapter",),
    "general.quantization_version": (1,),
    "split.count": (2,),
}
"""Keys that llama.cpp reads and transformers does not, with values that change the model."""
HARMLESS = {
    "general.type": "model",
    "general.name": "another",
    "general.file_type": 7,
    "general.quantization_version": 2,
    "general.author": "somebody",
    "quantize.imatrix.entries_count": 3,
    "split.count": 1,
    "llama.context_length": 512,
    "llama.tensor_data_layout": "Meta AI original pth",
    "llama.rope.scaling.type": "none",
    "llama.rope.scaling.factor": 1.0,
    "llama.rope.scaling.original_context_length": 512,
    "llama.rope.scaling.finetuned": True,
    "llama.attention.causal": True,
    "llama.attention.scale": 0.125,
    "llama.expert_count": 0,
    "llama.logit_scale": 1.0,
}
COUNTED = {
    "llama.rope.freq_base": (700.0, "rope_theta"),
    "llama.attention.layer_norm_rms_epsilon": (0.25, "rms_norm_eps"),
}
"""Keys that are read, with their names in config.json."""


@pytest.fixture(scope="module")
def parsed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], object]:
    """Values of a file's keys, and the configuration that transformers makes of it."""
    from gguf import GGUFReader
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import read_field

    folder = tmp_path_factory.mktemp("keys")
    gguf_files.write(plain, folder / "tiny.gguf", folder / "meant", "Q8_0")
    reader = GGUFReader(folder / "tiny.gguf")
    values = {key: field[0] if len(field := read_field(reader, key)) == 1 else field for key in reader.fields}
    return values, AutoConfig.from_pretrained(folder, gguf_file="tiny.gguf", trust_remote_code=False)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in IGNORED.items() for value in values])
def test_a_key_that_nothing_reads_is_refused_by_name(
    key: str, value: object, parsed: tuple[dict[str, object], object]
) -> None:
    values, config = parsed
    changed = {**values, key: value}
    with pytest.raises(ModelError, match=rf"its key {key} = .* would change the model") as refused:
        refuse_ignored(Path("tiny.gguf"), changed, changed.__getitem__, config)
    assert refused.value.fix


def test_each_key_of_a_file_counts_agrees_or_is_refused(plain: Path, tmp_path: Path) -> None:
    """Through a whole file: harmless keys change no answer, those that count do as in the dequantized model."""
    gguf_files.write(plain, tmp_path / "same.gguf", tmp_path / "same", "Q8_0", HARMLESS)
    same(answer(engine(tmp_path / "same.gguf")), expected(tmp_path / "same"))
    keys = {key: value for key, (value, _) in COUNTED.items()}
    gguf_files.write(plain, tmp_path / "other.gguf", tmp_path / "other", "Q8_0", keys)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config |= {name: value for value, name in COUNTED.values()} | {"rope_parameters": None}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    same(answer(engine(tmp_path / "other.gguf")), expected(tmp_path / "other"))
    gguf_files.write(plain, tmp_path / "long.gguf", tmp_path / "long", "Q8_0", {"llama.rope.scaling.type": "linear"})
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.type = 'linear'"):
        engine(tmp_path / "long.gguf")
