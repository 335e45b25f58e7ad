"""Cross-attention through the runner: Whisper gives transformers' tokens, whatever steps, memory and neighbours do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import GREEDY, mixes_decode_and_prefill, recorded, recorded_items
from tiny_speech import NUM_STATES, RATE, build, greedy_reference, recording

from slotline.builder.made_up import made_up_inputs
from slotline.core import LLM, SamplingParams
from slotline.core.batch.model_inputs import ModelInputs
from slotline.registry.errors import ModelError, NegotiationError, RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

Engines = Callable[..., LLM]
PROMPTS = [[1], [1, 7, 9], [1, *range(10, 30)], [1, 5], [1, *range(40, 57)]]
BLOCKS = -(-NUM_STATES // 16)
BLOCK_KIB = 24  # keys and values of 16 tokens in three layers of either kind


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("speech") / "whisper")


@pytest.fixture(scope="module")
def expected(whisper: Path) -> list[list[int]]:
    """transformers' tokens of each prompt, with a recording of its own."""
    found = [greedy_reference(whisper, recording(seed), prompt, 20) for seed, prompt in enumerate(PROMPTS)]
    assert found[0] != greedy_reference(whisper, recording(9), PROMPTS[0], 20)  # what is heard matters
    return found


def prompt(token_ids: list[int], seed: int) -> dict[str, Any]:
    return {"prompt_token_ids": token_ids, "multi_modal_data": {"audio": recording(seed)}}


