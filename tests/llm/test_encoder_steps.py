"""What a step encodes: images of one shape together, each in memory of its own, in a queue beside the step before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny_grids
import torch
from engine_driver import GREEDY
from tiny_grids import IMAGE, greedy_reference, image

from slotline.core import LLM

pytest.importorskip("PIL", reason="image processors need Pillow")
pytestmark = pytest.mark.usefixtures("one_thread")

Engines = Callable[..., LLM]
PROMPTS: Sequence[tuple[str, Sequence[int]]] = [
    (f"{IMAGE} a {IMAGE} b {IMAGE}", [0, 2, 4]),  # the first and the last have one shape
    (f"def {IMAGE} main(", [1]),
    ("import os, sys, json", []),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_grids.build("qwen2_vl", tmp_path_factory.mktemp("steps") / "qwen2_vl")


def generate(llm: LLM, asked: Sequence[tuple[str, Sequence[int]]]) -> list[list[int]]:
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": [image(seed) for seed in seeds]}} for text, seeds in asked
    ]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, progress=False)]


@pytest.mark.behaviour(76)
def test_images_of_one_shape_are_encoded_in_one_batch_and_kept_apart(
    path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines(path)
    encoder: Any = llm.engine.runner.model.hf_model.encoder  # type: ignore[attr-defined]
    features, grids = encoder.get_image_features, list[int]()

    def counted(pixel_values: Any, image_grid_thw: Any, **options: Any) -> Any:
        grids.append(len(image_grid_thw))
        return features(pixel_values, image_grid_thw, **options)

    monkeypatch.setattr(encoder, "get_image_features", counted)
    asked = PROMPTS[:1]
    assert generate(llm, asked) == [greedy_reference(path, text, seeds, 20) for text, seeds in asked]
    assert grids == [2, 1]
    kept = llm.engine.extension("multimodal").encoder.outputs.values()
    assert [one.untyped_storage().nbytes() for one in kept] == [one.numel() * one.element_size() for one in kept]


class LateQueue:
    """A queue whose work is done only when the computations wait for it: until then its embeddings are no numbers.

    Attributes:
        log: what was asked of it.
    """

    def __init__(self, outputs: dict[str, torch.Tensor]) -> None:
        self._outputs, self._late = outputs, dict[str, torch.Tensor]()
        self.log: list[str] = []

    @contextmanager
    def scope(self) -> Iterator[None]:
        self.log.append("encode")
        before = set(self._outputs)
        yield
        for mm_hash in self._outputs.keys() - before:
            self._late[mm_hash] = self._outputs[mm_hash]
            self._outputs[mm_hash] = torch.full_like(self._late[mm_hash], float("nan"))

    def wait_for_compute(self) -> None:
        self.log.append("wait")

    def compute_waits(self) -> None:
        self._outputs |= {mm_hash: values for mm_hash, values in self._late.items() if mm_hash in self._outputs}
        self._late.clear()

    def record(self, *, copies: bool) -> Any:
        return None

    def wait(self, event: Any, *, copies: bool) -> None: ...


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.behaviour(76)
def test_encoding_has_a_queue_that_steps_wait_for(
    asynchronous: bool, path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"scheduler.max_batched_tokens": 9, "multimodal.cache_tokens": 16, "cache.prefix_caching": False}
    llm = engines(path, block_size=4, **{"scheduler.async": asynchronous, **settings})
    llm.engine.extension("multimodal").reset()
    encoder = llm.engine.extension("multimodal").encoder
    queue = LateQueue(encoder.outputs)
    monkeypatch.setattr(encoder, "queue", queue)
    assert generate(llm, PROMPTS) == [greedy_reference(path, text, seeds, 20) for text, seeds in PROMPTS]
    assert queue.log[:2] == ["wait", "encode"]  # behind what may have been dropped before
    assert "wait" in queue.log[2:]  # where room was taken from embeddings that a step in flight may read


def test_encoding_into_free_room_waits_for_no_step(
    path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines(path, **{"scheduler.async": True, "multimodal.cache_tokens": 64})
    generate(llm, PROMPTS[1:2])
    encoder = llm.engine.extension("multimodal").encoder
    queue = LateQueue(encoder.outputs)
    monkeypatch.setattr(encoder, "queue", queue)
    asked = [(f"y {IMAGE}", [5])]
    assert generate(llm, asked) == [greedy_reference(path, *asked[0], 20)]
    assert queue.log == ["encode"]
