"""Wrong settings and broken checkpoints end in a typed error that names what is wrong and the fix, in no traceback."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slotline.cli import main
from slotline.core import LLM
from slotline.planner.plan import SMALL_MODEL
from slotline.registry.errors import ConfigError, ModelError, RequestError

Tiny = Callable[..., Path]
Change = Callable[[Path], Any]
SETTINGS: dict[str, Any] = {"max_model_len": 64, "memory": "4MiB", "optimize": False, "device": "cpu"}


def copied(model: Path, folder: Path, change: Change) -> Path:
    """A copy of a checkpoint to which `change` has been done."""
    parts = shutil.ignore_patterns("eagle*", "medusa*", "adapters")
    shutil.copytree(model, folder, ignore=parts)
    change(folder)
    return folder


def config(**values: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def written(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({name: change(x) for name, x in load_file(file).items()}, file, metadata={"format": "pt"})

    return apply


def halved(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def as_folder(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def index(content: Any) -> Change:
    """Two shards, and that in place of their index."""

    def change(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        names = sorted(stored)
        for number, part in enumerate((names[::2], names[1::2]), 1):
            file = folder / f"model-0000{number}-of-00002.safetensors"
            save_file({name: stored[name] for name in part}, file, metadata={"format": "pt"})
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return change


class RunsCode:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def torch_file(content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content)

    return change


CHECKPOINTS: dict[str, tuple[Change, str]] = {
    "no text": (written("config.json", b"\xff\xfe{}"), r"config\.json' cannot be read as JSON: .*can't decode"),
    "no JSON": (written("config.json", b"{not"), r"config\.json' cannot be read as JSON: Expecting property name"),
    "too deep": (
        written("config.json", b"[" * 100000),
        r"config\.json' cannot be read as JSON: it is nested too deeply",
    ),
    "a list": (written("config.json", b"[1]"), r"config\.json' holds a list, not an object"),
    "a text for names": (config(architectures="Llama"), r"architectures = 'Llama' is no list of names\n  fix: write"),
    "numbers for names": (config(architectures=[3]), r"architectures = \[3\] is no list of names"),
    "no positions": (config(max_position_embeddings=0), r"config\.json: max_position_embeddings = 0 leaves no room"),
    "unknown rope": (
        config(rope_scaling={"rope_type": "yarnish"}),
        r"KeyError: 'yarnish'\n  fix: correct config\.json",
    ),
    "a text as end token": (
        written("generation_config.json", b'{"eos_token_id": "a"}'),
        r"generation_config\.json: eos_token_id = 'a' is no token id",
    ),
    "null among end tokens": (
        written("generation_config.json", b'{"eos_token_id": [1, null]}'),
        r"generation_config\.json: eos_token_id = \[1, None\] is no token id",
    ),
    "truncated": (halved, r"model\.safetensors cannot be read: .*not fully covered\n  fix: download"),
    "empty": (written("model.safetensors", b""), r"model\.safetensors cannot be read: .*header too small"),
    "a huge header": (written("model.safetensors", struct.pack("<Q", 2**60)), r"model\.safetensors cannot be read"),
    "a pointer": (
        written("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"),
        r"model\.safetensors is a Git LFS pointer, not the weights\n  fix: run `git lfs pull`",
    ),
    "a folder for weights": (as_folder("model.safetensors"), r"model\.safetensors cannot be read: .*Is a directory"),
    "integers": (weights(lambda x: x.to(torch.int8)), r"model\.safetensors holds quantized weights \(I8\).*: lm_head"),
    "eight-bit floats": (weights(lambda x: x.to(torch.float8_e4m3fn)), r"holds quantized weights \(F8_E4M3\)"),
    "no numbers": (weights(lambda x: x * torch.nan), r"weights of LlamaForCausalLM in .* are not finite: model\.embed"),
    "an index of nothing": (index({}), r"index\.json is no index: it has no table weight_map of files"),
    "a list for an index": (index([]), r"index\.json is no index"),
    "numbers for files": (index({"weight_map": {"lm_head.weight": 3}}), r"index\.json is no index"),
    "a missing shard": (
        index({"metadata": {}, "weight_map": {"lm_head.weight": "model-00003-of-00003.safetensors"}}),
        r"No such file or directory: .*model-00003-of-00003\.safetensors",
    ),
    "garbage for torch": (torch_file(b"garbage"), r"pytorch_model\.bin cannot be read as weights alone"),
    "code for torch": (
        torch_file(pickle.dumps({"a": RunsCode()}, protocol=2)),
        r"pytorch_model\.bin cannot be read as weights alone: it is broken, or would run code",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_broken_checkpoint_is_a_typed_error_that_names_the_file(name: str, tiny: Tiny, tmp_path: Path) -> None:
    change, message = CHECKPOINTS[name]
    with pytest.raises(ModelError, match=message):
        LLM(copied(tiny("llama"), tmp_path / "broken", change), **SETTINGS)


def test_a_torch_file_of_something_else_is_a_typed_error(tiny: Tiny, tmp_path: Path) -> None:
    path = copied(tiny("llama"), tmp_path / "broken", torch_file(b""))
    torch.save([1, 2], path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"the weights of .* cannot be read: TypeError"):
        LLM(path, **SETTINGS)


def test_logits_beyond_a_dtype_name_the_dtype(tiny: Tiny, tmp_path: Path) -> None:
    path = copied(tiny("llama"), tmp_path / "large", weights(lambda x: x * 60))
    with pytest.raises(
        ModelError, match=r"logits of LlamaForCausalLM in .* are not finite in float16\n  fix: set dtype"
    ):
        LLM(path, dtype="float16", **SETTINGS)
    LLM(path, dtype="float32", **SETTINGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (written("tokenizer.json", b"{"), r"the tokenizer in .* cannot be read: JSONDecodeError: Expecting property"),
        (written("tokenizer.json", b"{}"), r"the tokenizer in .* cannot be read: KeyError: 'added_tokens'"),
        (written("tokenizer_config.json", b"\xff"), r"the tokenizer in .* cannot be read: UnicodeDecodeError"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"the tokenizer in .* cannot be read: ValueError"),
    ],
)
def test_a_broken_tokenizer_is_not_called_a_missing_one(change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        LLM(copied(SMALL_MODEL, tmp_path / "broken", change), **SETTINGS)


def test_a_tokenizer_that_makes_no_tokens_does_not_call_the_prompt_empty(tmp_path: Path) -> None:
    def without_merges(folder: Path) -> None:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        content["model"] |= {"vocab": {f"x{i}": i for i in range(9)}, "merges": []}
        file.write_text(json.dumps(content))

    llm = LLM(copied(SMALL_MODEL, tmp_path / "broken", without_merges), **SETTINGS)
    with pytest.raises(RequestError, match="the tokenizer makes no token of 'hello'"):
        llm.generate("hello")


SETTINGS_OF_THE_COMMAND: dict[str, tuple[list[str], str]] = {
    "a tokenizer nowhere": (["tokenizer=/nowhere"], "there is no folder '/nowhere'"),
    "a draft model nowhere": (
        ["drafter.name=draft_model", "drafter.path=/nowhere"],
        "fix: drafter.path must name a local Hugging Face folder",
    ),
    "a long name": ([f"model={'x' * 5000}"], "cannot be looked at: File name too long"),
    "more requests than memory": (["scheduler.max_requests=1000000000"], "requests of 2048 tokens does not fit into"),
    "more requests than numbers": ([f"scheduler.max_requests={10**20}"], f"{10**20} is too large: use a number <="),
    "weights beyond all memory": (["offload_gib=inf"], "offload_gib: inf is too large: use a number <="),
    "no number of weights": (["offload_gib=nan"], "offload_gib: nan is too small: use a number >= 0"),
    "less than no weights": (["offload_gib=-1"], "offload_gib: -1.0 is too small: use a number >= 0"),
    "a graph of no tokens": (["graphs.sizes=[8, 0]"], "graphs.sizes: 0 is too small: use numbers >= 1 or 'auto'"),
    "more tokens than numbers": ([f"scheduler.max_batched_tokens={10**20}"], f"{10**20} is too large"),
}


@pytest.mark.parametrize("name", SETTINGS_OF_THE_COMMAND)
def test_a_wrong_setting_is_named_with_its_fix(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings, message = SETTINGS_OF_THE_COMMAND[name]
    assert main(["generate", *(part for one in settings for part in ("--set", one)), "x"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("cache.kv_spec.foo=full", "N401 the model has no foo layers [cache.kv_spec.foo]"),
        ('allow=["N999"]', "N402 there is no code 'N999' [allow]"),
    ],
)
def test_a_setting_that_does_nothing_is_named_when_the_model_runs(
    setting: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["generate", "--set", setting, "--max-tokens", "1", "x"]) == 0
    assert message in caplog.text


def test_a_plan_is_no_promise_for_a_table_that_a_plugin_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--set", "logits_processors.dry.x=1"]) == 2
    assert "the logits_processor plugin 'dry' takes no options" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["a\udcff", "\ud800"])
def test_a_prompt_with_half_a_character_is_refused(text: str, engines: Callable[..., LLM]) -> None:
    with pytest.raises(RequestError, match=r"the tokenizer cannot read .*: '\\ud.*' is no character"):
        engines(None).generate(text)
    with pytest.raises(RequestError, match=r"prompt 1: the tokenizer cannot read"):  # several are read together
        engines(None).generate(["def", text, "class"])


def test_an_adapter_that_nobody_loaded_is_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--set", "lora.name=torch", "--lora", "zzz", "x"]) == 2
    assert "fix: name one under [lora.adapters], or give a LoRARequest" in capsys.readouterr().err


def test_a_folder_may_begin_with_the_home_folder_on_the_command_line_too(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny("llama")
    monkeypatch.setenv("HOME", str(path.parent))
    assert main(["explain", "--set", f"model=~/{path.name}"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


@pytest.mark.parametrize(("file", "content"), [("model.safetensors", b"cut"), ("config.json", b"[]")])
def test_a_broken_draft_head_is_named(file: str, content: bytes, tmp_path: Path) -> None:
    shutil.copytree(SMALL_MODEL / "eagle", tmp_path / "eagle")
    (tmp_path / "eagle" / file).write_bytes(content)
    with pytest.raises(ModelError, match=file):
        LLM(**SETTINGS, **{"drafter.name": "eagle", "drafter.path": str(tmp_path / "eagle")})


@pytest.mark.parametrize("option", ["report", "junit", "badge"])
def test_a_report_that_cannot_be_written_is_refused_before_the_suite_runs(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conform", "logits_processor:min_tokens", f"--{option}", "/nowhere/x"]) == 2
    shown = capsys.readouterr().err
    assert f"error: --{option} /nowhere/x: there is no folder '/nowhere'" in shown
    assert "L0" not in shown


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no device here is always full")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "slotline", "config", "show"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr.strip() == "error: [Errno 28] No space left on device"


def test_a_value_that_is_too_large_is_a_fault_like_others() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len: 4294967296 is too large: use a number <= 2147483647"):
        LLM(max_model_len=2**32)
