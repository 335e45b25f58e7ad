"""`slotline new-plugin`: what it writes is installed, tested, checked and run as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cli_cases import pretend_project_installed, tiny_checkpoint
from repository import ROOT
from tool_model import EMPTY, make_tool_model

from slotline.cli import main
from slotline.cli.new_plugin import KINDS
from slotline.core import LLM, SamplingParams
from slotline.registry.errors import RequestError
from slotline.registry.loading import import_dotted
from slotline.testing.check import Level
from slotline.testing.runner import check_plugin

PROMPTS = ["def main(", "The quick brown fox jumps over", "import os, import os, import"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("new_plugin") / "llama"))


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Path]]:
    """A new plugin of each kind, `fresh_KIND`, all of them installed."""
    folder = tmp_path_factory.mktemp("projects")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for kind in KINDS:
            assert main(["new-plugin", kind, f"fresh_{kind}", "--path", str(folder / kind)]) == 0
            pretend_project_installed(monkeypatch, folder / "site", folder / kind)
        yield {kind: folder / kind for kind in KINDS}


def run(*command: str, cwd: Path) -> str:
    """What a Python module prints that sees the projects; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_ADDOPTS": "-p no:schemathesis"},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tokens(checkpoint: str, **settings: Any) -> list[list[int]]:
    """Greedy tokens of a mixed batch; prompts of different lengths, cut into pieces by a small step."""
    extra = settings.pop("extra_args", None)
    llm = LLM(
        model=checkpoint, memory="16MiB", max_num_seqs=4, max_num_batched_tokens=8, **{"backend": "torch", **settings}
    )
    params = SamplingParams(temperature=0, max_tokens=12, extra_args=extra, detokenize=False)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, progress=False)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_plugin_has_all_that_a_package_needs(kind: str, projects: Mapping[str, Path]) -> None:
    project, name = projects[kind], f"fresh_{kind}"
    files = {str(file.relative_to(project)) for file in project.rglob("*.*") if file.is_file()}
    module = import_dotted(f"{name}:descriptor", name).factory.partition(":")[0].rpartition(".")[2]
    assert {file for file in files if "__pycache__" not in file} == {
        ".copier-answers.yml",
        ".github/workflows/conformance.yml",
        "README.md",
        "pyproject.toml",
        "pytest.toml",
        f"src/{name}/__init__.py",
        f"src/{name}/py.typed",
        f"src/{name}/{module}.py",
        f"tests/test_{name}.py",
    }
    assert tomllib.loads((project / "pytest.toml").read_text())["pytest"]["slotline_plugin"] == name
    assert "{" + "{" not in (project / "README.md").read_text()
    assert "${{ vars.GPU_RUNNER }}" in (project / ".github/workflows/conformance.yml").read_text()


@pytest.mark.spread(0, slow=3)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "attention"])  # whose pass in .ci/new_plugins
def test_the_tests_of_a_new_plugin_pass(kind: str, projects: Mapping[str, Path]) -> None:
    """Its own pytest.toml is used; among the tests is one that runs the conformance checks up to L3."""
    assert "2 passed" in run("pytest", "-q", "-p", "no:cacheprovider", cwd=projects[kind])


