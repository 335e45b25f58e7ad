"""Models that take more than text, served by their text part alone: `multimodal.text_only`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_crops
import tiny_grids
import tiny_hearing
import tiny_sights
import tiny_speech
import tiny_vision
import torch
import transformers
from engine_driver import GREEDY
from safetensors.torch import load_file, save_file

from slotline.core import LLM
from slotline.planner.plan import Planned, make_plan
from slotline.registry.config import load_config
from slotline.registry.errors import ModelError, NegotiationError, RequestError

pytest.importorskip("PIL", reason="image processors need Pillow")
pytestmark = pytest.mark.usefixtures("one_thread")

BUILD: dict[str, Callable[[str, Path], Path]] = {
    "gemma4": tiny_sights.build,
    "gemma3": tiny_sights.build,
    "internvl": tiny_sights.build,
    "gemma4_ahead": tiny_sights.build,
    "mistral3": tiny_sights.build,
    "qwen3_5": tiny_grids.build,
    "qwen3_vl": tiny_grids.build,
    "voxtral": tiny_hearing.build,
    "idefics3": tiny_sights.build,
    "llava_next": tiny_sights.build,
    "llava_onevision": tiny_sights.build,
    "pixtral": tiny_sights.build,
    "llava": tiny_vision.build,
    "vipllava": tiny_vision.build,
    "qwen2_5_vl": tiny_grids.build,
    "qwen2_vl": tiny_grids.build,
    "qwen3_5_moe": tiny_grids.build,
    "qwen3_vl_moe": tiny_grids.build,
    "qwen2_audio": tiny_hearing.build,
    "smolvlm": tiny_sights.build,
    "phi4": lambda _, path: tiny_crops.build(path),
}
ENCODERS = ("vision", "visual", "image_embed", "audio", "projector", "connector")
TEXTS = ["def main(", "The quick brown fox jumps over", "import os"]
ROOM: dict[str, Any] = {"dtype": "float32", "memory": "8MiB", "max_model_len": 64}
ALONE = {**ROOM, "multimodal.text_only": True}

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root, made = tmp_path_factory.mktemp("whole"), dict[str, Path]()

    def get(name: str) -> Path:
        if name not in made:
            made[name] = BUILD[name](name, root / name)
        return made[name]

    return get


@pytest.fixture(scope="module")
def text_files(whole: Folder, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return the folder of a model without its encoders' weights and without its processors' files."""
    root, made = tmp_path_factory.mktemp("text"), dict[str, Path]()

    def get(name: str) -> Path:
        if name not in made:
            made[name] = root / name
            made[name].mkdir()
            for file in whole(name).iterdir():
                if file.is_file() and "processor" not in file.name and file.suffix != ".safetensors":
                    (made[name] / file.name).write_bytes(file.read_bytes())
            weights = load_file(whole(name) / "model.safetensors")
            kept = {key: value for key, value in weights.items() if not any(part in key for part in ENCODERS)}
            assert len(kept) < len(weights)
            save_file(kept, made[name] / "model.safetensors", {"format": "pt"})
        return made[name]

    return get


def generate(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(TEXTS, GREEDY, progress=False)]


def planned(path: Path, **settings: Any) -> Planned:
    return make_plan(load_config(values={"model": str(path), "dtype": "float32", **settings}))


