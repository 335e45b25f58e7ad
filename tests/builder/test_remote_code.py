"""Code that a checkpoint brings along never runs, also where somebody types `y`."""

from __future__ import annotations

import ast
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from slotline.cli import main
from slotline.core import LLM
from slotline.planner.auto_config import auto_config
from slotline.registry.errors import ModelError, SlotlineError
from slotline.registry.remote_code import remote_code

FOLDERS = ("backends", "benchmarks", "core", "docs", "plugins", "proposers", "registry", "tests", "training")
LOADERS = frozenset({"from_pretrained", "from_config"})
FORBIDDEN = frozenset({"get_class_from_dynamic_module", "resolve_trust_remote_code", "load_custom_generate"})

Tiny = Callable[..., Path]
SETTINGS: dict[str, Any] = {"backend": "torch", "memory": "4MiB", "max_num_seqs": 2, "max_num_batched_tokens": 64}


def careless(source: str) -> Iterator[int]:
    """The lines of a source text where a loader may run code of a checkpoint."""
    if not any(word in source for word in (*LOADERS, *FORBIDDEN)) and not ("torch" in source and ".load" in source):
        return
    tree = ast.parse(source)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in LOADERS:
            call = called.get(id(node))
            values = {} if call is None else {word.arg: word.value for word in call.keywords}
            value = values.get("trust_remote_code")
            if not isinstance(value, ast.Constant) or value.value is not False:
                yield node.lineno
        elif isinstance(node, ast.Attribute) and node.attr == "load" and ast.unparse(node.value) == "torch":
            call = called.get(id(node))
            words = [] if call is None else [ast.unparse(word) for word in call.keywords]
            if "weights_only=True" not in words:
                yield node.lineno
        elif (isinstance(node, ast.Name) and node.id in FORBIDDEN) or getattr(node, "attr", None) in FORBIDDEN:
            yield node.lineno


@pytest.mark.parametrize(
    "source",
    [
        "AutoTokenizer.from_pretrained(path)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "AutoModel.from_config(config, trust_remote_code=asked)",
        "AutoModel.from_pretrained(path, **options)",
        "partial(AutoModel.from_pretrained, path)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "get_class_from_dynamic_module(name, path)",
    ],
)
def test_the_search_finds_each_careless_call(source: str) -> None:
    assert list(careless(source)) == [1]
    assert not list(careless("AutoModel.from_pretrained(path, trust_remote_code=False)"))


def test_no_call_of_the_tree_lets_a_checkpoint_run_its_code() -> None:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 500
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in careless(file.read_text("utf-8"))]
    assert found == []


def _edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **changes}))


