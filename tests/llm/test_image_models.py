"""Models that see images, one table: transformers' own text, whatever chunks, caches, drafts and preemption do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_sights
import tiny_vision
import torch
from engine_driver import GREEDY, recorded, recorded_items
from tiny_sights import SIGHTS, answer, image, video

from slotline.core import LLM
from slotline.plugins.multimodal import extension
from slotline.registry.errors import RequestError

pytest.importorskip("PIL", reason="image processors need Pillow")
pytestmark = pytest.mark.usefixtures("one_thread")

Engines = Callable[..., LLM]
Sight = Callable[[str], Path]
Asked = Sequence[tuple[str, tuple[int, ...]]]

TEXTS: Asked = [
    ("def {} main(", (0,)),
    ("class Row\n{}{}\n pass", (1, 0)),
    ("import os, sys, json", ()),
    ("The quick {} jumps over the {} word word", (2, 2)),
    ("{}", (3,)),
]
ROOM: dict[str, Any] = {"max_model_len": 160, "memory": "16MiB"}
KIB_PER_TOKEN = 4 * 2 * (16 + 16) * 4 // 1024


@pytest.fixture(scope="module")
def tiny_sight(tmp_path_factory: pytest.TempPathFactory) -> Sight:
    root, made = tmp_path_factory.mktemp("sights"), dict[str, Path]()

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tiny_sights.build(name, root / name)
        return made[name]

    return get


def asked(name: str) -> Asked:
    return [(text.replace("{}", SIGHTS[name].placeholder), seeds) for text, seeds in TEXTS]


def generate(llm: LLM, prompts: Asked) -> list[Any]:
    given = [
        {"prompt": text, "multi_modal_data": {"image": [image(seed) for seed in seeds]}} for text, seeds in prompts
    ]
    return llm.generate(given, GREEDY, progress=False)


def assert_same(name: str, path: Path, prompts: Asked, outputs: Sequence[Any]) -> None:
    """The outputs are transformers' for prompts that its processor has expanded."""
    wanted = [answer(name, path, text, seeds, 20) for text, seeds in prompts]
    assert [output.prompt_token_ids for output in outputs] == [prompt for prompt, _ in wanted]
    assert [output.outputs[0].token_ids for output in outputs] == [tokens for _, tokens in wanted]


@pytest.mark.spread(4, slow=2)
@pytest.mark.parametrize("name", SIGHTS)
def test_a_batch_gives_transformers_tokens_twice(name: str, tiny_sight: Sight, engines: Engines) -> None:
    path = tiny_sight(name)
    llm = engines(path, block_size=4, **ROOM)
    first = generate(llm, asked(name))
    assert_same(name, path, asked(name), first)
    again = generate(llm, asked(name))
    assert_same(name, path, asked(name), again)
    assert all(output.metrics.num_cached_tokens > 0 for output in again)
    other = [(text, tuple(seed + 4 for seed in seeds)) for text, seeds in asked(name)]  # other images of these sizes
    found = generate(llm, other)
    assert_same(name, path, other, found)
    assert found[0].outputs[0].token_ids != first[0].outputs[0].token_ids  # what the image shows matters


HARD: dict[str, dict[str, Any]] = {
    "chunks": {"scheduler.max_batched_tokens": 5, "cache.prefix_caching": False},
    "async": {"scheduler.max_batched_tokens": 7, "scheduler.async": True},
    "drafts": {"scheduler.max_batched_tokens": 14, "drafter.name": "ngram"},
    "preemption": {"scheduler.max_batched_tokens": 11, "memory": f"{80 * KIB_PER_TOKEN}KiB", "max_model_len": 76},
}
"""What cuts, repeats or delays steps."""


@pytest.mark.spread(3, slow=10)
@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize("name", SIGHTS)
def test_hard_steps_give_transformers_tokens(hard: str, name: str, tiny_sight: Sight, engines: Engines) -> None:
    path = tiny_sight(name)
    settings, run = {**ROOM, **HARD[hard]}, SIGHTS[name].longest_run
    if hard == "preemption" and name in ("idefics3", "smolvlm"):  # whose images have the most tokens
        settings |= {"memory": f"{100 * KIB_PER_TOKEN}KiB", "max_model_len": 96}
    if hard == "preemption" and name.startswith("gemma4"):  # whose prompts are twice as long
        settings |= {"memory": f"{(330 if run else 120) * KIB_PER_TOKEN}KiB", "max_model_len": 160}
    settings["scheduler.max_batched_tokens"] = max(settings["scheduler.max_batched_tokens"], run)
    llm = engines(path, block_size=4, **settings)
    with recorded(llm) as steps, recorded_items(llm) as items:
        outputs = generate(llm, asked(name))
    assert_same(name, path, asked(name), outputs)
    cut = [
        feature
        for step, of_step in zip(steps, items, strict=True)
        for row, feature in of_step.features
        for end in [int((step.num_computed + step.num_scheduled)[step.rows.tolist().index(row)])]
        if feature.start < end < feature.end
    ]
    if hard == "chunks" or run:
        assert bool(cut) != bool(run)  # an image whose tokens see each other is never cut
    if hard == "drafts":
        assert llm.engine.extension("drafts").counts.proposed > 0
    if hard == "preemption":
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


VIDEOS: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
    ("def <video> main(", (), (0,)),
    ("a <video> and <image>, then <video>", (1,), (1, 3)),
    ("a <image><video> word", (2,), (2,)),
]


