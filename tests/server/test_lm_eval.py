"""lm-eval against a real socket: its log-likelihoods and texts are those of `LLM`.

It brings 80 packages, so it is no part of the extra `dev`. `LM_EVAL` names its command where it has an environment of
its own: `pip install 'lm-eval[api]' transformers`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT, TESTS
from running_server import RunningServer

from slotline.core import LLM, SamplingParams

COMMAND = os.environ.get("LM_EVAL") or shutil.which("lm_eval")
TASKS = TESTS / "server" / "data" / "lm_eval"
NAMES = ("choices", "endings", "texts")


@pytest.fixture(scope="module")
def samples(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What lm-eval sent and received, by task."""
    if COMMAND is None:
        pytest.skip("lm-eval is not installed, and LM_EVAL names no command of it")
    folder = tmp_path_factory.mktemp("lm_eval")
    tokenizer = server.state.llm.engine.runner.model.facts.path
    values = {
        "model": "slotline-small",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": tokenizer,
        "num_concurrent": 2,
        "max_retries": 1,
        "max_length": 2048,
    }
    arguments = ["--model", "local-completions", "--model_args", ",".join(f"{name}={values[name]}" for name in values)]
    arguments += ["--tasks", ",".join(f"slotline_{name}" for name in NAMES), "--include_path", str(TASKS)]
    arguments += ["--batch_size", "2", "--log_samples", "--output_path", str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder)}
    ran = subprocess.run(
        [COMMAND, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    server.everything_returned()
    return {name: read(next(folder.rglob(f"samples_slotline_{name}_*.jsonl"))) for name in NAMES}


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def log_likelihood(llm: LLM, token_ids: list[int], first: int) -> float:
    """The log-probability of a prompt's tokens from the `first` on."""
    (output,) = llm.generate({"prompt_token_ids": token_ids}, SamplingParams(max_tokens=1, prompt_logprobs=1))
    entries = zip(token_ids[first:], (output.prompt_logprobs or ())[first:], strict=True)
    return sum(entry[token].logprob for token, entry in entries if entry is not None)


@pytest.mark.slow
def test_the_log_likelihoods_of_choices_are_those_of_llm(samples: dict[str, list[dict[str, Any]]], llm: LLM) -> None:
    encode = llm.tokenizer.encode
    asked = [
        ((arguments["arg_0"], arguments["arg_1"]), float(answers[0][0]))
        for sample in samples["choices"]
        for arguments, answers in zip(sample["arguments"].values(), sample["resps"], strict=True)
    ]
    assert len(asked) == 18
    for (context, ending), found in asked:
        assert found == pytest.approx(log_likelihood(llm, encode(context + ending), len(encode(context))), abs=1e-4)


@pytest.mark.slow
def test_the_log_likelihoods_of_texts_are_those_of_llm(samples: dict[str, list[dict[str, Any]]], llm: LLM) -> None:
    (begin,) = llm.tokenizer.encode("<|endoftext|>")
    for sample in samples["texts"]:
        tokens = [begin, *llm.tokenizer.encode(sample["target"])]
        assert float(sample["resps"][0][0]) == pytest.approx(log_likelihood(llm, tokens, 1), abs=1e-4)


@pytest.mark.slow
def test_the_texts_are_those_of_llm(samples: dict[str, list[dict[str, Any]]], llm: LLM) -> None:
    prompts = [sample["arguments"]["gen_args_0"]["arg_0"] for sample in samples["endings"]]
    params = SamplingParams(temperature=0, max_tokens=12, stop=["\n\n"])
    outputs = llm.generate(prompts, params)
    assert [sample["resps"][0][0] for sample in samples["endings"]] == [one.outputs[0].text for one in outputs]