@pytest.fixture
def evil(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Copies a folder; returns the copy and the file that its code writes if it runs."""

    def copy(source: Path, name: str = "evil") -> tuple[Path, Path]:
        folder, trace = tmp_path / name, tmp_path / f"{name}.ran"
        shutil.copytree(source, folder)
        for module in ("own", "custom_generate/generate"):
            (folder / module).parent.mkdir(exist_ok=True)
            (folder / f"{module}.py").write_text(
                f"open({str(trace)!r}, 'w').close()\n"
                "from transformers import PreTrainedConfig as OwnConfig, PreTrainedTokenizerFast as OwnTokenizer\n"
                "class OwnModel: pass\nclass OwnProcessor: pass\ndef generate(*args, **kwargs): pass\n"
            )
        return folder, trace

    return copy


OWN_TOKENIZER = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}


def test_a_typed_y_runs_no_tokenizer_of_a_checkpoint(tiny: Tiny, evil: Callable[..., tuple[Path, Path]]) -> None:
    folder, trace = evil(tiny("llama"))
    _edit(folder / "tokenizer_config.json", **OWN_TOKENIZER)
    command = [str(Path(sys.executable).parent / "slotline"), "generate", "hello", "--model", str(folder)]
    ran = subprocess.run(command, input="y\n" * 9, capture_output=True, text=True, timeout=300, check=False)
    assert not trace.exists()
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert f"the tokenizer in {str(folder)!r} needs code of its own, which is never run" in ran.stderr
    assert "tokenizer_config.json names 'own.OwnTokenizer' under auto_map" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer_config.json": {**OWN_TOKENIZER, "auto_map": ["own.OwnTokenizer", None]}},
            "which is never run: .*own.OwnTokenizer",
        ),
        (
            {
                "tokenizer_config.json": {
                    **OWN_TOKENIZER,
                    "auto_map": {"AutoTokenizer": [None, "a/b--own.OwnTokenizer"]},
                }
            },
            "which is never run: .*own.OwnTokenizer",
        ),
        (
            {
                "config.json": {
                    "architectures": ["OwnModel"],
                    "model_type": "own",
                    "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
                }
            },
            "no model family serves OwnModel",
        ),
        (
            {"config.json": {"architectures": ["OwnModel"], "auto_map": {"AutoModelForCausalLM": "own.OwnModel"}}},
            "no model family serves OwnModel",
        ),
    ],
    ids=["old list", "of another repository", "config", "model"],
)
def test_a_checkpoint_that_needs_its_code_is_refused_by_name(
    tiny: Tiny,
    evil: Callable[..., tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, dict[str, Any]],
    message: str,
) -> None:
    folder, trace = evil(tiny("llama"))
    for name, changes in files.items():
        _edit(folder / name, **changes)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ModelError, match=message):
        LLM(model=str(folder), **SETTINGS)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}),
        ("generation_config.json", {"auto_map": {"AutoGeneration": "own.OwnModel"}, "custom_generate": "own"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}),
        ("processor_config.json", {"auto_map": {"AutoProcessor": "own.OwnProcessor"}}),
        ("modules.json", [{"idx": 0, "name": "0", "path": "", "type": "own.OwnModel"}]),
    ],
)
def test_a_checkpoint_that_can_do_without_its_code_runs_without_it(
    tiny: Tiny,
    evil: Callable[..., tuple[Path, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    changes: Any,
) -> None:
    folder, trace = evil(tiny("llama"))
    if isinstance(changes, dict):
        _edit(folder / file, **changes)
    else:
        (folder / file).write_text(json.dumps(changes))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    options = ["--set=attention.backend=torch", "--set=cache.memory=4MiB"]
    main(["generate", "--model", str(folder), *options, "--max-tokens", "2", "hello"])
    assert "trust_remote_code" not in capsys.readouterr().err
    assert not trace.exists()


def test_an_image_processor_with_code_of_its_own_is_refused(
    tiny_vision_model: Tiny, evil: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL")
    folder, trace = evil(tiny_vision_model("llava"))
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        _edit(folder / name, processor_class="OwnProcessor", auto_map={"AutoProcessor": "own.OwnProcessor"})
    _edit(folder / "config.json", model_type="llava")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    try:
        LLM(model=str(folder), dtype="float32", **SETTINGS)
    except SlotlineError as error:
        assert "needs code of its own, which is never run" in str(error)  # noqa: PT017 - served without it will do too
    assert not trace.exists()


def test_a_draft_model_runs_no_code_of_its_own(
    tiny: Tiny, evil: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, draft_trace = evil(tiny("llama"), "draft")
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    _edit(draft / "config.json", auto_map=own)
    _edit(draft / "tokenizer_config.json", **OWN_TOKENIZER)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    drafter = {"drafter.name": "draft_model", "drafter.path": str(draft)}
    llm = LLM(model=str(tiny("llama")), dtype="float32", **SETTINGS, **drafter)
    assert llm.generate("hello", progress=False)[0].outputs[0].token_ids
    _edit(draft / "config.json", architectures=["OwnModel"])
    with pytest.raises(ModelError, match="no model family serves OwnModel"):
        LLM(model=str(tiny("llama")), dtype="float32", **SETTINGS, **drafter)
    assert not draft_trace.exists()


def test_a_bench_with_random_weights_runs_no_code_of_a_configuration(
    tiny: Tiny, evil: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, trace = evil(tiny("llama"))
    _edit(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    with pytest.raises(ModelError, match=r"config\.json names 'own\.OwnConfig' under auto_map"):
        auto_config(folder)
    assert main(["bench", "nano", "--set", f"model={json.dumps(str(folder))}", "--random-weights"]) == 2
    assert not trace.exists()


def test_files_that_name_no_code_are_passed_over(tmp_path: Path) -> None:
    for content in ("{", "[]", "null", '{"auto_map": 5}', '{"auto_map": {"AutoTokenizer": [null, 3]}}', "[" * 99999):
        (tmp_path / "tokenizer_config.json").write_text(content)
        assert remote_code(tmp_path, "AutoTokenizer") is None
