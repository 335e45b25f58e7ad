"""Models of the Hub by name: from the cache or downloaded, against a server on this machine and the real client."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub, commit_of, serving
from huggingface_hub import constants

from slotline.cli import main
from slotline.core import LLM, SamplingParams
from slotline.planner.hub import find_hub_model
from slotline.planner.hub_files import weight_files
from slotline.planner.plan import make_plan
from slotline.registry.config import load_config
from slotline.registry.errors import CapacityError, ModelError

Tiny = Callable[..., Path]
REPO = "tiny-org/Tiny-Llama"
SETTINGS: dict[str, Any] = {"backend": "torch", "memory": "4MiB", "max_num_seqs": 2, "max_num_batched_tokens": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=4)
PROMPT = {"prompt_token_ids": [5, 6, 7]}


@pytest.fixture
def repo(tiny: Tiny, tmp_path: Path) -> Path:
    """A repository with what people put beside a model: code, a second form of the weights, notes."""
    folder = tmp_path / "repo"
    shutil.copytree(tiny("llama"), folder)
    for name in ("modeling_tiny.py", "consolidated.safetensors", "pytorch_model.bin", "README.md", "training_args.bin"):
        (folder / name).write_bytes(b"raise SystemExit('this ran')")
    return folder


@pytest.fixture
def hub(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub on this machine, with an empty cache of its own."""
    hub = Hub(repos={REPO: {"main": repo, "v1": repo}})
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # read when the client was imported, and .ci/run is offline
    monkeypatch.chdir(tmp_path)
    with serving(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


def found(**values: Any) -> Any:
    return find_hub_model(load_config(values={"model": REPO, **values}))


def test_a_model_of_the_hub_is_downloaded_and_runs(hub: Hub, repo: Path) -> None:
    outputs = LLM(model=REPO, **SETTINGS).generate([PROMPT], GREEDY)
    assert (
        outputs[0].outputs[0].token_ids
        == LLM(model=str(repo), **SETTINGS).generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    )


def test_only_data_that_is_needed_is_downloaded(hub: Hub) -> None:
    folder = found().folder
    assert hub.downloads() == {file.name for file in folder.iterdir()} >= {"config.json", "model.safetensors"}
    assert not {"modeling_tiny.py", "consolidated.safetensors", "pytorch_model.bin", "README.md"} & hub.downloads()


def test_a_configuration_that_names_a_model_with_code_of_its_own_runs_none(
    hub: Hub, repo: Path, tmp_path: Path
) -> None:
    config = json.loads((repo / "config.json").read_text())
    auto_map = {"AutoConfig": "modeling_tiny.Config", "AutoModelForCausalLM": "modeling_tiny.Model"}
    (repo / "config.json").write_text(
        json.dumps({**config, "model_type": "tiny", "architectures": ["Own"], "auto_map": auto_map})
    )
    (tmp_path / "run.toml").write_text(f'model = "{REPO}"')
    with pytest.raises(ModelError, match="no model family serves Own"):
        LLM(tmp_path / "run.toml", **SETTINGS)
    assert "modeling_tiny.py" not in hub.downloads()


def test_without_a_network_the_cache_serves(hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    first = found()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.requests)
    assert found() == first
    assert len(hub.requests) == asked
    assert not caplog.records
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, "slotline"):
        assert found() == first
    assert "of the cache is used, since http://127.0.0.1:9 cannot be reached" in caplog.text


def test_a_commit_in_the_cache_needs_no_question(hub: Hub) -> None:
    commit = commit_of(REPO, "v1")
    assert found(revision=commit).commit == commit
    asked = len(hub.requests)
    assert found(revision=commit).revision == commit
    assert len(hub.requests) == asked


def test_a_revision_is_a_branch_of_its_own(hub: Hub, repo: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(repo, other)
    (other / "generation_config.json").write_text('{"eos_token_id": 3}')
    hub.repos[REPO]["v2"] = other
    one, two = found(), found(revision="v2")
    assert two.commit == commit_of(REPO, "v2") != one.commit
    assert '"eos_token_id": 3' in (two.folder / "generation_config.json").read_text()


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_shards_of_an_index_are_downloaded_and_no_others(hub: Hub, repo: Path, form: str) -> None:
    single, names = ("model.safetensors", "pytorch_model.bin") if form == "safetensors" else ("pytorch_model.bin", "-")
    for file in (*repo.glob("*.safetensors"), *repo.glob("*.bin")):
        file.unlink()
    shards = [f"{single.split('.')[0]}-0000{i}-of-00002.{form}" for i in (1, 2)]
    for name in (*shards, f"{single.split('.')[0]}-extra.{form}", names):
        (repo / name).write_bytes(name.encode())
    (repo / f"{single}.index.json").write_text(json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}))
    found()
    assert {name for name in hub.downloads() if name.endswith((".bin", ".safetensors"))} == set(shards)


