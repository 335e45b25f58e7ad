"""Result files of benchmarks: complete, shown on the page of figures, written by `write_result`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import result_file
from repository import ROOT

RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
FIELDS = {"benchmark", "machine", "software", "date", "commit", "commands", "source", "note", "columns", "rows"}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_names_machine_date_command_and_source(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) - {"cells"} == FIELDS
    assert found["machine"]
    assert re.search(r"2\d{3}-\d\d-\d\d", found["date"])
    assert found["commands"]
    assert found["commit"] or found["source"].startswith("converted by hand")
    assert found["benchmark"] == "slotline bench" or (ROOT / "benchmarks" / f"{found['benchmark']}.py").exists()
    assert {len(row) for row in found["rows"]} == {len(found["columns"])}


def test_the_pages_of_figures_show_every_result() -> None:
    pages = ("performance.md", "figures.md", "kv-tiers.md", "prefill-decode.md", "structured-output.md")
    text = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in pages)
    shown = re.findall(r"<!-- generated: results\.([\w-]+) -->", text)
    assert sorted(shown) == sorted(path.stem for path in RESULTS)


def test_the_figure_of_the_readme_is_a_result() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| output tokens per second \| (.+) \| (.+) \| (.+) \|$", text, re.MULTILINE)
    rows = json.loads((ROOT / "benchmarks/results/engine-h200-vllm.json").read_text(encoding="utf-8"))["rows"]
    assert [*row] in [each[1:4] for each in rows if each[0].startswith("Qwen3-0.6B, nano")]


def test_a_benchmark_writes_a_complete_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results" / "host.json"
    monkeypatch.setattr(sys, "argv", ["host_step.py", "--requests", "2", "--json", str(path)])
    result_file.write_result(path, "host_step", ["case", "ms"], [["two requests", "0.1"]], note="A note.")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) == FIELDS
    assert found["commands"] == ["python benchmarks/host_step.py --requests 2"]
    assert "torch" in found["software"]
    assert found["machine"]


def test_a_row_with_a_missing_cell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs 2 cells"):
        result_file.write_result(tmp_path / "host.json", "host_step", ["case", "ms"], [["two requests"]])
