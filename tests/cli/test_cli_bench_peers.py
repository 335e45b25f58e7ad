"""`slotline bench --against`: another engine on the same work, ratios that are kept, and a check against them."""

from __future__ import annotations

import json
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from cli_cases import tiny_checkpoint
from repository import ROOT

from slotline.cli import main
from slotline.cli.bench_limits import Machine
from slotline.cli.bench_peers import PeerError, PeerJob, check_same_model, check_same_text, run_peer
from slotline.cli.bench_ratios import ratios, read_cells, save, slower
from slotline.cli.bench_run import Run, Served, Wave
from slotline.core.engine.engine import Engine
from slotline.registry.errors import ConfigError

STORED = ROOT / "benchmarks/results/cpu-ratios-epyc.json"
FAST = [f"--set={key}" for key in ("cache.memory=16MiB", "attention.backend=torch", "scheduler.max_batched_tokens=128")]
MACHINE = Machine(read_bytes_per_s=1e10, copy_bytes_per_s=1e10, flops_per_s=1e11, dtype="float32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tiny_checkpoint(tmp_path_factory.mktemp("peers") / "llama")
    return folder


def a_run(seconds: float, *firsts: int) -> Run:
    """Two tokens of each request, whose first tokens these are."""
    served = tuple(Served(prompt=4, cached=0, output=2, first=seconds / 2, tokens=(token, 7)) for token in firsts)
    count = len(firsts)
    steps = ((seconds / 2, seconds / 2, count), (seconds, seconds / 2, count))
    return Run(waves=(Wave(seconds=seconds, served=served, steps=steps, prompt_steps=1),))


def a_cell(**changes: Any) -> dict[str, Any]:
    rows = ratios(a_run(1.0, 1, 2), a_run(2.0, 1, 2), None, MACHINE)
    cell: dict[str, Any] = {"peer": "transformers", "peer_version": "5.0", "workload": "decode1", "scale": 1.0}
    cell |= {"model": "models/llama", "settings": [], "peer_settings": [], "dtype": "float32", "parameters": 10}
    cell |= {"requests": 2, "tokens_in": 8, "tokens_out": 4, "command": "slotline bench decode1"}
    cell |= {"figures": {row.ours.key: row.to_json() for row in rows}, "rows": [list(row.cells()) for row in rows]}
    return cell | changes


def test_a_ratio_says_how_many_times_as_fast_ours_is() -> None:
    found = {row.ours.key: row.ratio for row in ratios(a_run(1.0, 1, 2), a_run(2.0, 1, 2), None, MACHINE)}
    assert {"seconds", "output_tokens_per_s", "prefill_tokens_per_s", "ttft_median", "step_median"} <= found.keys()
    assert set(found.values()) == {2.0}


def test_a_figure_that_fell_by_more_than_the_tolerance_is_named_with_who_changed() -> None:
    now = a_cell()
    now["figures"] = {**now["figures"], "seconds": {**now["figures"]["seconds"], "ours": 1.25, "ratio": 1.6}}
    (line,) = slower(a_cell(), now, 0.1)
    assert line == "decode1, seconds: 1.60x transformers, kept 2.00x (-20%); ours +25%, theirs +0%"
    assert slower(a_cell(), now, 0.3) == []
    del now["figures"]["step_median"]
    assert any("step_median: there is no such figure now" in line for line in slower(a_cell(), now, 0.3))


def test_other_work_than_was_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match="kept with parameters 10, and has 11 now"):
        slower(a_cell(), a_cell(parameters=11), 0.1)


def test_a_file_keeps_one_cell_of_each_comparison(tmp_path: Path) -> None:
    file = tmp_path / "results" / "ratios.json"
    save(file, a_cell())
    save(file, a_cell(workload="decode16"))
    save(file, a_cell(peer_version="6.0"))
    cells = read_cells(file)
    assert [(cell["workload"], cell["peer_version"]) for cell in cells] == [("decode16", "5.0"), ("decode1", "6.0")]
    found = json.loads(file.read_text("utf-8"))
    assert {len(row) for row in found["rows"]} == {len(found["columns"])}
    assert found["rows"][0][0] == "transformers 5.0, llama in float32, decode16, time in all"
    assert found["rows"][0][3] == "2.00x"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="has no ratios"):
        read_cells(file)