def test_an_index_names_no_file_elsewhere() -> None:
    table = {"weight_map": {"a": "../../secret.safetensors", "b": "model-1.safetensors", "c": 5, "d": ".."}}
    names = ["model.safetensors.index.json", "model-1.safetensors"]
    assert weight_files(names, lambda _: table) == ["model-1.safetensors"]


def test_a_local_folder_of_the_name_wins(hub: Hub, repo: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny-org").mkdir()
    (tmp_path / REPO).symlink_to(repo)
    assert found() is None
    assert not hub.requests
    with pytest.raises(ModelError, match="is no model of the Hub"):
        found(revision="v1")


def test_the_plan_and_explain_say_repository_revision_and_commit(hub: Hub, capsys: Any) -> None:
    commit = commit_of(REPO, "v1")
    arguments = ["--set", f"model={REPO}", "--set", "revision=v1", "--set", "device=cpu"]
    assert main(["explain", *arguments, "--width", "400"]) == 0
    assert f"hub {REPO}, revision v1, commit {commit}" in capsys.readouterr().out
    assert not any(name.endswith(".safetensors") for name in hub.downloads())  # a plan needs none
    assert main(["explain", *arguments, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["facts"]["commit"] == commit
    plan = make_plan(load_config(values={"model": REPO, "revision": "v1", "device": "cpu"})).plan
    assert plan.digest == planned["digest"]
    assert "model.safetensors" in hub.downloads()


def test_the_token_of_the_environment_is_sent(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.tokens[REPO] = "hf_secret"
    with pytest.raises(ModelError, match=r"no model 'tiny-org/Tiny-Llama' on http://127.*private[\s\S]*set HF_TOKEN"):
        found()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert found().commit == commit_of(REPO, "main")
    assert all(token == "Bearer hf_secret" for _, path, token in hub.requests[-3:] if "/resolve/" in path)


def test_an_unknown_name_is_refused_with_what_to_do(hub: Hub) -> None:
    with pytest.raises(
        ModelError, match=r"no model 'tiny-org/other' on .*or it is private[\s\S]*fix: correct the name"
    ):
        LLM(model="tiny-org/other", **SETTINGS)


def test_a_gated_model_says_where_its_terms_are(hub: Hub) -> None:
    hub.gated.add(REPO)
    with pytest.raises(
        ModelError, match=rf"is gated on [\s\S]*accept the terms at {hub.address}/{REPO}, then set HF_TOKEN"
    ):
        LLM(model=REPO, **SETTINGS)


def test_a_revision_that_does_not_exist_is_answered_with_those_that_do(hub: Hub) -> None:
    with pytest.raises(ModelError, match=r"has no revision 'v9' on [\s\S]*fix: name one of main, v1, or a commit"):
        LLM(model=REPO, revision="v9", **SETTINGS)


@pytest.mark.parametrize("offline", [True, False])
def test_no_network_and_no_cache_is_refused_with_what_to_do(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    if offline:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    why = "HF_HUB_OFFLINE is set" if offline else "http://127.0.0.1:9 cannot be reached"
    with pytest.raises(ModelError, match=rf"is not in the cache .*, and {why}[\s\S]*hf download {REPO}"):
        LLM(model=REPO, **SETTINGS)


def test_a_cache_without_all_files_names_those_that_are_missing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    find_hub_model(load_config(values={"model": REPO}), weights=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"lacks 1 of its files: all weight files, and HF_HUB_OFFLINE is set"):
        LLM(model=REPO, **SETTINGS)


def test_a_disk_without_room_is_refused_before_the_download(hub: Hub) -> None:
    hub.sizes["model.safetensors"] = 2**60
    with pytest.raises(CapacityError, match=r"needs 1073741824\.0 GiB, and the disk of .* has [\s\S]*HF_HOME"):
        LLM(model=REPO, **SETTINGS)
    assert "model.safetensors" not in hub.downloads()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written_is_named(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir(mode=0o500)
    with pytest.raises(ModelError, match=r"cannot be written[\s\S]*set HF_HOME"):
        LLM(model=REPO, **SETTINGS)


def test_a_hub_that_is_down_is_no_network(hub: Hub) -> None:
    hub.fails = 503
    with pytest.raises(ModelError, match="cannot be reached"):
        LLM(model=REPO, **SETTINGS)


def test_a_repository_without_a_configuration_is_refused(hub: Hub, repo: Path) -> None:
    (repo / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        LLM(model=REPO, **SETTINGS)


def test_the_errors_of_a_full_disk_are_of_capacity() -> None:
    from slotline.planner.hub_errors import as_model_error

    error = as_model_error(OSError(errno.ENOSPC, "No space left on device"), REPO, "main", "http://hub", None)
    assert isinstance(error, CapacityError)
    assert "HF_HOME" in str(error)
