"""`slotline generate`: the text as it comes, the summary, JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli_cases import tiny_checkpoint

from slotline.cli import main
from slotline.core import LLM, SamplingParams


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tiny_checkpoint(tmp_path_factory.mktemp("generate") / "llama")
    return folder


@pytest.fixture(scope="module")
def small(checkpoint: Path) -> list[str]:
    """Options that make an engine start fast."""
    keys = (
        "cache.memory=16MiB",
        "attention.backend=torch",
        "scheduler.max_requests=4",
        "scheduler.max_batched_tokens=64",
    )
    return ["--model", str(checkpoint), *(f"--set={key}" for key in keys)]


def test_the_text_is_that_of_the_library_and_the_summary_goes_to_standard_error(
    small: list[str], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *small, "--temperature", "0", "--max-tokens", "24", "def main("]) == 0
    shown = capsys.readouterr()
    llm = LLM(model=str(checkpoint), backend="torch", memory="16MiB", max_num_seqs=4, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=24)
    assert shown.out == llm.generate("def main(", params, progress=False)[0].outputs[0].text + "\n"
    (line,) = shown.err.strip().splitlines()
    assert llm.plan.summary() in line
    assert "full=torch" in line
    assert "24 out" in line
    assert "tokens/s" in line
    assert line.endswith("ended by length")


def test_text_is_printed_and_flushed_while_it_is_generated(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        flushed: list[str]

        def flush(self) -> None:
            self.flushed.append(self.getvalue())

    terminal = Terminal()
    terminal.flushed = []
    monkeypatch.setattr("sys.stdout", terminal)
    main(["generate", *small, "--max-tokens", "16", "class Row:"])
    steps = sorted(set(terminal.flushed), key=len)
    assert len(steps) > 4
    assert all(later.startswith(earlier) for earlier, later in pairwise(steps))


def test_json_holds_tokens_reason_and_plan_and_the_prompt_may_come_from_standard_input(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("import os"))
    assert main(["generate", *small, "--max-tokens", "5", "--json", "-"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt"] == "import os"
    assert len(answer["outputs"][0]["token_ids"]) == 5
    assert answer["outputs"][0]["finish_reason"] == "length"
    assert answer["plan"]["summary"].startswith(f"plan {answer['plan']['digest'][:6]}")


def test_stop_strings_and_seeds_reach_the_sampler(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def run(*options: str) -> dict[str, Any]:
        assert main(["generate", *small, "--max-tokens", "24", "--json", *options, "def main("]) == 0
        output: dict[str, Any] = json.loads(capsys.readouterr().out)["outputs"][0]
        return output

    sampled = [run("--temperature", "1", "--top-k", "50", "--seed", seed)["token_ids"] for seed in ("1", "1", "2")]
    assert sampled[0] == sampled[1] != sampled[2]
    text = run()["text"]
    stop = next(char for char in text[4:] if char.isascii() and char.isprintable())
    stopped = run("--stop", stop)
    assert stopped["stop_reason"] == stop
    assert stopped["text"] == text[: text.index(stop)]


def test_stats_time_the_parts_of_a_step(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *small, "--max-tokens", "4", "--stats", "a"]) == 0
    shown = capsys.readouterr().err
    assert "forward, ms a step" in shown
    assert "cache blocks" in shown
    assert "start, weights, s" in shown


def test_a_request_that_fails_on_the_way_says_so_with_its_exit_code(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ban_all.py").write_text(BAN_ALL)
    options = [f"--set=plugins.inline=['{tmp_path / 'ban_all.py'}:BanAll']", "--set=logits_processors.ban_all={}"]
    assert main(["generate", *small, *options, "a"]) == 2
    assert "ended by error ('RequestError: no token is left to sample" in capsys.readouterr().err


BAN_ALL = """
import torch
from slotline.registry import Descriptor, Kind
from slotline.registry.contracts import LogitsProcessorCapabilities

class BanAll:
    descriptor = Descriptor(
        kind=Kind.LOGITS_PROCESSOR, name="ban_all", factory="", capabilities=LogitsProcessorCapabilities(parameters=())
    )
    def __init__(self, context):
        pass
    def validate(self, params):
        pass
    def admit(self, row, params, prompt_token_ids):
        return True
    def apply(self, logits, batch):
        return torch.full_like(logits, -torch.inf)
    def release(self, row):
        pass
"""


def errors() -> Iterator[tuple[list[str], str]]:
    yield ["--temperature", "-1", "a"], "temperature=-1.0 is not allowed"
    yield ["--chat", "a"], "has no chat template"
    yield ["--set", "drafter.name=nothing", "a"], "nothing"
    yield [""], "the prompt is empty"


@pytest.mark.parametrize(("options", "message"), list(errors()))
def test_what_is_wrong_is_an_error_with_a_fix(
    small: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *small, *options]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "fix:" in shown.err
    assert shown.out == ""
