"""Every family in bfloat16: at most three times as far from float32 as transformers' own eager bfloat16.

The rule is that of docs/decisions/tolerance.md, for the logits of whole models, or an encoder's states: both have the
same rounded weights, and the reference is transformers in float32 over these. On a CUDA device with the backends that
are chosen there, on a CPU with the `torch` backends.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import family_table
import pytest
import tiny_models
import tiny_speech
import torch
import transformers
from attrs import evolve, frozen
from engine_driver import GREEDY, random_prompts

from slotline.core import LLM, PoolingParams, RequestOutput
from slotline.plugins.model_families.encoder import CLASSIFIERS, EMBEDDERS
from tests.llm.test_encoders import COMMON, DISTIL, MODERN

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = random_prompts([33, 17, 40])
WHOLE_PROMPTS = random_prompts(range(2, 50, 2), seed=1)
RECORDINGS = [tiny_speech.recording(seed) for seed in range(len(PROMPTS))]
SETTINGS: dict[str, Any] = {
    "device": DEVICE,
    "dtype": "bfloat16",
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
    "memory": "16MiB",
    "sampling.logprobs_mode": "raw_logits",
    "sampling.max_logprobs": tiny_models.VOCAB_SIZE,
    "observability.check_integrity": True,
    "observability.progress": False,
    **({} if DEVICE == "cuda" else {"backend": "torch", "optimize": False}),
}
K = 3.0
"""How many times the baseline's error is allowed, as for attention backends."""


@frozen
class Errors:
    """Of logits [positions, vocab_size], or of encoders' answers [prompts, size], against float32.

    Attributes:
        largest: of all.
        median: over positions, of each one's largest: experts chosen otherwise at few positions do not show in it.
    """

    largest: float
    median: float

    @classmethod
    def of(cls, found: torch.Tensor, exact: torch.Tensor) -> Errors:
        """The errors of `found`; NaN where one of its numbers is."""
        each = (found - exact).abs().amax(1)  # [positions]
        return cls(float(each.max()), float(each.median()))

    def within(self, baseline: Errors) -> bool:
        """The rule."""
        return self.largest <= K * baseline.largest and self.median <= K * baseline.median


@pytest.fixture(autouse=True)
def exact_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 means float32 here, not tf32, in convolutions too."""
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in which the encoder counts for so much that one of its states can be missed."""
    path = tiny_speech.build(tmp_path_factory.mktemp("speech"))
    model = transformers.WhisperForConditionalGeneration.from_pretrained(path, trust_remote_code=False)
    for layer in model.model.decoder.layers:
        layer.encoder_attn.v_proj.weight.data.mul_(8)
    return _widened(model, path)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds the tiny random checkpoint of an architecture."""
    small = {
        name: COMMON[name] for name in ("vocab_size", "max_position_embeddings", "num_labels", "initializer_range")
    }

    def get(architecture: str) -> Path:
        cls = getattr(transformers, architecture)
        torch.manual_seed(0)
        sizes = small | DISTIL if "Distil" in architecture else COMMON
        model = cls(cls.config_class(**(sizes | MODERN if "Modern" in architecture else sizes)))
        return _widened(model, tmp_path_factory.mktemp(architecture))

    return get


def _widened(model: Any, path: Path) -> Path:
    tiny_models._widen(model)
    model.save_pretrained(path)
    return path


def _rows(output: RequestOutput) -> torch.Tensor:
    """The engine's logits at every position but the last: [prompt + generated - 1, vocab_size] float32."""
    done = output.outputs[0]
    assert output.prompt_logprobs is not None
    assert done.logprobs is not None
    entries = [*output.prompt_logprobs[1:], *done.logprobs]
    rows = torch.full((len(entries), tiny_models.VOCAB_SIZE), torch.nan)
    for position, entry in enumerate(entries):
        assert entry is not None
        rows[position, list(entry)] = torch.tensor([found.logprob for found in entry.values()])
    return rows


def _logits(model: Any, sequences: Sequence[list[int]]) -> torch.Tensor:
    """transformers' logits at every position but each sequence's last: [positions, vocab_size] float32."""
    with torch.no_grad():
        found = [model(torch.tensor([tokens[:-1]], device=DEVICE), use_cache=False).logits[0] for tokens in sequences]
    return torch.cat(found).float().cpu()


def _generated(llm: LLM, prompts: Sequence[Any]) -> tuple[torch.Tensor, list[list[int]]]:
    """The engine's logits and all tokens of each sequence: prompts in chunks, then 12 tokens."""
    every = tiny_models.VOCAB_SIZE
    outputs = llm.generate(prompts, evolve(GREEDY, max_tokens=12, logprobs=every, prompt_logprobs=every))
    sequences = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    return torch.cat([_rows(output) for output in outputs]), sequences


def _against(found: torch.Tensor, rounded: Any, answers: Callable[[Any], torch.Tensor]) -> tuple[Errors, Errors]:
    """The errors of what an engine found, and those of transformers' model in bfloat16; it is in float32 afterwards."""
    assert rounded.dtype == torch.bfloat16
    baseline, exact = answers(rounded), answers(rounded.float())
    return Errors.of(found, exact), Errors.of(baseline, exact)


def _used(llm: LLM) -> str:
    """The backends of an engine, whose dtype is that of the rule."""
    assert llm.plan.dtype == "bfloat16"
    assert llm.engine.runner.model.hf_model.dtype == torch.bfloat16
    return ", ".join(sorted({group.backend for group in (*llm.plan.groups, *llm.plan.state_groups)}))


def _ratio(name: str, ours: Errors, baseline: Errors, used: str) -> str:
    largest, median = ours.largest / baseline.largest, ours.median / baseline.median
    return f"{name}: {largest:.2f} of the largest error, {median:.2f} of the median one, by {used}"


