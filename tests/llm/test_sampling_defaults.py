"""generation_config.json: its sampling parameters are defaults, the plan says so, and what a caller names wins."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tiny_engines import DEFAULTS

from slotline.cli import main
from slotline.core import LLM, SamplingParams
from slotline.llm.beam_search import BeamSearchParams
from slotline.registry.errors import ConfigError, ModelError

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
PROMPT = [5, 6, 7]


@pytest.fixture
def checkpoint(tiny: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny checkpoint whose generation_config.json has these values."""

    def made(**values: Any) -> Path:
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny("llama"), folder)
        file = folder / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
        return folder

    return made


def used(llm: LLM, params: SamplingParams | None = None) -> SamplingParams:
    """The parameters with which a request runs."""
    seen: list[SamplingParams] = []
    add = llm.engine.add

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["params"])
        return add(*args, **kwargs)

    llm.engine.add = spy  # type: ignore[method-assign]
    try:
        llm.generate(PROMPT, params)
        list(llm.stream(PROMPT, params))
    finally:
        del llm.engine.add
    assert seen[0] == seen[1]
    return seen[0]


NAMED = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3, "max_new_tokens": 3}


def test_what_the_file_names_holds_where_the_caller_names_nothing(checkpoint: Callable[..., Path]) -> None:
    llm = LLM(checkpoint(**NAMED, do_sample=True), **DEFAULTS)
    params = used(llm)
    assert params == llm.get_default_sampling_params()
    assert params == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.3, max_tokens=3
    )
    mine = SamplingParams(temperature=1.0, top_k=0, max_tokens=2)  # defaults of ours, and named all the same
    assert used(llm, mine) == SamplingParams(
        temperature=1.0, top_k=0, top_p=0.9, min_p=0.05, repetition_penalty=1.3, max_tokens=2
    )
    greedy = used(llm, SamplingParams(temperature=0, ignore_eos=True))
    assert greedy == SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=3, ignore_eos=True)
    assert used(llm, evolve(mine, n=1)).max_tokens == 2


def test_a_default_changes_the_text_as_the_same_parameter_does(checkpoint: Callable[..., Path]) -> None:
    params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
    plain = LLM(checkpoint(), **DEFAULTS)
    named = evolve(params, temperature=0.4, top_k=1, repetition_penalty=1.5)
    wanted = plain.generate(PROMPT, named)[0].outputs[0].token_ids
    llm = LLM(checkpoint(temperature=0.4, top_k=1, repetition_penalty=1.5), **DEFAULTS)
    assert llm.generate(PROMPT, params)[0].outputs[0].token_ids == wanted
    assert plain.generate(PROMPT, params)[0].outputs[0].token_ids != wanted
    off = LLM(checkpoint(temperature=0.4, top_k=1), **{**DEFAULTS, "sampling.generation_config": "none"})
    assert used(off, params) == params
    beams = BeamSearchParams(beam_width=2, max_tokens=4)
    searched = [one.beam_search(PROMPT, beams)[0].sequences[0].tokens for one in (plain, llm)]
    assert searched[0] == searched[1]


def test_a_checkpoint_that_does_not_sample_is_greedy(checkpoint: Callable[..., Path]) -> None:
    llm = LLM(checkpoint(do_sample=False, temperature=0.6, top_k=5), **DEFAULTS)
    assert used(llm) == SamplingParams(temperature=0)
    assert used(llm, SamplingParams(temperature=0.5)) == SamplingParams(temperature=0.5)


def test_the_plan_says_what_the_file_names(checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    def lines(*arguments: str) -> list[str]:
        assert main(["explain", *arguments]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if "sampling.generation_config" in line]

    path = checkpoint(**NAMED, no_repeat_ngram_size=3, num_beams=1)
    (line,) = lines("--set", f"model={path}")
    for text in (
        "temperature=0.6, top_k=20, top_p=0.9",
        "max_tokens=3",
        "not read: no_repeat_ngram_size",
        "generation_config.json",
    ):
        assert text in line
    assert "num_beams" not in line
    (line,) = lines("--set", f"model={path}", "--set", "sampling.generation_config=none")
    assert "none" in line
    assert "--set" in line
    assert lines("--set", f"model={checkpoint()}") == []
    assert lines() == []


def test_the_command_asks_the_model_for_what_is_left_out(
    checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkpoint(max_new_tokens=2, top_k=1)

    def tokens(*options: str) -> list[int]:
        assert main(["generate", "--model", str(path), "--json", *options, "def main("]) == 0
        found: list[int] = json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"]
        return found

    assert len(tokens()) == 2
    assert tokens("--seed", "1") == tokens("--seed", "2")
    assert len(tokens("--max-tokens", "4")) == 4


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "hot", r"temperature = 'hot' is not allowed\n  fix: temperature must be a number"),
        ("temperature", float("nan"), "temperature = nan is not allowed"),
        ("temperature", -1, "temperature = -1 is not allowed"),
        ("top_p", 0, "top_p = 0 is not allowed"),
        ("top_k", 2.5, "top_k = 2.5 is not allowed"),
        ("top_k", [1], r"top_k = \[1\] is not allowed"),
        ("min_p", True, "min_p = True is not allowed"),
        ("repetition_penalty", 0, "repetition_penalty = 0 is not allowed"),
        ("max_new_tokens", 0, "max_new_tokens = 0 is not allowed"),
    ],
)
def test_a_wrong_value_in_the_file_is_named(
    name: str, value: Any, message: str, checkpoint: Callable[..., Path]
) -> None:
    path = checkpoint(**{name: value})
    with pytest.raises(ModelError, match=rf"generation_config\.json: {message}"):
        LLM(path, **DEFAULTS)
    LLM(path, **{**DEFAULTS, "sampling.generation_config": "none"})


def test_null_is_no_value_and_the_key_has_two(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint(temperature=None, top_k=None)
    assert used(LLM(path, **DEFAULTS)) == SamplingParams()
    with pytest.raises(ConfigError, match=r"sampling\.generation_config"):
        LLM(path, **{**DEFAULTS, "sampling.generation_config": "vllm"})
