"""`slotline new-plugin`: what it writes is installed, tested and run as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_cases import pretend_project_installed, tiny_checkpoint

from slotline.core import LLM, SamplingParams
from slotline.core.cli import main
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry

KINDS = ("attention", "logits_processor", "kv_spec", "drafter")
PROMPTS = ["def main(", "The quick brown fox jumps over", "import os"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("new_plugin") / "llama"))


def render(kind: str, name: str, folder: Path) -> Path:
    assert main(["new-plugin", kind, name, "--path", str(folder)]) == 0
    return folder


def tokens(checkpoint: str, **settings: Any) -> list[list[int]]:
    """Greedy tokens of a mixed batch; prompts of different lengths, cut into pieces by a small step."""
    extra = settings.pop("extra_args", None)
    llm = LLM(
        model=checkpoint, memory="16MiB", max_num_seqs=4, max_num_batched_tokens=8, **{"backend": "torch", **settings}
    )
    params = SamplingParams(temperature=0, max_tokens=12, extra_args=extra, detokenize=False)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, progress=False)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tests_of_a_new_plugin_pass(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = render(kind, f"fresh_{kind}", tmp_path / "project")
    pretend_project_installed(monkeypatch, tmp_path / "site", project)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(project)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_a_new_attention_backend_generates_what_torch_generates(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = render("attention", "fresh_attn", tmp_path / "project")
    assert len((project / "src" / "fresh_attn" / "backend.py").read_text().splitlines()) <= 60
    pretend_project_installed(monkeypatch, tmp_path / "site", project)
    assert tokens(checkpoint, backend="fresh_attn") == tokens(checkpoint)


def test_a_new_cache_spec_generates_what_the_full_one_generates(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_project_installed(monkeypatch, tmp_path / "site", render("kv_spec", "fresh_spec", tmp_path / "project"))
    own = tokens(checkpoint, **{"cache.kv_spec": {"full": "fresh_spec"}, "attention.layout": "HND"})
    assert own == tokens(checkpoint)


def test_a_new_logits_processor_keeps_the_named_tokens_out(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = render("logits_processor", "fresh_bans", tmp_path / "project")
    pretend_project_installed(monkeypatch, tmp_path / "site", project)
    named: dict[str, Any] = {"logits_processors": {"fresh_bans": {}}}
    plain = tokens(checkpoint)
    assert tokens(checkpoint, **named) == plain
    banned = plain[0][:3]
    changed = tokens(checkpoint, **named, extra_args={"fresh_bans": banned})
    assert changed != plain
    assert not {token for output in changed for token in output} & set(banned)


def test_a_new_drafter_is_discovered_with_its_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_project_installed(monkeypatch, tmp_path / "site", render("drafter", "fresh_draft", tmp_path / "project"))
    descriptor = PluginRegistry.discover(tolerant=True).load(Kind.DRAFTER, "fresh_draft")
    assert str(descriptor.contract) == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lora", "mine"], "'lora' has no template yet"),
        (["attn", "mine"], "'attn' is no kind of plugin"),
        (["attention", "torch"], "there is a Python package 'torch' already"),
        (["attention", "My-Attn"], "cannot name a Python package"),
        (["attention", "class"], "cannot name a Python package"),
    ],
)
def test_kinds_without_a_template_and_names_that_cannot_be_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-plugin", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "fix:" in shown


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    assert main(["new-plugin", "attention", "never_written", "--path", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