def test_videos_of_frames_give_transformers_tokens(tiny_sight: Sight, engines: Engines) -> None:
    path = tiny_sight("llava_onevision")
    llm = engines(path, block_size=4, **ROOM, **{"scheduler.max_batched_tokens": 7, "scheduler.async": True})
    given = [
        {"prompt": text, "multi_modal_data": {"image": list(map(image, images)), "video": list(map(video, videos))}}
        for text, images, videos in VIDEOS
    ]
    wanted = [answer("llava_onevision", path, text, images, 20, videos) for text, images, videos in VIDEOS]
    for _ in range(2):
        outputs = llm.generate(given, GREEDY, progress=False)
        assert [(o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs] == wanted
    assert all(output.metrics.num_cached_tokens > 0 for output in outputs)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ([1, 2], "is no video"),
        ({"pixel_values_videos": torch.zeros(1, 0, 3, 16, 16)}, r"shape \[1, 0, 3, 16, 16\], not \[1, frames"),
        ({"pixel_values_videos": torch.zeros(1, 2, 3, 8, 16)}, r"shape \[1, 2, 3, 8, 16\], not \[1, frames"),
        ({"pixel_values_videos": "cat"}, "cannot be read"),
    ],
)
def test_what_is_no_video_of_frames_is_refused(item: Any, message: str, tiny_sight: Sight, engines: Engines) -> None:
    llm = engines(tiny_sight("llava_onevision"), block_size=4, **ROOM)
    with pytest.raises(RequestError, match=message):
        llm.generate({"prompt": "<video>", "multi_modal_data": {"video": [item]}}, GREEDY, progress=False)


def test_images_of_different_parts_are_encoded_together(tiny_sight: Sight, engines: Engines) -> None:
    llm = engines(tiny_sight("llava_next"), block_size=4, **ROOM)
    model = llm.engine.extension("multimodal").encoder.model
    items = [model.process("image", tiny_vision.image(0, *size)).inputs for size in ((16, 20), (16, 24), (16, 30))]
    assert len({str({name: value.shape for name, value in item.items()}) for item in items}) == 1
    together = model.encode("image", items)
    assert [len(embeddings) for embeddings in together] == [10, 14, 14]  # a part of the first image's tiles is unseen
    for embeddings, item in zip(together, items, strict=True):
        torch.testing.assert_close(embeddings, model.encode("image", [item])[0])


def test_the_example_is_as_large_as_any_image(tiny_sight: Sight, engines: Engines) -> None:
    llm = engines(tiny_sight("llava_onevision"), block_size=4, **ROOM)
    model = llm.engine.extension("multimodal").encoder.model
    counts = [
        len(model.process("image", tiny_vision.image(0, height, width)).token_ids)
        for height in range(2, 40, 3)
        for width in range(2, 40, 3)
    ]
    assert len(model.example("image").token_ids) == max(counts)


@pytest.mark.spread(0, slow=3)
@pytest.mark.parametrize("name", SIGHTS)
def test_compiled_kernels_give_transformers_tokens(name: str, tiny_sight: Sight, engines: Engines) -> None:
    path = tiny_sight(name)
    llm = engines(path, block_size=16, backend="cpu", optimize=True, **ROOM)
    assert_same(name, path, asked(name), generate(llm, asked(name)))


def test_the_text_depends_on_keys_ahead(tiny_sight: Sight, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engines(tiny_sight("gemma3"), **ROOM, **{"cache.prefix_caching": False})
    monkeypatch.setattr(extension, "with_keys_ahead", lambda inputs, _: inputs)
    found = [output.outputs[0].token_ids for output in generate(llm, asked("gemma3"))]
    wanted = [answer("gemma3", tiny_sight("gemma3"), text, seeds, 20)[1] for text, seeds in asked("gemma3")]
    assert [a == b for a, b in zip(found, wanted, strict=True)] == [False, False, True, False, False]


def test_a_prefix_that_ends_inside_an_image_is_continued(tiny_sight: Sight, engines: Engines) -> None:
    path = tiny_sight("gemma3")
    llm = engines(path, block_size=4, **ROOM)
    placeholder, model = SIGHTS["gemma3"].placeholder, llm.engine.extension("multimodal").encoder.model
    image_token = model.facts.modalities[0].placeholder_token_id
    prompts: Asked = [(f"a {placeholder}", (5,)), (f"a {placeholder} quite another text", (5,))]
    outputs = [generate(llm, [one])[0] for one in prompts]
    assert_same("gemma3", path, prompts, outputs)
    cached = outputs[1].metrics.num_cached_tokens
    assert outputs[1].prompt_token_ids[cached - 1 : cached + 1] == [image_token] * 2


def test_an_image_above_the_tokens_of_a_step_is_refused(tiny_sight: Sight, engines: Engines) -> None:
    llm = engines(tiny_sight("gemma3"), block_size=4, **ROOM, **{"scheduler.max_batched_tokens": 8})
    with pytest.raises(RequestError, match=r"9 tokens that see each other.*max_batched_tokens=8") as caught:
        generate(llm, asked("gemma3")[:1])
    assert "scheduler.max_batched_tokens = 9" in str(caught.value.fix)
    assert len(generate(llm, [("import os", ())])[0].outputs[0].token_ids) == 20


def test_what_stands_for_an_image_needs_one(tiny_sight: Sight, engines: Engines) -> None:
    llm = engines(tiny_sight("gemma3"), **ROOM)
    with pytest.raises(RequestError, match=r"1 image placeholder tokens .* items for 0"):
        generate(llm, [(f"a {SIGHTS['gemma3'].placeholder}", ())])