def _errors(served: Path, path: Path) -> tuple[Errors, Errors, str]:
    """An engine's errors over a checkpoint, transformers' own, and the backends."""
    llm = LLM(served, **SETTINGS)
    found, sequences = _generated(llm, PROMPTS)
    rounded = tiny_models.oracle(path, torch.bfloat16).to(DEVICE)
    return *_against(found, rounded, lambda model: _logits(model, sequences)), _used(llm)


def _whisper_errors(path: Path, num_states: int) -> tuple[Errors, Errors, str]:
    """The same of Whisper, where transformers' decoder reads the first `num_states` of what the encoder gives."""
    llm = LLM(path, **SETTINGS)
    pairs = zip(PROMPTS, RECORDINGS, strict=True)
    found, sequences = _generated(
        llm, [{"prompt_token_ids": prompt, "multi_modal_data": {"audio": audio}} for prompt, audio in pairs]
    )
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(path, trust_remote_code=False)
    features = extractor(RECORDINGS, sampling_rate=tiny_speech.RATE, return_tensors="pt").input_features
    heard = features.to(DEVICE, torch.bfloat16)  # rounded for float32 as well

    @torch.no_grad()
    def logits(model: Any) -> torch.Tensor:
        states = model.model.encoder(heard.to(model.dtype)).last_hidden_state[:, :num_states]
        rows = [
            model(
                encoder_outputs=(states[i : i + 1],),
                decoder_input_ids=torch.tensor([tokens[:-1]], device=DEVICE),
                use_cache=False,
            ).logits[0]
            for i, tokens in enumerate(sequences)
        ]
        return torch.cat(rows).float().cpu()

    cls = transformers.WhisperForConditionalGeneration
    rounded = (
        cls.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager", trust_remote_code=False)
        .eval()
        .to(DEVICE)
    )
    return *_against(found, rounded, logits), _used(llm)


def _encoder_errors(architecture: str, path: Path, unread: int) -> tuple[Errors, Errors, str]:
    """The same of an encoder's first states, or of class logits, where the engine lacks each prompt's last tokens."""
    classifies = architecture in CLASSIFIERS
    params = PoolingParams(task="classify", use_activation=False) if classifies else PoolingParams(normalize=False)
    llm = LLM(path, **{**SETTINGS, "max_model_len": 48, "max_num_batched_tokens": 64})
    served = [prompt[: len(prompt) - unread] for prompt in WHOLE_PROMPTS]
    outputs = llm.encode(served, params, pooling_task="classify" if classifies else "embed")
    found = torch.stack([output.outputs.data for output in outputs])

    @torch.no_grad()
    def answers(model: Any) -> torch.Tensor:
        every = [model(torch.tensor([prompt], device=DEVICE)) for prompt in WHOLE_PROMPTS]
        rows = [each.logits[0] if classifies else each.last_hidden_state[0, 0] for each in every]
        return torch.stack(rows).float().cpu()

    cls = getattr(transformers, architecture)
    rounded = (
        cls.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager", trust_remote_code=False)
        .eval()
        .to(DEVICE)
    )
    return *_against(found, rounded, answers), _used(llm)


@pytest.mark.spread(0, slow=10)
@pytest.mark.parametrize("name", family_table.FAMILIES)
@pytest.mark.behaviour(3, 18)
def test_bfloat16_is_as_near_to_float32_as_transformers_own(
    name: str, tiny: Tiny, record_property: Callable[[str, object], None]
) -> None:
    path = tiny(name)
    ours, baseline, used = _errors(path, path)
    record_property("ratio", _ratio(name, ours, baseline, used))
    assert ours.within(baseline)


@pytest.mark.behaviour(13, 18)
def test_whisper_is_as_near_to_float32_as_transformers_own(
    whisper: Path, record_property: Callable[[str, object], None]
) -> None:
    ours, baseline, used = _whisper_errors(whisper, tiny_speech.NUM_STATES)
    record_property("ratio", _ratio("whisper", ours, baseline, used))
    assert ours.within(baseline)


@pytest.mark.spread(3, slow=3)
@pytest.mark.parametrize("architecture", [*EMBEDDERS, *CLASSIFIERS])
@pytest.mark.behaviour(13, 18, 35)
def test_an_encoder_is_as_near_to_float32_as_transformers_own(
    architecture: str, encoder: Callable[[str], Path], record_property: Callable[[str, object], None]
) -> None:
    ours, baseline, used = _encoder_errors(architecture, encoder(architecture), unread=0)
    record_property("ratio", _ratio(architecture, ours, baseline, used))
    assert ours.within(baseline)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_the_rule_sees_a_window_of_one_key_more(name: str, tiny: Tiny, tmp_path: Path) -> None:
    served = Path(shutil.copytree(tiny(name), tmp_path / name))
    config = json.loads((served / "config.json").read_text(encoding="utf-8"))
    (served / "config.json").write_text(json.dumps({**config, "sliding_window": tiny_models.WINDOW + 1}))
    ours, baseline, _ = _errors(served, tiny(name))
    assert not ours.within(baseline)


def test_the_rule_sees_that_whisper_reads_a_state_more(whisper: Path) -> None:
    ours, baseline, _ = _whisper_errors(whisper, tiny_speech.NUM_STATES - 1)
    assert not ours.within(baseline)


@pytest.mark.parametrize("architecture", ["BertModel", "RobertaForSequenceClassification"])
def test_the_rule_sees_that_an_encoder_lacks_a_key(architecture: str, encoder: Callable[[str], Path]) -> None:
    ours, baseline, _ = _encoder_errors(architecture, encoder(architecture), unread=1)
    assert not ours.within(baseline)
