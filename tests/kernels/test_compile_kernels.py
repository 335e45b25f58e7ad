"""`benchmarks/compile_kernels.py`: every kernel in Gluon compiles for a Hopper GPU with the installed Triton."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

pytest.importorskip("triton")


def compiled(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "compile_kernels.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_folder_without_triton_is_refused_with_what_makes_one(tmp_path: Path) -> None:
    done = compiled("--triton", str(tmp_path))
    assert done.returncode == 2
    assert f"there is no Triton in {tmp_path}: `pip install triton==" in done.stderr


@pytest.mark.exhaustive
def test_every_kernel_for_hopper_compiles_in_every_form_of_its_launches(tmp_path: Path) -> None:
    done = compiled("--only", "hopper", "--most", "16", "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout
    (found,) = json.loads((tmp_path / "found.json").read_text("utf-8"))
    forms = {row["kernel"].rpartition(".")[2]: row["forms"] for row in found["kernels"]}
    assert forms.keys() == {"attend_latents", "attend_prompts", "attend_decodes"}
    assert min(forms.values()) >= 8
    assert found["lacking"] is None


@pytest.mark.exhaustive
def test_launches_that_tests_write_down_compile(tmp_path: Path) -> None:
    """Recorded under the interpreter, by a test of ours, and compiled by a process without it."""
    file = tmp_path / "launches.jsonl"
    test = "tests/sampling/test_token_bitmask.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "record_launches", "--record-launches", str(file), test]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    done = compiled("--only", "ban_tokens", "--launches", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ban_tokens | " in done.stdout
