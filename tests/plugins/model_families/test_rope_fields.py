"""Rope parameters of every type with a field missing, null or odd: run as transformers runs them, or named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from slotline.core import LLM, SamplingParams
from slotline.plugins.model_families.transformers_model import TransformersDecoder
from slotline.registry.errors import ModelError

Tiny = Callable[..., Path]
Greedy = Callable[[Path, list[int], int], list[int]]
ORIGINAL = {"original_max_position_embeddings": 16}
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, **ORIGINAL},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **ORIGINAL},
}
ODD: tuple[Any, ...] = (None, "x", "4.0", 0, -2, True, [4], {}, 1e400, float("nan"))


@pytest.fixture
def checkpoint(tiny: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny Llama with other rope parameters; keys that are None are left out."""

    def get(**changes: Any) -> Path:
        folder = tmp_path / "checkpoint"
        if not folder.exists():
            shutil.copytree(tiny("llama_deep"), folder)
        config = json.loads((tiny("llama_deep") / "config.json").read_text())
        del config["rope_parameters"]
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64} | changes))
        return folder

    return get


def length_of(folder: Path) -> int:
    return TransformersDecoder().inspect(folder).max_model_len


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_each_odd_value_of_each_field_is_named_or_runs_as_in_transformers(
    kind: str, field: str, spelling: str, checkpoint: Callable[..., Path]
) -> None:
    good = {spelling: kind, "rope_theta": 10000.0, **TYPES[kind]}
    assert length_of(checkpoint(**{field: good})) >= 64
    for name in good:
        for value in ODD:
            folder = checkpoint(**{field: {**good, name: value}})
            if name == spelling:
                if not isinstance(value, str):
                    with pytest.raises(ModelError):
                        length_of(folder)
            elif value is None and name == "factor" and kind in ("yarn", "longrope"):
                assert length_of(folder) == 64
            else:
                with pytest.raises(ModelError, match=rf"config\.json: rope_\w+\.{name} = .* is not a ") as refused:
                    length_of(folder)
                assert "TypeError" not in str(refused.value)


@pytest.mark.parametrize("kind", TYPES)
def test_a_missing_field_is_filled_in_or_named(kind: str, checkpoint: Callable[..., Path]) -> None:
    good = {"rope_type": kind, "rope_theta": 10000.0, **TYPES[kind]}
    for name in good:
        folder = checkpoint(rope_parameters={key: value for key, value in good.items() if key != name})
        try:
            transformers.LlamaConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception:
            with pytest.raises(ModelError, match=name):
                length_of(folder)
        else:
            assert length_of(folder) >= 64


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn", "factor": None, **ORIGINAL},
        {"rope_type": "yarn", "factor": None, "attention_factor": None, "beta_fast": None, "mscale": None, **ORIGINAL},
        {"type": "yarn", "factor": None, "truncate": False, **ORIGINAL},
        {"rope_type": "longrope", "factor": None, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **ORIGINAL},
    ],
)
def test_a_factor_of_null_gives_the_text_of_transformers(
    parameters: dict[str, Any], checkpoint: Callable[..., Path], greedy: Greedy
) -> None:
    folder = checkpoint(rope_parameters={"rope_theta": 10000.0, **parameters})
    llm = LLM(folder, dtype="float32", backend="torch", memory="4MiB", device="cpu", max_num_seqs=2)
    assert llm.engine.limits.max_model_len == 64
    prompt = [5, 9, 77, 31] * 6  # beyond the original length
    (output,) = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=12), progress=False)
    assert list(output.outputs[0].token_ids) == greedy(folder, prompt, 12)


@pytest.mark.parametrize("value", [None, "x", 0])
def test_parameters_by_layer_type_are_looked_at_one_by_one(tiny: Tiny, tmp_path: Path, value: Any) -> None:
    folder = Path(shutil.copytree(tiny("gemma3"), tmp_path / "gemma3"))
    config = json.loads((folder / "config.json").read_text())
    parameters = config["rope_parameters"]
    assert set(parameters) == {"full_attention", "sliding_attention"}
    parameters["full_attention"] |= {"rope_type": "linear", "factor": value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=rf"rope_parameters\.full_attention\.factor = {value!r} is not a number above 0"
    ):
        length_of(folder)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 2.0},
            "high_freq_factor = 2.0",
        ),
        ({"rope_type": "linear", "factor": 0.001}, "rope_parameters make 0 tokens of max_position_embeddings = 64"),
        (
            {"rope_type": "default", "partial_rotary_factor": 2.0},
            "partial_rotary_factor = 2.0 is not a number above 0, 1",
        ),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": "a"}, "beta_fast = 'a' is not a number"),
        (5, "rope_parameters"),
        ([1], "rope_parameters"),
    ],
)
def test_parameters_that_make_no_sense_together_are_named(
    parameters: Any, message: str, checkpoint: Callable[..., Path]
) -> None:
    more = {"rope_theta": 10000.0} if isinstance(parameters, dict) else None
    with pytest.raises(ModelError, match=message):
        length_of(checkpoint(rope_parameters={**parameters, **more} if more else parameters))
