"""Pruning of video tokens: transformers' text of what the paper's rule leaves of a prompt, however steps are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_grids
import tiny_vision
import torch
from engine_driver import GREEDY
from tiny_grids import IMAGE, VIDEO, image, video

from slotline.core import LLM
from slotline.registry.errors import ConfigError, NegotiationError

pytest.importorskip("PIL", reason="image processors need Pillow")
pytestmark = pytest.mark.usefixtures("one_thread")

Engines = Callable[..., LLM]
Asked = Sequence[tuple[str, Sequence[int], Sequence[int]]]

RATE = 0.6
PROMPTS: Asked = [
    (f"a {VIDEO} b", [], [0]),
    (f"a {VIDEO} b {IMAGE} and {VIDEO}", [1], [1, 3]),
    (f"{IMAGE}{VIDEO}", [0], [2]),
    ("import os, sys, json", [], []),
]
ROOM: dict[str, Any] = {"block_size": 4, "memory": "16MiB", "max_model_len": 192}
PRUNED = {**ROOM, "multimodal.video_pruning_rate": RATE, "scheduler.max_batched_tokens": 13}


@pytest.fixture(scope="module")
def tiny_grid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("pruned")
    return cache(lambda name: tiny_grids.build(name, root / name))


def generate(llm: LLM, asked: Asked) -> list[list[int]]:
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": [image(i) for i in images], "video": [video(i) for i in videos]}}
        for text, images, videos in asked
    ]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, progress=False)]


def kept(seed: int, rate: float = RATE) -> list[bool]:
    """The paper's rule, token by token: a token is four patches, and those of the first row always stay."""
    shown = video(seed)
    rows, height, width = shown["video_grid_thw"][0].tolist()
    per_row = height * width // 4
    pixels = shown["pixel_values_videos"].numpy().reshape(rows, per_row, -1)
    changes = [
        (float(np.abs(pixels[row, i] - pixels[row - 1, i]).sum()), row, i)
        for row in range(1, rows)
        for i in range(per_row)
    ]
    fewest = sorted(changes)[: int(rate * len(changes))]
    fallen = {(row, i) for _, row, i in fewest}
    return [(row, i) not in fallen for row in range(rows) for i in range(per_row)]


def reference(path: Path, text: str, images: Sequence[int], videos: Sequence[int]) -> list[int]:
    """Greedy tokens of transformers, which embeds and places the whole prompt and then loses the pruned tokens."""
    whole, given = tiny_grids.inputs_of(path, text, images, videos)
    model = tiny_grids._oracle(path)[0]
    body, ids = model.model, torch.tensor([whole])
    grids = {name: given[name] for name in given if name.endswith("grid_thw") or name == "second_per_grid_ts"}
    with torch.no_grad():
        embeds, positions = body.get_input_embeddings()(ids), body.get_rope_index(
            ids, mm_token_type_ids=given.get("mm_token_type_ids", torch.zeros_like(ids)), **grids
        )[0]  # fmt: skip
        stays, deep = torch.ones_like(ids[0], dtype=torch.bool), dict[str, list[torch.Tensor]]()
        seen = {"image": ids[0] == model.config.image_token_id, "video": ids[0] == model.config.video_token_id}
        for name, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if pixels in given:
                found = getattr(body, f"get_{name}_features")(given[pixels], given[f"{name}_grid_thw"])
                embeds[0, seen[name]] = torch.cat(list(found.pooler_output))
                deep[name] = list(getattr(found, "deepstack_features", None) or ())
        stays[seen["video"]] = torch.tensor([one for seed in videos for one in kept(seed)], dtype=torch.bool)
        visual = seen["image"] | seen["video"]
        further: dict[str, Any] = {}
        if any(deep.values()):
            levels = [torch.zeros(len(whole), embeds.shape[-1]) for _ in next(filter(None, deep.values()))]
            for name, features in deep.items():
                for level, feature in zip(levels, features, strict=True):
                    level[seen[name]] = torch.cat(list(feature))
            further = {"deepstack_visual_embeds": [level[visual & stays] for level in levels]}
        embeds, positions, visual = embeds[:, stays], positions[:, :, stays], visual[stays]
        said: list[int] = []
        for _ in range(20):
            if further:
                more = torch.zeros(embeds.shape[1] - len(visual), dtype=torch.bool)
                further["visual_pos_masks"] = torch.cat([visual, more])[None]
            out = body.language_model(inputs_embeds=embeds, position_ids=positions, use_cache=False, **further)
            said.append(int(model.lm_head(out.last_hidden_state[0, -1]).argmax()))
            embeds = torch.cat([embeds, body.get_input_embeddings()(torch.tensor([said[-1:]]))], dim=1)
            positions = torch.cat([positions, positions[:, :, -1:].amax(0, keepdim=True).expand(3, 1, 1) + 1], dim=2)
    return said


def expected(path: Path, asked: Asked) -> list[list[int]]:
    return [reference(path, *one) for one in asked]


HARD: dict[str, dict[str, Any]] = {
    "async": {"scheduler.async": True},
    "chunks": {"scheduler.max_batched_tokens": 5, "cache.prefix_caching": False},
    "drafts": {"drafter.name": "ngram"},
}


@pytest.mark.spread(2, slow=1)
@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.behaviour(81)
def test_a_pruned_video_gives_transformers_tokens(
    hard: str, name: str, tiny_grid: Callable[[str], Path], engines: Engines
) -> None:
    path = tiny_grid(name)
    llm = engines(path, **{**PRUNED, **HARD[hard]})
    wanted = expected(path, PROMPTS)
    for _ in range(2):  # the second time from cached blocks
        assert generate(llm, PROMPTS) == wanted
    assert wanted != [tiny_grids.greedy_reference(path, text, i, 20, v) for text, i, v in PROMPTS]


