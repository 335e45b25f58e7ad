"""`LLM.transcribe`: the segments, times and language of transformers' own `generate`, whatever the steps do."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import recorded
from tiny_speech import LONGEST, RATE, build, build_transcriber, recording, transcript_reference

from slotline.core import LLM, SamplingParams
from slotline.llm.transcripts import Part, Transcript, divide
from slotline.registry.errors import ModelError, RequestError
from slotline.text.recordings import as_samples, read_recording

pytestmark = pytest.mark.usefixtures("one_thread")

Engines = Callable[..., LLM]
HARD: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"scheduler.max_batched_tokens": 3, "scheduler.async": False},
    "async": {"scheduler.max_batched_tokens": 7, "scheduler.async": True},
    "drafts": {"drafter.name": "ngram", "drafter.tokens": 3, "scheduler.async": False},
    "preemption": {"memory": f"{16 * 16}KiB"},
}
LENGTHS = (0.8, 2.2, 1.0)
"""Seconds of the recordings. The model hears one at a time."""


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_transcriber(tmp_path_factory.mktemp("speech") / "whisper")


def sounds() -> list[Any]:
    return [recording(seed, seconds) for seed, seconds in enumerate(LENGTHS)]


def times(transcript: Transcript) -> list[tuple[float, float, list[int]]]:
    return [(one.start, one.end, one.tokens) for one in transcript.segments]


def reference(path: Path, audio: Any, **options: Any) -> list[tuple[float, float, list[int]]]:
    return [
        (round(one["start"], 2), round(one["end"], 2), one["tokens"])
        for one in transcript_reference(path, audio, return_timestamps=True, **options)
    ]


@pytest.fixture(scope="module")
def expected(whisper: Path) -> list[list[tuple[float, float, list[int]]]]:
    """transformers' segments of each recording, whose language it detects."""
    found = [reference(whisper, one, language=None, task="translate") for one in sounds()]
    assert max(map(len, found)) > 3
    return found


@pytest.mark.spread(2)
@pytest.mark.parametrize("hard", HARD)
@pytest.mark.behaviour(124)
def test_segments_are_those_of_transformers(hard: str, whisper: Path, expected: Any, engines: Engines) -> None:
    llm = engines(whisper, max_model_len=LONGEST, **HARD[hard])
    with recorded(llm) as steps:
        found = llm.transcribe(sounds(), task="translate", timestamps=True)
    assert [times(one) for one in found] == expected
    assert {one.language for one in found} <= {"en", "de", "fr"}
    assert len({one.language for one in found}) > 1
    assert [one.duration for one in found] == pytest.approx(LENGTHS)
    assert max(len(step.rows) for step in steps) == len(LENGTHS) or hard in ("chunks", "preemption")
    if hard == "drafts":
        assert llm.engine.extension("drafts").counts.proposed > 0
    if hard == "preemption":
        assert sum(len(step.preempted) for step in steps) > 0


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "given", [{"language": "german", "task": "translate"}, {"language": "en"}, {"language": "<|fr|>"}]
)
def test_languages_and_tasks_are_those_of_transformers(given: Any, whisper: Path, engines: Engines) -> None:
    audio = recording(1, 1.6)
    wanted = reference(whisper, audio, **{"task": "transcribe", **given})
    (found,) = engines(whisper, max_model_len=LONGEST).transcribe(audio, timestamps=True, **given)
    assert times(found) == wanted
    assert found.language == {"en": "en", "german": "de", "<|fr|>": "fr"}[given["language"]]


def test_texts_without_times_are_those_of_transformers(whisper: Path, engines: Engines) -> None:
    llm = engines(whisper, max_model_len=LONGEST)
    asked = {"language": "en", "task": "transcribe"}
    wanted = [
        [token for one in transcript_reference(whisper, recording(seed), **asked) for token in one["tokens"]]
        for seed in (2, 5)
    ]
    found = llm.transcribe([recording(2), recording(5)], **asked)
    assert [[token for one in each.segments for token in one.tokens][: len(wanted[0])] for each in found] == wanted
    assert all(each.text == "".join(one.text for one in each.segments).strip() for each in found)


def test_a_text_before_is_read(whisper: Path, engines: Engines) -> None:
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(whisper, trust_remote_code=False)
    before = [
        tokenizer.convert_tokens_to_ids("<|startofprev|>"),
        *tokenizer.encode(" def main", add_special_tokens=False),
    ]
    asked = {"language": "en", "task": "transcribe"}
    wanted = reference(whisper, recording(3), prompt_ids=torch.tensor(before), **asked)
    llm = engines(whisper, max_model_len=LONGEST)
    (found,) = llm.transcribe(recording(3), prompt=" def main ", timestamps=True, **asked)
    assert times(found) == wanted
    assert times(found) != times(llm.transcribe(recording(3), timestamps=True, **asked)[0])


def test_details_are_those_of_the_model(whisper: Path, engines: Engines) -> None:
    llm = engines(whisper, max_model_len=LONGEST)
    (found,) = llm.transcribe(recording(0), language="en", timestamps=True, details=True)
    plain = llm.transcribe(recording(0), language="en", timestamps=True)[0]
    assert times(found) == times(plain)
    assert plain.segments[0].no_speech_prob is None
    assert plain.segments[0].avg_logprob is None
    for one in found.segments:
        assert one.avg_logprob is not None
        assert one.avg_logprob < 0
        assert one.no_speech_prob is not None
        assert 0 < one.no_speech_prob < 1
        assert one.compression_ratio > 0