def of_transformers(path: Path) -> list[list[int]]:
    """What the whole model makes of the texts."""
    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    tokenizer, found = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False), []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": GREEDY.max_tokens, "do_sample": False}
        with torch.no_grad():
            found.append(model.eval().generate(input_ids=ids, pad_token_id=0, **given)[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.spread(3, slow=5)
@pytest.mark.parametrize("name", BUILD)
def test_the_text_part_gives_transformers_tokens_without_the_encoder(
    name: str, whole: Folder, text_files: Folder
) -> None:
    llm = LLM(text_files(name), **ALONE, **{"scheduler.max_batched_tokens": 5})
    assert generate(llm) == of_transformers(whole(name))
    assert "its encoders are left out" in " ".join(note.text for note in llm.plan.notes)
    assert llm.engine.extension("multimodal") is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4", "qwen2_5_vl"])
def test_the_whole_model_gives_the_same_text(name: str, whole: Folder) -> None:
    assert generate(LLM(whole(name), **ROOM)) == generate(LLM(whole(name), **ALONE))


@pytest.mark.exhaustive
def test_what_only_the_general_family_serves_is_served(whole: Folder, tmp_path: Path) -> None:
    path = whole("gemma4")
    exact = generate(LLM(path, **ALONE, batch_invariant=True))
    assert exact == of_transformers(path)
    assert generate(LLM(path, **ALONE, **{"compile.mode": "stock", "compile.backend": "eager"})) == exact
    rounded = LLM(path, **ALONE, **{"weights.quantize": "int8"})
    assert rounded.plan.weight_groups
    rounded.reload_weights()
    assert len(generate(rounded)[0]) == GREEDY.max_tokens
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    assert len(generate(LLM(tmp_path, **ALONE, **{"load.format": "dummy"}))[0]) == GREEDY.max_tokens


@pytest.mark.parametrize(
    ("refused", "error"),
    [({"weights.quantize": "int8"}, ModelError), ({"load.format": "dummy"}, NegotiationError)],
)
def test_the_family_with_the_encoder_says_that_text_alone_would_do(
    refused: dict[str, Any], error: type[Exception], whole: Folder
) -> None:
    with pytest.raises(error, match="transformers_vision") as caught:
        planned(whole("gemma4"), **refused)
    assert "or set multimodal.text_only = true to serve its text part alone" in str(caught.value)


def test_items_are_refused_by_the_name_of_the_key(whole: Folder) -> None:
    llm = LLM(whole("gemma4"), **ALONE)
    prompt = {"prompt": "a", "multi_modal_data": {"image": tiny_vision.image(0)}}
    message = {"role": "user", "content": [{"type": "image", "image": tiny_vision.image(0)}]}
    template = "{{ messages[0]['content'] }}"
    for refused in (lambda: llm.generate(prompt), lambda: llm.chat([message], chat_template=template)):
        with pytest.raises(RequestError, match=r"image, and multimodal.text_only = true serves .* text part") as caught:
            refused()
        assert "set multimodal.text_only = false" in str(caught.value)
    assert len(generate(llm)[0]) == GREEDY.max_tokens


def test_a_model_whose_text_part_no_family_serves_alone_is_refused(tmp_path: Path) -> None:
    path = tiny_speech.build(tmp_path / "whisper")
    with pytest.raises(NegotiationError, match=r"no model family .* text part of Whisper.* with audio") as caught:
        LLM(path, **ALONE)
    assert "set multimodal.text_only = false" in str(caught.value)


def test_a_text_model_stays_with_its_family(tiny: Callable[..., Path]) -> None:
    assert planned(tiny("llama"), **{"multimodal.text_only": True}).family_descriptor.name == "transformers_decoder"


@pytest.mark.parametrize(("value", "fits"), [("vision", True), ("all", False)])
def test_a_decoder_is_causal_where_only_tokens_of_an_image_see_each_other(
    value: str, fits: bool, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    for file in tiny("gemma4").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "use_bidirectional_attention": value}))
    if fits:
        assert planned(tmp_path).facts.modalities == ()
    else:
        with pytest.raises(ModelError, match="sets use_bidirectional_attention, so it is no causal decoder"):
            planned(tmp_path)


def test_a_checkpoint_that_was_saved_without_its_encoder_is_refused_with_the_key(whole: Folder, tmp_path: Path) -> None:
    for file in whole("gemma4").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config": None}))
    with pytest.raises(ModelError, match=r"vision_config = null, so this Gemma4.* sees nothing") as caught:
        planned(tmp_path)
    assert "set multimodal.text_only = true" in str(caught.value)
