"""Architectures that are on no list: found by inspection, and checked against transformers when they are loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families_sweep
import pytest
import torch
import transformers
from attrs import evolve

from slotline.core import LLM, SamplingParams
from slotline.plugins.model_families import checkpoint, inspection, self_check, state_mixers, trial_runs, tried
from slotline.plugins.model_families.shrinking import WINDOW
from slotline.plugins.model_families.transformers_model import TransformersDecoder
from slotline.plugins.model_families.trial_cache import TrialCache
from slotline.registry.errors import ModelError
from tests.plugins.model_families.test_model_family import load

pytestmark = pytest.mark.usefixtures("one_thread")

SERVED = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "opt": "OPTForCausalLM",
    "bart": "BartForCausalLM",
    "roberta": "RobertaForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "zamba": "ZambaForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
}
"""Model type -> architecture, one for each way to name parts, to make logits, to count positions and to keep states."""

GEMMA3 = "Gemma3ForConditionalGeneration"

SPARSE_M3 = {
    "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    "index_block_size": 16,
    "index_topk_blocks": 4,
    "index_local_blocks": 1,
}

Made = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return the folder of a small random checkpoint of a model type, made once."""
    folders: dict[str, Path] = {}

    def get(model_type: str, architecture: str) -> Path:
        if model_type not in folders:
            folders[model_type] = tmp_path_factory.mktemp(model_type)
            families_sweep.build(model_type, architecture, folders[model_type])
        return folders[model_type]

    return get


def greedy(path: Path, architecture: str, prompt: list[int], count: int) -> list[int]:
    """Return what transformers generates with its own cache, in which an index picks keys."""
    model = getattr(transformers, architecture).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


@pytest.mark.spread(0, slow=6)
@pytest.mark.parametrize("model_type", SERVED)
def test_an_unlisted_architecture_gives_the_text_of_transformers(model_type: str, made: Made) -> None:
    path = made(model_type, SERVED[model_type])
    runs, _ = families_sweep.of_slotline(path, families_sweep.SETTINGS)
    assert not families_sweep.difference(runs, families_sweep.of_transformers(path, SERVED[model_type]))


@pytest.mark.parametrize(
    ("model_type", "architecture", "said"),
    [
        ("xglm", "XGLMForCausalLM", r"outside transformers' interface.*'model.layers.0' \(XGLMDecoderLayer\).*4 of 4"),
        ("rwkv", "RwkvForCausalLM", r"a state that no mixer of this family knows: in decoder layer 'rwkv.blocks.0'"),
        (
            "mvp",
            "MvpForCausalLM",
            "MvpForCausalLM of .* is not served: it computes attention inside its modules",
        ),
        (
            "zaya",
            "ZayaForCausalLM",
            r"fails its self-check: layer 0 \(ZayaDecoderLayer\) .* at position \d+, by \d",
        ),
        ("gpt_neo", "GPTNeoForCausalLM", "inspection cannot follow .*: it takes its attention from a table of its own"),
        (
            "aya_vision",
            "AyaVisionForConditionalGeneration",
            "other logits than Cohere2ForCausalLM, its text part",
        ),
        ("paligemma", "PaliGemmaForConditionalGeneration", "sets use_bidirectional_attention, so it is no causal"),
    ],
)
def test_what_does_not_run_right_is_refused_with_the_reason(
    model_type: str, architecture: str, said: str, made: Made
) -> None:
    with pytest.raises(ModelError, match=said) as refusal:
        LLM(str(made(model_type, architecture)), **families_sweep.SETTINGS)
    assert refusal.value.fix


@pytest.mark.parametrize("architecture", tried.REFUSED)
def test_an_architecture_that_is_known_not_to_run_is_refused_with_its_reason(architecture: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "any"}))
    with pytest.raises(ModelError, match=f"{architecture} of .* is not served: {tried.REFUSED[architecture]}"):
        LLM(str(tmp_path))


def test_a_passed_check_is_kept_for_the_next_start(made: Made) -> None:
    path = made("stablelm", "StableLmForCausalLM")
    file = self_check.kept_file(checkpoint.read(path))
    assert file is not None
    assert not file.exists()
    first = load(path).notes[0]
    assert first.startswith("self-checked against transformers over its own weights: the largest difference is ")
    written = file.stat().st_mtime_ns
    assert load(path).notes[0] == f"{first}, kept in {file}"
    assert file.stat().st_mtime_ns == written


def test_a_kept_check_holds_for_one_configuration_alone(made: Made, tmp_path: Path) -> None:
    path = made("stablelm", "StableLmForCausalLM")
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": None, "use_qkv_bias": True}))
    assert self_check.kept_file(checkpoint.read(path)) != self_check.kept_file(checkpoint.read(tmp_path))


def test_a_file_of_results_that_cannot_be_read_is_written_again(made: Made) -> None:
    path = made("arcee", "ArceeForCausalLM")
    file = self_check.kept_file(checkpoint.read(path))
    assert file is not None
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("[")
    assert "kept in" not in load(path).notes[0]
    assert "self-checked" in json.loads(file.read_text())["said"]


def test_a_large_model_is_checked_by_a_small_copy(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "SAME_WEIGHTS", 1)
    assert "over a small copy" in self_check._compare(checkpoint.read(made("qwen3_5", SERVED["qwen3_5"])), None)


