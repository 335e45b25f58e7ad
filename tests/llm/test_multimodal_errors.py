"""Bad inputs besides text: each is refused alone, with the value and the fix, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import GREEDY, run_all
from tiny_vision import greedy_reference, image

from slotline.core import LLM, BeamSearchParams
from slotline.plugins.multimodal.features import Feature
from slotline.registry.errors import IntegrityError, ModelError, RequestError

pytest.importorskip("PIL", reason="image processors need Pillow")
LLAVA = "LlavaForConditionalGeneration"
pytestmark = pytest.mark.usefixtures("one_thread")

Vision = Callable[..., Path]
Engines = Callable[..., LLM]


@pytest.mark.parametrize(
    ("text", "data", "message"),
    [
        ("<image>", {"audio": [1]}, "multi_modal_data has audio; this model takes image"),
        ("<image>", [image(0)], "is no mapping"),
        ("<image>", {}, "1 image placeholder tokens .* items for 0"),
        ("<image>", {"image": []}, "1 image placeholder tokens .* multi_modal_data 0 items"),
        ("no place", {"image": image(0)}, "0 image placeholder tokens .* multi_modal_data 1 items"),
        ("<image> <image>", {"image": image(0)}, "2 image placeholder tokens .* multi_modal_data 1 items"),
        ("<image>", {"image": [image(0), image(1)]}, "1 image placeholder tokens .* multi_modal_data 2 items"),
        ("<image>", {"image": "cat.png"}, "image='cat.png' cannot be read: No such file"),
        ("<image>", {"image": b"no image"}, "an image cannot be read"),
        ("<image>", {"image": "http://127.0.0.1/a.png"}, "multimodal.urls allows no host"),
        ("<image>", {"image": object()}, "cannot be read by LlavaProcessor"),
        ("<image>", {"image": np.zeros((2, 3, 4, 5, 6))}, "cannot be read by LlavaProcessor"),
        (" ".join(["<image>"] * 8), {"image": [image(0)] * 8}, "the prompt has 79 tokens; at most 63"),
    ],
)
def test_a_wrong_item_is_refused_by_name(
    text: str, data: Any, message: str, tiny_vision_model: Vision, engines: Engines
) -> None:
    llm = engines(tiny_vision_model())
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate({"prompt": text, "multi_modal_data": data}, GREEDY)
    assert caught.value.fix
    assert not llm.engine.has_work


def test_a_wrong_prompt_among_others_is_named_and_none_runs(tiny_vision_model: Vision, engines: Engines) -> None:
    llm = engines(tiny_vision_model())
    good = {"prompt": "a <image>", "multi_modal_data": {"image": image(0)}}
    with pytest.raises(RequestError, match="prompt 1: the prompt has 1 image placeholder"):
        llm.generate([good, "b <image>"], GREEDY)
    assert not llm.engine.has_work


def test_beam_search_refuses_images_by_the_name_that_the_caller_gave(
    tiny_vision_model: Vision, engines: Engines
) -> None:
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": image(0)}}
    with pytest.raises(RequestError, match="beam search with multi_modal_data in a prompt"):
        engines(tiny_vision_model()).beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2))


@pytest.mark.parametrize("key", ["cache_tokens", "max_tokens_per_step"])
def test_an_item_above_a_limit_is_refused_with_the_size_that_it_needs(
    key: str, tiny_vision_model: Vision, engines: Engines
) -> None:
    llm = engines(tiny_vision_model(), **{f"multimodal.{key}": 8})
    with pytest.raises(RequestError, match=f"an item has 9 embeddings, above multimodal.{key}=8") as caught:
        llm.generate({"prompt": "<image>", "multi_modal_data": {"image": image(0)}}, GREEDY)
    assert f"multimodal.{key} = 9" in str(caught.value)


def test_without_chunked_prefill_all_items_of_a_prompt_must_fit(tiny_vision_model: Vision, engines: Engines) -> None:
    path = tiny_vision_model()
    llm = engines(path, **{"scheduler.chunked_prefill": False, "multimodal.cache_tokens": 17})
    with pytest.raises(RequestError, match="a prompt that is not split has 18 embeddings"):
        llm.generate({"prompt": "<image><image>", "multi_modal_data": {"image": [image(0), image(1)]}}, GREEDY)
    twice = {"prompt": "<image><image>", "multi_modal_data": {"image": [image(0), image(0)]}}
    assert llm.generate(twice, GREEDY)[0].outputs[0].token_ids == greedy_reference(path, "<image><image>", [0, 0], 20)


def test_a_model_of_text_alone_refuses_images(tiny: Callable[..., Path], engines: Engines) -> None:
    llm = engines(tiny("llama"))
    with pytest.raises(RequestError, match="multi_modal_data has image, and this model takes text alone"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": image(0)}}, GREEDY)
    empty = llm.generate({"prompt": "a", "multi_modal_data": {"image": []}}, GREEDY)
    assert len(empty[0].outputs[0].token_ids) == 20


def test_features_for_a_model_of_text_alone_are_refused(tiny: Callable[..., Path], engines: Engines) -> None:
    llm = engines(tiny("llama"))
    feature = Feature(modality="image", mm_hash="00", positions=np.arange(2), inputs={})
    with pytest.raises(RequestError, match="1 features for a model of text alone"):
        llm.engine.add("a", [5, 6, 7], GREEDY, features=(feature,))


def test_a_decoder_with_logits_of_its_own_is_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlavaConfig(text_config=transformers.Gemma2Config(), architectures=[LLAVA])
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"has the decoder Gemma2ForCausalLM \(gemma2\), which is not served"):
        LLM(tmp_path)


def test_a_checkpoint_without_its_processor_is_refused(tiny_vision_model: Vision, tmp_path: Path) -> None:
    for file in tiny_vision_model().iterdir():
        if "processor" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match="no image processor in") as caught:
        LLM(tmp_path, dtype="float32", memory="4MiB", max_model_len=64)
    assert "slotline[multimodal]" in str(caught.value)


@pytest.mark.parametrize(("fault", "asynchronous"), [("raises", False), ("too few", False), ("raises", True)])
def test_an_item_that_cannot_be_encoded_ends_its_requests_alone(
    fault: str, asynchronous: bool, tiny_vision_model: Vision, engines: Engines
) -> None:
    path = tiny_vision_model()
    llm = engines(path, **{"cache.prefix_caching": False, "scheduler.async": asynchronous})
    model: Any = llm.engine.extension("multimodal").encoder.model
    bad, original = model.process("image", image(7)).inputs["pixel_values"], model.encode

    def encode(modality: str, items: Any) -> Any:
        wrong = [bool((item["pixel_values"] == bad).all()) for item in items]
        if any(wrong) and fault == "raises":
            raise RuntimeError("a pixel too many")
        outputs = original(modality, items)
        return [output[1:] if broken else output for output, broken in zip(outputs, wrong, strict=True)]

    model.encode = encode
    try:
        prompts = [("a <image> b", [0]), ("c <image>", [7]), ("d <image>", [7]), ("e", [])]
        outputs = llm.generate(
            [{"prompt": t, "multi_modal_data": {"image": [image(s) for s in seeds]}} for t, seeds in prompts], GREEDY
        )
    finally:
        del model.encode
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "error", "error", "length"]
    expected = "a pixel too many" if fault == "raises" else "encoded 1 items of modality 'image' to"
    assert expected in str(outputs[1].outputs[0].stop_reason)
    for index in (0, 3):
        assert outputs[index].outputs[0].token_ids == greedy_reference(path, *prompts[index], 20)


def test_embeddings_that_differ_from_the_cache_are_seen(tiny_vision_model: Vision, engines: Engines) -> None:
    llm = engines(tiny_vision_model())
    encoding = llm.engine.extension("multimodal").encoder
    llm.generate({"prompt": "a <image>", "multi_modal_data": {"image": image(0)}}, GREEDY)
    kept = dict(encoding.outputs)
    encoding.outputs.clear()
    llm.engine.add("b", llm.tokenizer.encode("b"), GREEDY)
    with pytest.raises(IntegrityError, match="encoder outputs and their cache differ"):
        llm.engine.step()
    encoding.outputs |= kept
    run_all(llm)
