"""Models that hear recordings in a decoder: transformers' text, whatever chunks, caches, drafts, preemption do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_hearing
from engine_driver import GREEDY, recorded, recorded_items
from tiny_hearing import PLACEHOLDER, SECONDS, answer, sound

from slotline.core import LLM
from slotline.registry.errors import ModelError, RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

Engines = Callable[..., LLM]
Heard = Callable[[str], Path]
Asked = Sequence[tuple[str, tuple[int, ...]]]

ASKED: Asked = [
    (f"def {PLACEHOLDER} main(", (0,)),
    (f"class Row {PLACEHOLDER} and {PLACEHOLDER} pass", (1, 2)),
    ("import os, sys, json", ()),
    (f"{PLACEHOLDER} word {PLACEHOLDER} word", (2, 2)),
    (f"{PLACEHOLDER}", (3,)),
]
ROOM: dict[str, Any] = {"max_model_len": 224, "memory": "16MiB"}
ROOM |= {"multimodal.cache_tokens": 80, "multimodal.max_tokens_per_step": 80}  # of several of Voxtral's windows
KIB_PER_TOKEN = 4 * 2 * (16 + 16) * 4 // 1024
HARD: dict[str, dict[str, Any]] = {
    "chunks": {"scheduler.max_batched_tokens": 5, "cache.prefix_caching": False},
    "async": {"scheduler.max_batched_tokens": 7, "scheduler.async": True},
    "drafts": {"scheduler.max_batched_tokens": 14, "drafter.name": "ngram"},
    "preemption": {"scheduler.max_batched_tokens": 31, "memory": f"{150 * KIB_PER_TOKEN}KiB", "max_model_len": 144},
}
"""What cuts, repeats or delays steps."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Heard:
    root, made = tmp_path_factory.mktemp("heard"), dict[str, Path]()

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tiny_hearing.build(name, root / name)
        return made[name]

    return get


def generate(llm: LLM, name: str, prompts: Asked) -> list[Any]:
    given = [
        {"prompt": text, "multi_modal_data": {"audio": [sound(name, seed) for seed in seeds]}}
        for text, seeds in prompts
    ]
    return llm.generate(given, GREEDY, progress=False)


def assert_same(name: str, path: Path, prompts: Asked, outputs: Sequence[Any]) -> None:
    """The outputs are transformers' for prompts that its processor has expanded."""
    wanted = [answer(name, path, text, seeds, 20) for text, seeds in prompts]
    assert [output.prompt_token_ids for output in outputs] == [prompt for prompt, _ in wanted]
    assert [output.outputs[0].token_ids for output in outputs] == [tokens for _, tokens in wanted]


@pytest.mark.parametrize("name", SECONDS)
def test_a_batch_gives_transformers_tokens_twice(name: str, tiny: Heard, engines: Engines) -> None:
    path = tiny(name)
    llm = engines(path, block_size=4, **ROOM)
    first = generate(llm, name, ASKED)
    assert_same(name, path, ASKED, first)
    again = generate(llm, name, ASKED)
    assert_same(name, path, ASKED, again)
    assert all(output.metrics.num_cached_tokens > 0 for output in again)
    other = [(text, tuple(seed + 4 for seed in seeds)) for text, seeds in ASKED]  # other recordings of these lengths
    found = generate(llm, name, other)
    assert_same(name, path, other, found)
    assert found[0].outputs[0].token_ids != first[0].outputs[0].token_ids  # what is heard matters


@pytest.mark.spread(3)
@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize("name", SECONDS)
def test_hard_steps_give_transformers_tokens(hard: str, name: str, tiny: Heard, engines: Engines) -> None:
    path = tiny(name)
    llm = engines(path, block_size=4, **{**ROOM, **HARD[hard]})
    with recorded(llm) as steps, recorded_items(llm) as items:
        outputs = generate(llm, name, ASKED)
    assert_same(name, path, ASKED, outputs)
    if hard == "chunks":
        assert any(
            feature.start < end < feature.end
            for step, of_step in zip(steps, items, strict=True)
            for row, feature in of_step.features
            for end in [int((step.num_computed + step.num_scheduled)[step.rows.tolist().index(row)])]
        )
    if hard == "drafts":
        assert llm.engine.extension("drafts").counts.proposed > 0
    if hard == "preemption":
        assert sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "1 audio placeholder"),
        ([np.zeros(0)], "is no recording"),
        ([np.array([0.0, 0.5, np.nan])], "sample 2 of the audio is nan"),
        ([np.zeros((2, 100))], "is no recording"),
        ([(np.ones(100), "fast")], "'fast' samples a second, the model takes 16000"),
        ([b"no sound"], "no WAV file|cannot be read"),
        ([sound("qwen2_audio", 0), np.ones(17_000)], "17000 samples; the model hears 16000"),
        ([np.ones(100)], "too few for one embedding"),
    ],
)
def test_a_wrong_recording_is_refused_alone(data: Any, message: str, tiny: Heard, engines: Engines) -> None:
    llm = engines(tiny("qwen2_audio"), block_size=4, **ROOM)
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate({"prompt": f"a {PLACEHOLDER}", "multi_modal_data": {"audio": data}}, GREEDY)
    assert caught.value.fix
    assert not llm.engine.has_work


def test_a_folder_without_a_feature_extractor_is_refused(tmp_path: Path) -> None:
    path = tiny_hearing.build("voxtral", tmp_path / "m")
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="no feature extractor"):
        LLM(path, device="cpu", memory="4MiB")
