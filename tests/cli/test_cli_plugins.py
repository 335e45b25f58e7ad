"""`slotline plugins`, `slotline schema` and `slotline config`: what is installed, and what a file may say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from cli_cases import pretend_installed

from slotline.cli import main
from slotline.cli.table import plain_table, print_table
from slotline.registry.config import load_config
from slotline.registry.descriptor import Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import ConfigError


def test_plugins_are_listed_without_importing_them_and_loaded_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json"]) == 0
    rows = {f"{row['kind']}:{row['name']}": row for row in json.loads(capsys.readouterr().out)}
    assert rows["attention:torch"]["state"] == "available"
    assert rows["attention:torch"]["distribution"] == "slotline"
    assert main(["plugins", "--json", "--load"]) == 0
    rows = {f"{row['kind']}:{row['name']}": row for row in json.loads(capsys.readouterr().out)}
    assert (rows["attention:torch"]["state"], rows["attention:torch"]["contract"]) == ("loaded", "1")
    assert (rows["attention:torch"]["runs_here"], rows["attention:torch"]["devices"][0]) == (True, "cpu")
    if not torch.cuda.is_available():
        assert rows["lora:triton"]["runs_here"] is False
        assert rows["lora:triton"]["why_not"] == "needs cuda, this machine has cpu"


def test_the_path_column_stands_only_where_a_path_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["kind", "name", "from", "contract", "state", "runs", "here"]
    assert all(row.split()[-1] == "-" for row in rows)
    pretend_installed(monkeypatch, tmp_path, "other", {"slotline.attention": {"other": "other:descriptor"}})
    assert main(["plugins"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[-1] == "path"
    assert [row for row in rows if str(tmp_path) in row] == [row for row in rows if "other 0.1.0" in row]


def test_an_inline_plugin_that_kills_its_process_when_it_is_tried_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os, signal\n"
        "from slotline.registry import Descriptor, Kind\n"
        "from slotline.registry.contracts import LogitsProcessorCapabilities\n"
        "def probe(device):\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "descriptor = Descriptor(kind=Kind.LOGITS_PROCESSOR, name='deadly', factory=dict, probe=probe,\n"
        "                        capabilities=LogitsProcessorCapabilities())\n"
    )
    (tmp_path / "run.toml").write_text('plugins = ["./deadly.py:descriptor"]\n')
    blocked = "plugins.block=['triton', 'flashinfer', 'flash_attn']"
    assert main(["plugins", "--load", "--config", str(tmp_path / "run.toml"), "--set", blocked]) == 0
    rows = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()}
    assert "no: its process died of SIGSEGV" in rows["deadly"]
    assert str(tmp_path / "deadly.py") in rows["deadly"]
    assert rows["min_tokens"].split()[-1] == "yes"
    assert "named in a block list" in rows["flashinfer"]


@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_on_a_narrow_terminal_no_cell_is_lost(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    headers = ("kind", "name", "from", "contract", "state", "runs here", "error", "path")
    row = ("attention", "my_attn", "pkg 1.0", "1", "failed", "no: needs cuda", "an error of some words", "/a/b/c")
    print_table(headers, [row, row])
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)  # bold heads
    lines = shown.splitlines()
    assert all(len(line) <= width for line in lines)
    assert "my_attn" in shown
    if width in (30, 60):
        assert "runs here: no: needs cuda" in shown
    if width == 200:
        assert len(lines) == 3


def test_a_broken_plugin_is_a_row_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = {"slotline.attention": {"broken": "no_such_module_at_all:descriptor"}}
    pretend_installed(monkeypatch, tmp_path, "broken-attn", groups)
    assert main(["plugins", "--load"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if "broken-attn 0.1.0" in line]
    assert "failed" in row
    assert "ModuleNotFoundError: No module named 'no_such_module_at_all'" in row
    assert str(tmp_path) in row


def test_two_distributions_with_one_name_are_two_failed_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        pretend_installed(monkeypatch, tmp_path / name, name, {"slotline.attention": {"same": "nowhere:descriptor"}})
    assert main(["plugins", "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["name"] == "same"]
    assert [row["state"] for row in rows] == ["failed", "failed"]


def test_a_blocked_plugin_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json", "--set", "plugins.block=['attention:cpu']"]) == 0
    (row,) = [row for row in json.loads(capsys.readouterr().out) if (row["kind"], row["name"]) == ("attention", "cpu")]
    assert row["state"] == "blocked"


def test_columns_are_aligned_outside_a_terminal() -> None:
    assert plain_table(("a", "n"), [("long", "1"), ("b", "22")], right=(1,)) == "a      n\nlong   1\nb     22"


def test_the_schema_has_the_tables_and_the_installed_plugins_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "optioned.py").write_text(
        "from attrs import field, frozen\n"
        "from slotline.registry import Descriptor, Kind\n"
        "from slotline.registry.contracts import LogitsProcessorCapabilities\n"
        "@frozen(kw_only=True)\n"
        "class Options:\n"
        "    strength: int = 3\n"
        "descriptor = Descriptor(kind=Kind.LOGITS_PROCESSOR, name='optioned', factory=Options, options=Options,\n"
        "                        capabilities=LogitsProcessorCapabilities())\n"
    )
    groups = {"slotline.logits_processor": {"optioned": "optioned:descriptor"}}
    pretend_installed(monkeypatch, tmp_path, "optioned", groups)
    assert main(["schema"]) == 0
    tables = json.loads(capsys.readouterr().out)["properties"]["logits_processors"]["properties"]
    assert tables["optioned"]["properties"]["strength"]["default"] == 3
    assert main(["schema", "--no-plugins"]) == 0
    assert "optioned" not in capsys.readouterr().out
    assert main(["config", "check", "--set", "logits_processors.optioned.strength='much'"]) == 2
    assert "logits_processors.optioned.strength" in capsys.readouterr().err
    assert main(["config", "check", "--set", "logits_processors.optioned.strength=4"]) == 0


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("backend.triton.decodes=hoper", """"hoper" is not one of "hopper", "common"; did you mean 'hopper'?"""),
        ("backend.triton.decods=hopper", "there is no key 'decods' in [backend.triton]"),
        ("backend.flex.decodes=hopper", "the attention plugin 'flex' takes no options"),
        ("drafter.ngram.min_tokens=9", "min_tokens=9 and max_tokens=5 do not go together"),
    ],
)
def test_options_of_plugins_that_are_not_chosen_are_checked_too(
    key: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["explain", "--set", "attention.backend=torch"], ["config", "check"]):
        assert main([*command, "--set", key]) == 2
        shown = capsys.readouterr().err
        assert message in shown


def test_plugins_of_two_kinds_share_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """`triton` is an attention and a state backend, and one of them alone takes options."""
    assert main(["config", "check", "--set", "backend.triton.decodes=common"]) == 0
    loaded = load_config(overrides=["backend.triton.decodes=common"], environ={})
    registry = PluginRegistry.discover(loaded)
    attention, state = (registry.load(kind, "triton") for kind in (Kind.ATTENTION, Kind.STATE))
    assert registry.options(loaded, attention).decodes == "common"
    assert registry.options(loaded, state) is None
    wrong = load_config(overrides=["backend.triton.decods=hopper"], environ={})
    with pytest.raises(ConfigError, match="the state plugin 'triton' takes no options"):
        registry.options(wrong, state)


def test_config_show_says_where_each_value_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[cache]\nblock_size = 32\n")
    assert main(["config", "show", str(file), "--origin", "--set", "graphs.mode=none"]) == 0
    shown = capsys.readouterr().out
    lines = {line.partition(" = ")[0]: line for line in shown.splitlines()}
    (mode,) = (line for line in shown.splitlines() if line.startswith("mode") and "default" not in line)
    assert lines["block_size"].endswith("run.toml:2")
    assert mode.endswith("# --set graphs.mode=none")
    assert lines["dtype"].endswith("# default")
    assert main(["config", "show", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["cache"]["block_size"] == 32


def test_config_check_lists_every_fault_and_warns_of_absent_plugins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[cache]\nblock_sise = 32\n[scheduler]\nmax_requests = "many"\n')
    assert main(["config", "check", str(file)]) == 2
    shown = capsys.readouterr().err
    assert "2 errors" in shown
    assert "did you mean 'cache.block_size'?" in shown
    file.write_text("[backend.absent]\nsplits = 4\n")
    assert main(["config", "check", str(file)]) == 1
    assert "absent" in capsys.readouterr().err
    assert main(["config", "check", str(file), "--strict"]) == 2


def test_slots_are_shown_with_contract_version_hook_and_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--slots"]) == 0
    head, *rows = (line.split(None, 3) for line in capsys.readouterr().out.splitlines())
    assert head == ["slot", "contract", "hook", "plugins"]
    shown = {slot: (contract, hook, plugins) for slot, contract, hook, plugins in rows}
    assert set(shown) == {kind.value for kind in Kind}
    assert shown["device"] == ("1", "slotline_device", "cpu, cuda")
    assert shown["extension"][:2] == ("1", "slotline_extension")
    assert main(["plugins", "--slots", "--json"]) == 0
    found = {row["slot"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["drafter"]["contract"] == "1"
    assert "ngram" in found["drafter"]["plugins"]