def test_other_rates_are_resampled(whisper: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engines(whisper, max_model_len=LONGEST)
    fast, right = (np.sin(2 * np.pi * 300 * np.arange(rate) / rate).astype(np.float32) for rate in (44_100, RATE))
    found = as_samples((fast, 44_100), RATE)
    assert len(found) == RATE
    assert found[200:-200] == pytest.approx(right[200:-200], abs=2e-3)
    assert llm.transcribe((fast, 44_100), language="en")[0].duration == 1.0
    monkeypatch.setitem(sys.modules, "scipy.signal", None)
    with pytest.raises(RequestError, match="44100 samples a second, the model takes 16000") as caught:
        llm.transcribe((fast, 44_100))
    assert "slotline[audio]" in str(caught.value.fix)


def test_other_files_need_soundfile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(RequestError, match="soundfile is not installed") as caught:
        read_recording(b"fLaC and more")
    assert "slotline[audio]" in str(caught.value.fix)


def test_flac_files_are_read() -> None:
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, np.stack([recording(0)] * 2, axis=1), RATE, format="FLAC")
    samples, rate = read_recording(file.getvalue())
    assert rate == RATE
    assert samples == pytest.approx(recording(0), abs=1e-3)


def test_temperature_draws_other_tokens(whisper: Path, engines: Engines) -> None:
    llm = engines(whisper, max_model_len=LONGEST)
    first = llm.transcribe(recording(0), language="en", timestamps=True)[0]
    drawn = llm.transcribe(recording(0), language="en", timestamps=True, temperature=3.0)[0]
    assert times(first) != times(drawn)
    assert all(one.start <= one.end for one in drawn.segments)  # the rules hold for what is drawn, too


@pytest.mark.parametrize(
    ("recordings", "options", "message"),
    [
        (np.zeros(0), {}, "is no recording"),
        (np.array([0.0, np.inf]), {}, "sample 1 of the audio is inf"),
        ((np.ones(100), 7), {}, "7 samples a second, the model takes 16000"),
        (b"RIFFxxxxWAVE", {}, "no WAV file|cannot be read"),
        ([np.ones(100), "speech.wav"], {}, "'speech.wav' is no recording"),
        (np.ones(100), {"language": "Klingon"}, "language='Klingon' is not known"),
        (np.ones(100), {"language": 3}, "language=3 is not known"),
        (np.ones(100), {"task": "sing"}, "task='sing'"),
        (np.ones(100), {"prompt": 3}, "prompt=3 is no text"),
        (np.ones(100), {"temperature": -1.0}, "temperature=-1.0 is not allowed"),
        (np.ones(100), {"words": True}, "has no option 'words'"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_runs(
    recordings: Any, options: Any, message: str, whisper: Path, engines: Engines
) -> None:
    llm = engines(whisper, max_model_len=LONGEST)
    with pytest.raises(RequestError, match=message) as caught:
        llm.transcribe(recordings, **options)
    assert caught.value.fix
    assert not llm.engine.has_work


def test_other_models_say_what_they_serve(tmp_path: Path, engines: Engines) -> None:
    path = build(tmp_path / "m")
    with pytest.raises(RequestError, match="does not transcribe; it serves generate"):
        engines(path).transcribe(recording(0))


@pytest.mark.behaviour(124)
def test_the_task_is_discovered_and_explained(whisper: Path, engines: Engines) -> None:
    plan = engines(whisper, max_model_len=LONGEST).plan
    assert "also serves transcription" in " ".join(plan.explain().split())
    (setting,) = [one for one in plan.settings if one.key == "task"]
    assert setting.resolved == "generate"


def test_a_folder_that_lacks_a_task_is_refused(tmp_path: Path) -> None:
    path = build_transcriber(tmp_path / "m")
    file = path / "generation_config.json"
    file.write_text(file.read_text().replace('"task_to_id"', '"tasks"'))
    llm = LLM(path, device="cpu", dtype="float32", memory="4MiB", optimize=False)
    with pytest.raises(ModelError, match="does not say how to transcribe"):
        llm.transcribe(recording(0))


def test_a_wrong_rule_is_refused(whisper: Path, engines: Engines) -> None:
    asked = {"prompt_token_ids": [1], "multi_modal_data": {"audio": recording(0)}}
    with pytest.raises(RequestError, match="speech_rules"):
        engines(whisper, max_model_len=LONGEST).generate(
            asked, SamplingParams(extra_args={"speech_rules": {"first_timestamp": 10**6}})
        )


def test_windows_are_divided_between_pairs_of_timestamps() -> None:
    zero = 100
    assert divide([100, 1, 110, 110, 2, 130], zero, 100) == (
        [Part(0, 10, [100, 1, 110]), Part(10, 30, [110, 2, 130])],
        100,
    )
    assert divide([100, 1, 110, 110, 2], zero, 100) == ([Part(0, 10, [100, 1, 110, 110])], 20)
    assert divide([103, 1, 2], zero, 100) == ([Part(0, 3, [103, 1, 2])], 100)
    assert divide([1, 2], zero, 80) == ([Part(0, 40, [1, 2])], 80)
    assert divide([], zero, 80) == ([Part(0, 40, [])], 80)