@pytest.mark.slow
def test_the_code_of_new_plugins_is_typed_and_formatted(projects: Mapping[str, Path]) -> None:
    folders = [str(project / part) for project in projects.values() for part in ("src", "tests")]
    sources = ",".join(f"'{project / 'src'}'" for project in projects.values())
    options = ("--isolated", "--line-length", "120", "--no-cache", "--config")
    run(
        "ruff",
        "check",
        *options,
        f"src=[{sources}]",
        "--config",
        "lint.select=['E','F','I','B','UP']",
        *folders,
        cwd=ROOT,
    )
    run("ruff", "format", "--check", *options, f"src=[{sources}]", *folders, cwd=ROOT)
    run("mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), *folders, cwd=ROOT)


def test_a_new_attention_backend_generates_what_torch_generates(checkpoint: str, projects: Mapping[str, Path]) -> None:
    implementation = projects["attention"] / "src" / "fresh_attention" / "backend.py"
    assert len(implementation.read_text().splitlines()) <= 60
    assert tokens(checkpoint, backend="fresh_attention") == tokens(checkpoint)


def test_a_window_off_by_one_in_a_new_backend_is_found(
    projects: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the suite is for: a stranger changes one character, and the report names the check and how to run it."""
    good = (projects["attention"] / "src" / "fresh_attention" / "backend.py").read_text()
    bad = good.replace("(age >= (layer.window or", "(age > (layer.window or")
    assert bad != good
    (tmp_path / "off_by_one.py").write_text(bad)
    monkeypatch.syspath_prepend(str(tmp_path))
    descriptor = import_dotted("fresh_attention:descriptor", "the good one")
    broken = type(descriptor)(
        kind=descriptor.kind,
        name="off_by_one",
        capabilities=descriptor.capabilities,
        factory="off_by_one:FreshAttention",
    )
    found = [record for record in check_plugin(broken, level=Level.HOSTILE, stop_at_first=True) if record.bad]
    assert found
    assert "window" in f"{found[0].id} {found[0].case}"


def test_a_new_cache_spec_generates_what_the_full_one_generates(checkpoint: str, projects: Mapping[str, Path]) -> None:
    own = tokens(checkpoint, **{"cache.kv_spec": {"full": "fresh_kv_spec"}, "attention.layout": "HND"})
    assert own == tokens(checkpoint)


def test_a_new_drafter_changes_no_text(checkpoint: str, projects: Mapping[str, Path]) -> None:
    drafter = {"drafter.name": "fresh_drafter", "drafter.tokens": 3}
    assert tokens(checkpoint, **drafter) == tokens(checkpoint)


def test_a_new_logits_processor_works_for_the_request_that_asks(checkpoint: str, projects: Mapping[str, Path]) -> None:
    named: dict[str, Any] = {"logits_processors": {"fresh_logits_processor": {}}}
    plain = tokens(checkpoint)
    assert tokens(checkpoint, **named) == plain
    penalised = tokens(checkpoint, **named, extra_args={"fresh_logits_processor": 10})
    assert sum(len(set(output)) for output in penalised) > sum(len(set(output)) for output in plain)


def test_a_new_device_generates_what_the_cpu_generates(checkpoint: str, projects: Mapping[str, Path]) -> None:
    assert tokens(checkpoint, device="fresh_device:0") == tokens(checkpoint)


def test_a_new_extension_changes_no_text_and_refuses_what_it_cannot_take(
    checkpoint: str, projects: Mapping[str, Path]
) -> None:
    named: dict[str, Any] = {"extensions": {"fresh_extension": {}}}
    assert tokens(checkpoint, **named, extra_args={"fresh_extension": 2}) == tokens(checkpoint)
    with pytest.raises(RequestError, match="fresh_extension=0 is not allowed"):
        tokens(checkpoint, **named, extra_args={"fresh_extension": 0})


def test_a_new_response_parser_reads_the_calls_that_it_asks_for(tmp_path: Path, projects: Mapping[str, Path]) -> None:
    llm = LLM(make_tool_model(tmp_path / "tools"), dtype="float32", **{"response_parser.name": "fresh_response_parser"})
    clock = {"type": "function", "function": {"name": "clock", "parameters": EMPTY}}
    (output,) = llm.chat(
        [{"role": "user", "content": "x"}],
        SamplingParams(temperature=0, max_tokens=60),
        tools=[clock],
        tool_choice="required",
    )
    message: Any = output.outputs[0].message
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["clock"]


@pytest.mark.slow
def test_a_new_communicator_joins_two_processes(checkpoint: str, projects: Mapping[str, Path]) -> None:
    divided: dict[str, Any] = {"parallel.tensor": 2, "parallel.communicator": "fresh_communicator"}
    assert tokens(checkpoint, **divided) == tokens(checkpoint)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attn", "mine"], "'attn' is no kind of plugin"),
        (["attention", "torch"], "there is a Python package 'torch' already"),
        (["attention", "My-Attn"], "cannot name a Python package"),
        (["attention", "class"], "cannot name a Python package"),
    ],
)
def test_kinds_that_there_are_not_and_names_that_cannot_be_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-plugin", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "fix:" in shown


def test_without_copier_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "copier", None)
    assert main(["new-plugin", "attention", "never_written", "--path", str(tmp_path / "never")]) == 2
    assert "fix: pip install 'slotline[conformance]'" in capsys.readouterr().err
    assert not (tmp_path / "never").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    assert main(["new-plugin", "attention", "never_written", "--path", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
