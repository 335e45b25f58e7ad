"""`slotline tune` on a GPU: every graph mode, engines that leave no memory behind, and `auto` by the figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_cases import tiny_checkpoint

from slotline.cli import main
from slotline.planner.plan import make_plan
from slotline.registry.config import load_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MODES = {"full", "full_and_piecewise", "full_decode_only", "piecewise", "none"}


def test_every_graph_mode_is_timed_and_no_memory_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SLOTLINE_DEVICE", "cuda")
    tiny_checkpoint(tmp_path / "llama_deep")
    config = tmp_path / "run.toml"
    config.write_text(
        'model = "llama_deep"\ndtype = "bfloat16"\nattention.backend = ["triton", "torch"]\n'
        '[cache]\nmemory = "64MiB"\n'
        "[scheduler]\nmax_requests = 8\nmax_model_len = 96\nmax_batched_tokens = 64\n"
    )
    capsys.readouterr()
    assert main(["tune", str(config), "--batches", "1,4", "--context", "16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    by_mode = {trial["graphs"]: trial for trial in report["trials"] if "triton" in str(trial["settings"])}
    assert set(by_mode) == MODES
    assert all(trial["timings"] and not trial["failure"] for trial in report["trials"])
    assert all(trial["leaked_bytes"] == 0 for trial in report["trials"][1:]), report["trials"]
    assert by_mode["none"]["capture"] is None
    assert by_mode["full"]["capture"]["shapes"] == by_mode["full"]["capture"]["graphs"]
    assert by_mode["piecewise"]["capture"]["graphs"] > by_mode["piecewise"]["capture"]["shapes"]
    decode = {mode: trial["timings"]["decode 1"]["median_s"] for mode, trial in by_mode.items()}
    assert decode["full"] < decode["none"]
    plan = make_plan(load_config(config)).plan
    (best,) = [trial for trial in report["trials"] if trial["chosen"]]
    assert plan.graphs.resolved == best["graphs"]
    assert "slotline tune" in plan.graphs.measured
    torch_plan = make_plan(load_config(config, overrides=["attention.backend=torch"])).plan
    (note,) = [note for note in torch_plan.downgrades if note.code == "N310"]
    assert note.because[-1].startswith("measured cost: decode 1 ")