def test_text_behind_a_pruned_video_goes_on_where_the_whole_video_ends(
    tiny_grid: Callable[[str], Path], engines: Engines
) -> None:
    path, asked = tiny_grid("qwen2_5_vl"), PROMPTS[1]
    model: Any = engines(path, **PRUNED).engine.runner.model
    plain: Any = engines(path, **ROOM).engine.extension("multimodal").reader
    pruned: Any = engines(path, **PRUNED).engine.extension("multimodal").reader
    ids = tiny_grids._oracle(path)[1](asked[0])["input_ids"]
    data = {"image": [image(1)], "video": [video(1), video(3)]}
    (whole, of_whole), (left, of_left) = plain.read(ids, data), pruned.read(ids, data)
    found, delta = model.axis_positions(left, [(f.modality, f.inputs) for f in of_left])
    wanted, _ = model.axis_positions(whole, [(f.modality, f.inputs) for f in of_whole])
    stays = np.ones(len(whole), bool)
    stays[np.asarray(whole) == model.facts.modalities[1].placeholder_token_id] = kept(1) + kept(3)
    assert (found == wanted[:, stays]).all()
    assert delta == wanted[:, -1].max() + 1 - len(left)
    assert len(left) == stays.sum() < len(whole) - 12
    assert [feature.size for feature in of_left if feature.modality == "video"] == [sum(kept(1)), sum(kept(3))]


@pytest.mark.behaviour(78)
def test_pruned_videos_of_a_step_are_encoded_one_by_one(
    tiny_grid: Callable[[str], Path], engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tiny_grid("qwen3_vl"), [(f"{VIDEO} a {VIDEO}", [], [0, 2])]
    for settings, calls in (({}, [2]), ({"multimodal.video_pruning_rate": RATE}, [1, 1])):
        llm = engines(path, **ROOM, **settings)
        encoder: Any = llm.engine.runner.model.hf_model.encoder
        features, grids = encoder.get_video_features, list[int]()

        def counted(
            pixel_values_videos: Any,
            video_grid_thw: Any,
            features: Any = features,
            grids: list[int] = grids,
            **options: Any,
        ) -> Any:
            grids.append(len(video_grid_thw))
            return features(pixel_values_videos, video_grid_thw, **options)

        monkeypatch.setattr(encoder, "get_video_features", counted)
        generate(llm, asked)
        assert grids == calls


def test_memory_is_measured_with_what_is_encoded_before_pruning(
    tiny_grid: Callable[[str], Path], engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines(tiny_grid("qwen3_vl"), **ROOM, **{"multimodal.video_pruning_rate": 0.5})
    extension, counts = llm.engine.extension("multimodal"), dict[str, int]()
    embeddings = extension.cache.max_tokens_per_step  # one of the made-up videos without pruning

    def counted(modality: str, items: Sequence[Any]) -> list[Any]:
        counts[modality] = len(items)
        return []

    monkeypatch.setattr(extension.encoder.model, "encode", counted)
    extension.profile_memory()
    assert (
        extension.encoder.model.example("video").token_ids.count(extension.reader.placeholders["video"]) == embeddings
    )
    assert counts["video"] == 2


@pytest.mark.parametrize("rate", [0.01, 0.99])
def test_the_first_frame_always_stays(rate: float, tiny_grid: Callable[[str], Path], engines: Engines) -> None:
    llm = engines(tiny_grid("qwen3_vl"), **ROOM, **{"multimodal.video_pruning_rate": rate})
    model: Any = llm.engine.runner.model
    still = {**video(3), "pixel_values_videos": torch.ones_like(video(3)["pixel_values_videos"])}
    for shown, wanted in ((video(3), kept(3, rate)), (still, None)):
        item = model.process("video", shown)
        mask = model.prune(item, rate).inputs["kept_video_tokens"]
        assert mask[0].all()
        assert int(mask.sum()) == mask.numel() - int(rate * (mask.numel() - len(mask[0])))
        assert wanted is None or mask.flatten().tolist() == wanted


def test_a_rate_of_zero_prunes_nothing(tiny_grid: Callable[[str], Path], engines: Engines) -> None:
    path = tiny_grid("qwen2_5_vl")
    llm = engines(path, **{**PRUNED, "multimodal.video_pruning_rate": 0})
    assert generate(llm, PROMPTS[:2]) == [
        tiny_grids.greedy_reference(path, text, images, 20, videos) for text, images, videos in PROMPTS[:2]
    ]


def test_models_without_videos_refuse_a_rate(
    tiny_vision_model: Callable[[str], Path], tiny: Callable[[str], Path], engines: Engines
) -> None:
    path = tiny_vision_model(tiny_vision.VARIANTS[0])
    rate = {"multimodal.video_pruning_rate": 0.5}
    with pytest.raises(NegotiationError, match="LlavaForConditionalGeneration takes image besides text, and no video"):
        engines(path, **rate)
    with pytest.raises(NegotiationError, match="LlamaForCausalLM takes nothing besides text"):
        engines(tiny("llama_deep"), **rate)
    for wrong in (1, -0.1, "half"):
        with pytest.raises(ConfigError, match="video_pruning_rate"):
            engines(path, **{"multimodal.video_pruning_rate": wrong})