def test_the_plan_says_that_encoders_are_left_out(made: Made) -> None:
    facts = TransformersDecoder().inspect(made("gemma3", GEMMA3))
    assert facts.notes == (
        "Gemma3ForCausalLM is vetted: the tests compare it with transformers",
        f"only the text part of {GEMMA3} is served, as Gemma3ForCausalLM: its encoders are left out",
    )
    assert "vision" not in " ".join(name for name, _ in load(facts.path).hf_model.named_parameters())


def test_the_plan_says_that_a_check_comes(made: Made) -> None:
    (note,) = TransformersDecoder().inspect(made("gpt2", SERVED["gpt2"])).notes
    assert note == "GPT2LMHeadModel was found by inspection: it is checked against transformers when it is loaded"


class Forgetful(TrialCache):
    """Cache that loses the states of a request after each forward."""

    def advance(self, layer: Any, inputs: Any) -> Any:
        self._states.clear()
        return super().advance(layer, inputs)


def _one_key_more(layer: Any) -> Any:
    return evolve(layer, window=WINDOW + 1) if layer.window else layer


def _no_window(layer: Any) -> Any:
    return evolve(layer, window=None)


def _other_scale(layer: Any) -> Any:
    return evolve(layer, scale=layer.scale * 1.05)


@pytest.mark.parametrize("change", [_one_key_more, _no_window, _other_scale])
def test_the_check_sees_a_wrong_fact_of_attention(
    change: Callable[[Any], Any], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_at = inspection.look_at

    def wrong(found: Any) -> Any:
        seen = look_at(found)
        return evolve(seen, layers=tuple(map(change, seen.layers)))

    monkeypatch.setattr(inspection, "look_at", wrong)
    path = made("cohere2", SERVED["cohere2"])
    with pytest.raises(ModelError, match=r"fails its self-check: layer 0 .* differs .* position \d+, by "):
        self_check._compare(checkpoint.read(path), None)


def test_the_check_sees_a_lost_state(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_runs, "TrialCache", Forgetful)
    path = made("lfm2_moe", SERVED["lfm2_moe"])
    with pytest.raises(ModelError, match=r"layer 0 .* first at position 21, by "):  # where the second chunk begins
        self_check._compare(checkpoint.read(path), None)


def test_a_mixer_that_nobody_knows_is_not_passed_over(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_mixers.mixers, "KINDS", ())
    found = checkpoint.read(made("minimax", SERVED["minimax"]))
    inspection._seen.cache_clear()
    with pytest.raises(ModelError, match=r"no mixer .* 'model.layers.1' \(MiniMaxDecoderLayer\) .* \(2 of 4 layers\)"):
        inspection.facts_of(found)


@pytest.mark.parametrize(
    ("model_type", "architecture", "settings", "longest"),
    [
        ("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", SPARSE_M3, 64),
    ],
)
def test_an_index_of_keys_ends_the_served_length_where_it_leaves_keys_out(
    model_type: str, architecture: str, settings: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    families_sweep.build(model_type, architecture, tmp_path, settings)
    assert TransformersDecoder().inspect(tmp_path).default_max_model_len == longest
    short = {**families_sweep.SETTINGS, "max_model_len": longest}
    llm = LLM(str(tmp_path), **short)
    prompt = families_sweep.prompts()[1]
    params = SamplingParams(temperature=0, max_tokens=longest - len(prompt), ignore_eos=True)
    (request,) = llm.generate([prompt], params, progress=False)
    assert list(request.outputs[0].token_ids) == greedy(tmp_path, architecture, prompt, longest - len(prompt))
    with pytest.raises(ModelError, match=f"picks {longest} keys by an index .* max_model_len is 128") as refusal:
        LLM(str(tmp_path), **families_sweep.SETTINGS)
    assert refusal.value.fix == f"set scheduler.max_model_len = {longest} or less"


def test_a_vetted_hybrid_without_a_state_runs(tmp_path: Path) -> None:
    families_sweep.build("lfm2", "Lfm2ForCausalLM", tmp_path, {"layer_types": ["full_attention"] * 4})
    runs, kinds = families_sweep.of_slotline(tmp_path, families_sweep.SETTINGS)
    assert kinds == "4 full"
    assert not families_sweep.difference(runs, families_sweep.of_transformers(tmp_path, "Lfm2ForCausalLM"))


def test_positions_end_where_their_table_does(made: Made) -> None:
    path = made("whisper", "WhisperForCausalLM")
    assert TransformersDecoder().inspect(path).max_model_len == checkpoint.read(path).config.max_target_positions


def test_llama_4_runs_its_text_part(tmp_path: Path) -> None:
    architecture = "Llama4ForConditionalGeneration"
    families_sweep.build("llama4", architecture, tmp_path)
    runs, _ = families_sweep.of_slotline(tmp_path, families_sweep.SETTINGS)
    whole = transformers.Llama4ForConditionalGeneration.from_pretrained(tmp_path, trust_remote_code=False)
    whole.language_model.save_pretrained(tmp_path / "text")
    assert not families_sweep.difference(runs, families_sweep.of_transformers(tmp_path / "text", "Llama4ForCausalLM"))
