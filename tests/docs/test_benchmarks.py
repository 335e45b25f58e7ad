"""Every script of benchmarks/ runs: for a moment on a tiny model, or up to the need for a GPU where there is none."""

from __future__ import annotations

import ast
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from repository import ROOT

FOLDER = ROOT / "benchmarks"
SOURCES = sorted(FOLDER.glob("*.py"))


class Outcome(NamedTuple):
    """What a run of a script left: its exit code and what it printed."""

    code: int
    out: str
    err: str


def scripts() -> list[Path]:
    """Return the sources that are run, and not only imported by others."""
    return [path for path in SOURCES if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]


def statements(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body


def short_arguments(path: Path) -> list[str]:
    """Return the arguments of a short run, which the script's `SHORT` says."""
    for statement in statements(path):
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "SHORT":
            return shlex.split(ast.literal_eval(statement.value))
    pytest.fail(f"{path.name} has no SHORT: state the arguments of a run of a second or two on a tiny model")


def needs_gpu(path: Path) -> bool:
    """Whether `main` asks for a GPU, whatever its arguments are."""
    (main,) = (each for each in statements(path) if isinstance(each, ast.FunctionDef) and each.name == "main")
    return any(ast.unparse(each).startswith("require_gpus(") for each in main.body)


def run(
    path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Outcome:
    """Run a script in this process as Python would; another process would import torch and transformers once more."""
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(FOLDER)
    threads, code = torch.get_num_threads(), 0
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        torch.set_num_threads(threads)
    return Outcome(code, *capfd.readouterr())


def run_apart(
    path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Outcome:
    """Run a script in a process of its own where it gets further than its arguments: it may patch what others use."""
    if not torch.cuda.is_available():
        return run(path, arguments, monkeypatch, capfd)
    done = subprocess.run([sys.executable, str(path), *arguments], cwd=ROOT, capture_output=True, text=True)
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.stem)
def test_a_benchmark_runs_for_a_moment(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told = run(path, ["--help"], monkeypatch, capfd)
    assert (told.code, told.out[:6]) == (0, "usage:"), told
    done = (run_apart if needs_gpu(path) else run)(path, short_arguments(path), monkeypatch, capfd)
    if needs_gpu(path) and not torch.cuda.is_available():
        assert done.code == 2, done
        assert "this benchmark needs" in done.err, done
        assert "fix: run it on a machine where `slotline doctor` lists" in done.err, done
    else:
        assert done.code == 0, done
        assert done.out.strip(), "a benchmark prints its figures"


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("attention_cpu", "--rounds 1", "1 is too small, use 2 or more"),
        ("attention_cpu", "--shapes 1:1", "'1:1' is not REQUESTS:QUERY:CONTEXT"),
        ("attention_cpu", "--shapes 1:8:4", "'1:8:4' has more new tokens than tokens in all"),
        ("linear_cpu", "--shapes 8by8", "'8by8' is not INxOUT"),
        ("linear_cpu", "--dtype", "expected at least one argument"),
        ("passes_cpu", "--rounds many", "'many' is not a whole number"),
        ("microbatches_gpu", "0", "0 is too small, use 2 or more"),
    ],
)
def test_a_benchmark_refuses_arguments_that_cannot_be_measured(
    script: str, arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done = run(FOLDER / f"{script}.py", shlex.split(arguments), monkeypatch, capfd)
    assert done.code == 2, done
    assert said in done.err


@pytest.mark.parametrize(
    "arguments", ["--shapes 64x48 --tokens 64 512 1", "--shapes 64x140000 --tokens 64 --dtype float32"]
)
def test_linear_layers_are_measured_however_few_copies_there_are(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done = run(FOLDER / "linear_cpu.py", ["--rounds", "1", *shlex.split(arguments)], monkeypatch, capfd)
    assert done.code == 0, done


def test_the_launcher_of_a_compiler_empties_the_units_that_are_never_called(tmp_path: Path) -> None:
    """Runs `echo` in place of a compiler."""
    launcher = ["sh", str(FOLDER / "paged_kernels_only.sh"), "echo", "batch_decode_ragged_x_kernel_mask_0.cu", "a.cu"]
    done = subprocess.run(launcher, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["batch_decode_ragged_x_kernel_mask_0.empty.cu", "a.cu"]
