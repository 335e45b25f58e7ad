"""`slotline explain`: plans, refusals, codes and differences."""

from __future__ import annotations

import json

import pytest
from cli_cases import tiny_checkpoint

from slotline.cli import main


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A configuration of a model whose weights cannot be read: explaining does not try."""
    folder = tmp_path_factory.mktemp("explain")
    tiny_checkpoint(folder / "llama")
    for file in (folder / "llama").glob("*.safetensors"):
        file.write_bytes(b"not weights")
    (folder / "run.toml").write_text('model = "llama"\n[attention]\nbackend = "torch"\n')
    (folder / "other.toml").write_text('extends = "run.toml"\n[cache]\nblock_size = 64\n')
    return str(folder / "run.toml")


def test_a_plan_is_made_without_reading_weights(run_toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", run_toml]) == 0
    shown = capsys.readouterr().out
    assert "backend     torch" in shown
    assert "run.toml:3" in shown


def test_json_is_the_plan_and_set_changes_it(run_toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", run_toml, "--json", "--set", "cache.block_size=64"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["ok"] is True
    assert plan["block_size"] == 64


def test_width_bounds_the_lines(run_toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    widest = []
    for width in ("60", "140"):
        assert main(["explain", run_toml, "--width", width]) == 0
        text = capsys.readouterr().out.partition("group full")[0]
        widest.append(max(len(line) for line in text.splitlines() if not line.startswith("plan ")))
    assert widest[0] <= 60 < widest[1] <= 140
    assert main(["explain", run_toml, "--width", "3"]) == 2


def test_why_not_names_the_reason(run_toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", run_toml, "--why-not", "cpu"]) == 0
    assert "N190" in capsys.readouterr().out
    assert main(["explain", run_toml, "--why-not", "cpu", "--json"]) == 0
    (verdict,) = json.loads(capsys.readouterr().out)["groups"]
    assert not verdict["chosen"]
    assert verdict["reasons"][0]["code"] == "N190"


def test_why_not_of_a_stranger_is_an_error_that_names_who_took_part(
    run_toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", run_toml, "--why-not", "flash"]) == 2
    names = capsys.readouterr().err.partition("these did: ")[2].strip().split(", ")
    assert names == sorted(names)
    assert {"cpu", "flash_attn", "flash_attn_3", "full", "sliding", "torch"} <= set(names)


def test_diff_shows_what_another_configuration_changes(run_toml: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = run_toml.replace("run.toml", "other.toml")
    assert main(["explain", run_toml, "--diff", other]) == 0
    assert "block_size: 16 -> 64" in capsys.readouterr().out
    assert main(["explain", run_toml, "--diff", other, "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert (both["before"]["block_size"], both["after"]["block_size"]) == (16, 64)


def test_where_there_is_no_plan_the_whole_record_is_printed_and_the_code_is_1(
    run_toml: str, capsys: pytest.CaptureFixture[str]
) -> None:
    impossible = ["--set", "cache.dtype=float8_e4m3fnuz"]
    assert main(["explain", run_toml, *impossible]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("no plan")
    assert "cache.dtype" in shown.out
    assert main(["explain", run_toml, *impossible, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main(["explain", run_toml, *impossible, "--why-not", "torch"]) == 1
    assert "float8_e4m3fnuz" in capsys.readouterr().out


def test_a_code_is_explained_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "n191"]) == 0
    by_position = capsys.readouterr().out
    assert "What to do:" in by_position
    assert main(["explain", "--code", "N191"]) == 0
    assert capsys.readouterr().out == by_position
    assert main(["explain", "N191", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["code"] == "N191"
    assert main(["explain", "N999"]) == 2
    assert "there is no code 'N999'" in capsys.readouterr().err