def test_the_ratios_that_the_repository_keeps_can_be_checked_and_a_slower_engine_is_named() -> None:
    cells = read_cells(STORED)
    kept = {(cell["peer"], cell["workload"]) for cell in cells}
    assert kept >= {(peer, work) for peer in ("transformers", "openvino") for work in ("decode1", "decode16")}
    for cell in cells:
        assert not cell["model"] or (ROOT / cell["model"] / "config.json").is_file()
        assert slower(cell, cell, 0.05) == []
        seconds = cell["figures"]["seconds"]
        slow = {**seconds, "ours": 1.2 * seconds["ours"], "ratio": seconds["ratio"] / 1.2}
        (line,) = slower(cell, {**cell, "figures": {**cell["figures"], "seconds": slow}}, 0.05)
        assert line.startswith(f"{cell['workload']}, seconds: {slow['ratio']:.2f}x {cell['peer']}, kept ")
        assert line.endswith("(-17%); ours +20%, theirs +0%")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of arguments that are refused."""
    assert main(["bench", *arguments]) == 2
    return capsys.readouterr().err


def test_what_is_missing_is_named_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))
    if find_spec("vllm") is None:
        shown = refused(capsys, "decode1", "--against", "vllm")
        assert f"vllm cannot run: {sys.executable} has no package vllm" in shown
        assert f"make an environment in {tmp_path}/peers/vllm (pip install vllm)" in shown
        shown = refused(capsys, "decode1", "--against", "vllm", "--peer-python", sys.executable)
        assert "has no package vllm" in shown
    assert "there is no Python" in refused(capsys, "decode1", "--against", "vllm", "--peer-python", "/no/python")
    assert "there are transformers, vllm, openvino" in refused(capsys, "decode1", "--against", "orca")
    assert "is not NAME=VALUE" in refused(capsys, "decode1", "--against", "transformers", "--peer-set", "fast")
    assert "--save has no meaning without a peer" in refused(capsys, "decode1", "--save", "file.json")
    assert "cannot be read" in refused(capsys, "--check", str(tmp_path / "none.json"))
    assert "no workload is named" in refused(capsys)


def test_another_model_and_another_text_are_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 99}))
    with pytest.raises(PeerError, match="num_hidden_layers is 99, not"):
        check_same_model(checkpoint, tmp_path)
    options = ["--model", str(checkpoint), *FAST, "--against", "transformers", "--peer-model", str(tmp_path)]
    assert "is another model than" in refused(capsys, "decode1", *options)
    assert check_same_text(a_run(1.0, 1, 2, 3), a_run(1.0, 1, 2, 4), "vllm", 0.0) == pytest.approx(2 / 3)
    assert check_same_text(a_run(1.0, 1), a_run(1.0, 2), "vllm", 0.6) is None
    with pytest.raises(PeerError, match="vllm makes another text: the first token of 2 of 3 requests differs"):
        check_same_text(a_run(1.0, 1, 2, 3), a_run(1.0, 1, 4, 5), "vllm", 0.0)


@pytest.fixture
def job(checkpoint: Path) -> PeerJob:
    return PeerJob(
        peer="transformers",
        model=str(checkpoint),
        dtype="float32",
        device="cpu",
        threads=1,
        waves=([[5, 6, 7], [8]],),
        max_tokens=([2, 4],),
        temperature=0.0,
        max_model_len=64,
        runs=1,
        options={},
    )


def test_a_peer_that_cannot_run_is_named(job: PeerJob) -> None:
    if find_spec("vllm") is None:
        with pytest.raises(PeerError, match="has no package vllm"):
            run_peer(evolve(job, peer="vllm"), sys.executable, None)
    with pytest.raises(PeerError, match="openvino is not run on cuda here"):
        run_peer(evolve(job, peer="openvino", device="cuda"), sys.executable, None)


@pytest.mark.exhaustive
def test_a_peer_that_fails_or_loads_another_model_is_named(job: PeerJob) -> None:
    with pytest.raises(PeerError, match=r"transformers failed with exit code 1:(.|\n)*no_such_form"):
        run_peer(evolve(job, options={"attn_implementation": "no_such_form"}), sys.executable, None)
    with pytest.raises(PeerError, match=r"transformers loaded another model: .* parameters, and ours has 7"):
        run_peer(job, sys.executable, 7)


@pytest.mark.slow
def test_a_comparison_is_printed_kept_and_checked(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slotline.cli.bench_against.measure_machine", lambda *_: MACHINE)  # seconds, four times
    file = tmp_path / "ratios.json"
    options = ["--model", str(checkpoint), *FAST, "--scale", "0.2", "--runs", "1"]
    assert main(["bench", "decode16", *options, "--against", "transformers", "--save", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "3 requests, 18 tokens in, 39 out" in shown
    assert "100% of the first tokens are the same" in shown
    lines = {line.split("  ")[0]: line.split() for line in shown.splitlines()}
    for label in ("time in all", "output tokens/s", "time to first token, median", "decoding step, median"):
        assert lines[label][-1].endswith("%")
        assert lines[label][-3].endswith("x")

    step = Engine.step

    def slow_step(engine: Engine) -> Any:
        time.sleep(0.2)
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow_step)  # a regression that is real
    assert main(["bench", "--check", str(file), "--runs", "1", "--tolerance", "20"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert "slower, more than 20 % below what was kept:" in printed
    named = {line.split(": ")[0]: line for line in printed if "; ours +" in line}
    assert {"decode16, seconds", "decode16, step_median", "decode16, ttft_median"} <= named.keys()
    assert all(re.search(r"x transformers, kept .*; ours \+\d+%, theirs ", line) for line in named.values())