def generate(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate([prompt(token_ids, seed) for seed, token_ids in enumerate(PROMPTS)], params)
    return [output.outputs[0].token_ids for output in outputs]


@contextmanager
def launched(llm: LLM) -> Iterator[list[ModelInputs]]:
    """The inputs of every step that runs inside."""
    runner, seen = llm.engine.runner, list[ModelInputs]()
    original = runner.launch

    def launch(inputs: ModelInputs) -> Any:
        seen.append(inputs)
        return original(inputs)

    runner.launch = launch  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del runner.launch


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("max_batched_tokens", [64, 7])
@pytest.mark.behaviour(13, 69, 82)
def test_a_batch_gives_transformers_tokens(
    max_batched_tokens: int, asynchronous: bool, whisper: Path, expected: list[list[int]], engines: Engines
) -> None:
    llm = engines(whisper, max_num_batched_tokens=max_batched_tokens, **{"scheduler.async": asynchronous})
    with recorded(llm) as steps:
        assert generate(llm) == expected
    assert any(mixes_decode_and_prefill(step) for step in steps) or max_batched_tokens == 64
    assert max(len(step.rows) for step in steps) == len(PROMPTS)


@pytest.mark.behaviour(69, 82)
def test_keys_are_stored_once_and_read_in_every_step(whisper: Path, engines: Engines) -> None:
    llm = engines(whisper, max_num_batched_tokens=7)
    with recorded(llm) as steps, launched(llm) as inputs:
        generate(llm)
    begun = [int((step.num_computed == 0).sum()) for step in steps if step.num_tokens]
    assert sum(begun) == len(PROMPTS)
    assert 0 in begun
    assert [len(each.batches[1].slot_mapping) for each in inputs] == [NUM_STATES * count for count in begun]
    assert [len(states_of(each)) for each in inputs] == [NUM_STATES * count for count in begun]
    for each in inputs:
        own, cross = each.batches
        assert (own.causal, cross.causal) == (True, False)
        assert set(cross.seq_lens_cpu.tolist()) == {NUM_STATES}
        assert len(own.slot_mapping) == each.num_tokens


@pytest.mark.behaviour(69)
def test_blocks_for_the_encoder_are_taken_at_once_and_kept(whisper: Path, engines: Engines) -> None:
    llm = engines(whisper)
    request = llm.engine.add("a", [1, 2], GREEDY, **_features(llm, 0))
    own, cross = llm.engine.scheduler.cache.groups
    held = []
    while not request.finished:
        llm.engine.step()
        if request.row >= 0:
            held.append((len(own.blocks[request.row]), len(cross.blocks[request.row])))
    assert {blocks for _, blocks in held} == {BLOCKS}
    assert {blocks for blocks, _ in held} == {1, 2}
    assert not any(cross.blocks)


def states_of(inputs: ModelInputs) -> list[torch.Tensor]:
    """The encoder's states that a step stores keys of."""
    found = inputs.extras["multimodal"]
    return [] if found is None or found.states is None else list(found.states)


def _features(llm: LLM, seed: int) -> dict[str, Any]:
    return {"features": llm.engine.extension("multimodal").reader.read([1, 2], {"audio": recording(seed)})[1]}


def test_a_made_up_step_in_which_all_begin_stores_nothing(whisper: Path, engines: Engines) -> None:
    llm = engines(whisper)
    generate(llm)
    runner = llm.engine.runner
    before = [cache.key.clone() for cache in runner.router.caches()]
    inputs = made_up_inputs(llm.engine.gatherer, [3, 1, 1], beginning=True)
    assert len(states_of(inputs)) == len(inputs.batches[1].slot_mapping) == 3 * NUM_STATES
    assert len(runner.run(inputs).token_ids) == 3
    after = [cache.key for cache in runner.router.caches()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.behaviour(32)
def test_preempted_requests_store_their_keys_again(
    asynchronous: bool, whisper: Path, expected: list[list[int]], engines: Engines
) -> None:
    memory = f"{BLOCK_KIB * (1 + 4 * (BLOCKS + 2) - 2)}KiB"
    settings = {"multimodal.cache_tokens": NUM_STATES, "multimodal.max_tokens_per_step": NUM_STATES}
    llm = engines(whisper, memory=memory, **settings, **{"scheduler.async": asynchronous})
    with recorded(llm) as steps, recorded_items(llm) as items:
        assert generate(llm) == expected
    assert sum(len(step.preempted) for step in steps) > 0
    assert sum(len(each.encode) for each in items) > len(PROMPTS)  # the encoder cache has room for one


@pytest.mark.behaviour(79)
def test_a_recording_is_encoded_once_for_all_requests_that_hear_it(
    whisper: Path, expected: list[list[int]], engines: Engines
) -> None:
    llm = engines(whisper)
    with recorded_items(llm) as steps:
        outputs = llm.generate(
            [prompt(PROMPTS[0], 0), prompt([1, 3], 0), prompt(PROMPTS[0], 0)],
            SamplingParams(n=2, temperature=0, max_tokens=20, ignore_eos=True),
        )
    assert sum(len(step.encode) for step in steps) == 1
    assert [[each.token_ids for each in output.outputs] for output in outputs][0::2] == [[expected[0]] * 2] * 2


def test_drafts_are_verified_against_the_encoder(whisper: Path, expected: list[list[int]], engines: Engines) -> None:
    llm = engines(whisper, **{"drafter.name": "ngram", "drafter.tokens": 3})
    with recorded(llm) as steps:
        assert generate(llm) == expected
    known = sum(len(prompt) for prompt in PROMPTS) + len(PROMPTS) * 19
    assert sum(step.num_tokens for step in steps) > known  # drafts were computed beside the known tokens


def test_prefixes_are_not_shared_and_explain_says_why(whisper: Path, engines: Engines) -> None:
    llm = engines(whisper)
    text = llm.plan.explain()
    assert [(group.kv_spec, len(group.layers)) for group in llm.plan.cache_groups] == [
        ("full", 3),
        ("cross_attention", 3),
    ]
    assert "an encoder's keys are stored in a request's first step" in " ".join(text.split())
    assert not llm.engine.scheduler.cache.prefix_caching
    with pytest.raises(NegotiationError, match="prefix"):
        engines(whisper, enable_prefix_caching=True)


def test_backends_without_cross_attention_are_refused(whisper: Path, engines: Engines) -> None:
    with pytest.raises(NegotiationError, match="attention type: needs cross, offers decoder"):
        engines(whisper, backend="cpu")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "0 items of audio, and the model's cross-attention reads one"),
        ({"audio": [recording(0), recording(1)]}, "2 items of audio"),
        ({"audio": [(recording(0), 80)]}, "80 samples a second, the model takes 16000"),
        ({"audio": [(recording(0), 8000)]}, "25600 samples; the model hears 16000"),
        ({"audio": recording(0, 1.5)}, "24000 samples; the model hears 16000"),
        ({"audio": "speech.wav"}, "audio='speech.wav' is no recording"),
        ({"audio": np.zeros((2, 100))}, "is no recording"),
        ({"audio": np.array([0.0, np.nan])}, "sample 1 of the audio is nan"),
        ({"audio": b"RIFF"}, "no WAV file|cannot be read"),
        ({"audio": {"input_features": torch.zeros(16, 99)}}, r"\[16, 99\] of the audio are no window of \[16, 100\]"),
        ({"audio": np.zeros(0)}, "is no recording"),
        ({"image": recording(0)}, "multi_modal_data has image; this model takes audio"),
    ],
)
def test_a_wrong_recording_is_refused_by_name(data: Any, message: str, whisper: Path, engines: Engines) -> None:
    llm = engines(whisper)
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate({"prompt_token_ids": [1], "multi_modal_data": data}, GREEDY)
    assert caught.value.fix
    assert not llm.engine.has_work


def test_a_recording_may_come_with_its_rate(whisper: Path, expected: list[list[int]], engines: Engines) -> None:
    asked = {"prompt_token_ids": PROMPTS[0], "multi_modal_data": {"audio": [(recording(0).tolist(), RATE)]}}
    assert engines(whisper).generate(asked, GREEDY)[0].outputs[0].token_ids == expected[0]


def test_weights_are_read_again_in_place(whisper: Path, expected: list[list[int]], tmp_path: Path) -> None:
    llm = LLM(whisper, device="cpu", dtype="float32", memory="4MiB", optimize=False)
    other = build(tmp_path / "other", seed=1)
    llm.engine.reload_weights(other)
    assert generate(llm)[0] == greedy_reference(other, recording(0), PROMPTS[0], 20)
    llm.engine.reload_weights(whisper)
    assert generate(llm) == expected


def test_a_folder_without_a_feature_extractor_is_refused(tmp_path: Path) -> None:
    path = build(tmp_path / "m")
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="no feature extractor"):
        LLM(path, device="cpu", memory="4MiB")
