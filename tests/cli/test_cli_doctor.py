"""`slotline doctor`: each check finds what it is for."""

from __future__ import annotations

import json
import sys
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from cli_cases import pretend_installed
from packaging.requirements import Requirement

from slotline.cli import doctor, main
from slotline.cli.doctor_install import check_companions, differences, namespace_finding, version_finding
from slotline.cli.doctor_machine import nvidia_driver, threads_finding
from slotline.cli.doctor_plugins import check_configuration, check_duplicates, import_findings
from slotline.cli.finding import Status
from slotline.registry.records import PluginRecord, installed_records


def install_torchvision(monkeypatch: pytest.MonkeyPatch, folder: Path, needs: str | None) -> None:
    """Pretend that a torchvision is installed which needs this torch."""
    pretend_installed(monkeypatch, folder, "torchvision", {})
    with next(folder.glob("torchvision-*.dist-info/METADATA")).open("a") as metadata:
        metadata.write("Requires-Dist: numpy\n")
        metadata.write("" if needs is None else f"Requires-Dist: {needs}\n")
        metadata.write("Requires-Dist: torch==1.0; extra == 'old'\n")


def test_doctor_reports_every_part_and_its_exit_code_is_the_worst_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_torchvision(monkeypatch, tmp_path, "torch==2.0.1")
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    rows = {row["check"]: row for row in report["findings"]}
    assert {"python", "torch", "transformers", "numpy", "numba", "namespace", "cpu", "threads"} <= rows.keys()
    assert rows["attention:torch"]["status"] == "ok"
    assert rows["torchvision"]["status"] == "fail"
    assert "is built for torch==2.0.1" in rows["torchvision"]["text"]
    assert code == {"ok": 0, "warn": 1, "fail": 2}[report["status"]]
    worst = max((row["status"] for row in rows.values()), key=["optional", "ok", "warn", "fail"].index)
    assert report["status"] == worst
    assert {row["group"] for row in rows.values()} >= {"installation", "machine", "attention plugins"}
    assert rows["attention:torch"]["runs_here"] is True
    if not torch.cuda.is_available():
        assert rows["attention:triton"]["status"] == "optional"
        assert rows["attention:triton"]["runs_here"] is False
        assert rows["attention:triton"]["why_not"] == "needs cuda, this machine has cpu"
    if find_spec("flash_attn") is None:
        assert rows["attention:flash_attn"]["status"] == "optional"
        assert "the package flash_attn is not installed" in rows["attention:flash_attn"]["text"]
    assert all(row["fix"] for row in rows.values() if row["status"] != "ok")


@pytest.mark.parametrize(
    ("needs", "code", "text"),
    [
        ("torch==2.0.1", "", f"0.1.0 is built for torch==2.0.1, and torch is {torch.__version__}: transformers fails"),
        ("torch", "", None),
        (None, "", None),
        (
            "torch",
            "import torch; torch.ops.torchvision.nms",
            f"0.1.0 cannot be imported beside torch {torch.__version__} (AttributeError: '_OpNamespace' 'torchvision'",
        ),
    ],
)
def test_a_torchvision_for_another_torch_is_a_failure_with_its_remedy(
    needs: str | None, code: str, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_torchvision(monkeypatch, tmp_path, needs)
    (tmp_path / "torchvision.py").write_text(code)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision")
    (finding,) = [finding for finding in check_companions() if finding.check == "torchvision"]
    release = torch.__version__.partition("+")[0]
    if text is None:
        assert finding.status is Status.OK
        assert finding.text == f"0.1.0, for torch {torch.__version__}"
    else:
        assert finding.status is Status.FAIL
        assert finding.text.startswith(text)
        assert "transformers fails to import its models" in finding.text
        assert finding.fix.startswith(f"pip install 'torch=={release}' --upgrade torchvision, or pip uninstall")


PLUGIN = """
from slotline.registry import Descriptor, Kind
from slotline.registry.contracts import LoraCapabilities
from slotline.registry.capability import Max, Set
def probe(device):
    {probe}
descriptor = Descriptor(
    kind=Kind.LORA, name=__name__, factory="{factory}", probe=probe,
    capabilities=LoraCapabilities(
        devices=Set(("{device}",)), dtypes=Set(("float32",)), target_modules=Set(None), max_rank=Max(8)
    ),
)
"""


def test_a_sound_plugin_that_cannot_run_here_is_optional_and_a_broken_one_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sound, refuses = "return descriptor.capabilities", "return 'the probe says no'"
    plugins = {
        "a_runs": (sound, "builtins:dict", "cpu"),
        "b_other_device": (sound, "builtins:dict", "tpu"),
        "c_other_device_and_package": (sound, "package_for_tpu:X", "tpu"),
        "d_optional_package": (sound, "optional_package:X", "cpu"),
        "e_broken": (sound, "no_such_package:X", "cpu"),
        "f_probe_refuses": (refuses, "builtins:dict", "cpu"),
        "g_probe_refuses_for_a_package": (refuses, "no_such_package:X", "cpu"),
        "h_probe_raises": ("raise ValueError('broken probe')", "builtins:dict", "cpu"),
        "i_own_module_is_gone": (sound, "slotline.no_such_module:X", "tpu"),
    }
    for name, (probe, factory, device) in plugins.items():
        (tmp_path / f"{name}.py").write_text(PLUGIN.format(probe=probe, factory=factory, device=device))
    pretend_installed(monkeypatch, tmp_path, "odd", {"slotline.lora": {name: f"{name}:descriptor" for name in plugins}})
    with next(tmp_path.glob("*.dist-info/METADATA")).open("a") as metadata:
        metadata.write("Provides-Extra: more\nRequires-Dist: optional-package>=1; extra == 'more'\n")
    rows = [row for row in installed_records() if row.distribution == "odd"]
    findings = list(import_findings(rows))
    found = {finding.check.partition(":")[2][0]: finding for finding in findings}
    labels = {key: finding.status.label for key, finding in found.items()}
    assert labels == {
        "a": "ok",
        "b": "optional",
        "c": "optional",
        "d": "optional",
        "e": "fail",
        "f": "optional",
        "g": "optional",
        "h": "warn",
        "i": "fail",
    }
    assert [finding.runs_here for finding in findings] == [True, *[False] * 8]
    assert found["b"].why_not.startswith("needs tpu, this machine has cpu")
    assert found["d"].text == "odd 0.1.0: the package optional_package is not installed"
    assert found["g"].why_not == "the probe says no"
    assert "broken probe" in found["h"].text
    monkeypatch.setattr(doctor, "_CHECKS", (("plugins", lambda: iter(findings[:4])),))
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path))  # nothing was timed
    assert main(["doctor"]) == 0
    threads, *lines = capsys.readouterr().out.splitlines()
    assert threads == "threads: 1, as OMP_NUM_THREADS says"
    assert lines[0] == "lora plugins"
    assert lines[1].split() == ["status", "name", "runs", "here", "found"]
    assert lines[2].split() == ["ok", "a_runs", "yes", "odd", "0.1.0,", "contract", "1"]
    assert lines[-1] == "nothing to do"
    monkeypatch.setattr(doctor, "_CHECKS", (("plugins", lambda: iter(findings)),))
    assert main(["doctor"]) == 2


def test_a_variable_of_another_program_is_a_warning_and_a_wrong_one_a_failure_with_its_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLOTLINE_ROOT", "/opt")
    (finding,) = check_configuration()
    assert finding.status is Status.WARN
    assert "SLOTLINE_ROOT" in finding.text
    assert "SLOTLINE_ROOT" not in " ".join(finding.text for finding in check_duplicates())
    monkeypatch.setenv("SLOTLINE_MODELL", "x")
    (finding,) = doctor._findings("installation", check_configuration)
    assert finding.status is Status.FAIL
    assert "did you mean 'model'?" in finding.text
    assert finding.fix


def test_a_plugin_that_kills_its_process_is_a_row_and_the_others_are_still_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (tmp_path / "heavy.py").write_text("import torch\nfrom slotline.backends.torch_sdpa import descriptor\n")
    points = {"a_killer": "killer:descriptor", "b_gone": "gone:descriptor"}
    pretend_installed(monkeypatch, tmp_path, "trouble", {"slotline.logits_processor": points})
    rows = [row for row in installed_records() if row.distribution == "trouble" or row.name == "min_tokens"]
    found = {finding.check: finding for finding in import_findings(rows)}
    assert found["logits_processor:a_killer"].status is Status.FAIL
    assert "SIGSEGV" in found["logits_processor:a_killer"].text
    assert "No module named 'gone'" in found["logits_processor:b_gone"].text
    assert found["logits_processor:min_tokens"].status is Status.OK


def test_a_descriptor_that_imports_torch_and_one_of_another_contract_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = (
        "from slotline.registry import ContractRange, Descriptor, Kind\n"
        "from slotline.registry.contracts import LogitsProcessorCapabilities\n"
        "descriptor = Descriptor(kind=Kind.LOGITS_PROCESSOR, name=__name__, factory=dict,\n"
        "    contract=ContractRange(*RANGE), capabilities=LogitsProcessorCapabilities())\n"
    )
    (tmp_path / "a_future.py").write_text(f"RANGE = (7, 8)\n{make}")
    (tmp_path / "b_heavy.py").write_text(f"import torch\nRANGE = (1, 1)\n{make}")
    points = {name: f"{name}:descriptor" for name in ("a_future", "b_heavy")}
    pretend_installed(monkeypatch, tmp_path, "odd", {"slotline.logits_processor": points})
    rows = [row for row in installed_records() if row.distribution == "odd"]
    future, heavy = import_findings(rows)
    assert future.status is Status.FAIL
    assert "speaks contract 7..8" in future.text
    assert future.fix == "upgrade slotline"
    assert heavy.status is Status.WARN
    assert "imports torch" in heavy.text


def test_a_plugin_that_hangs_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(600)\n")
    pretend_installed(monkeypatch, tmp_path, "slow", {"slotline.logits_processor": {"sleeper": "sleeper:descriptor"}})
    rows = [row for row in installed_records() if row.distribution == "slow"]
    (finding,) = import_findings(rows, seconds=3.0)
    assert finding.status is Status.FAIL
    assert "took more than 3 s" in finding.text


def test_two_distributions_with_one_name_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        pretend_installed(monkeypatch, tmp_path / name, name, {"slotline.attention": {"same": "nowhere:descriptor"}})
    found = list(check_duplicates())
    assert [finding.status for finding in found] == [Status.FAIL, Status.FAIL]
    assert all("one 0.1.0" in finding.text and "two 0.1.0" in finding.text for finding in found)


@pytest.mark.parametrize(
    ("text", "status"),
    [("attrs>=20", Status.OK), ("attrs>=9999", Status.FAIL), ("no-such-thing-here>=1", Status.FAIL)],
)
def test_versions_are_compared_with_what_is_required(text: str, status: Status) -> None:
    finding = version_finding(Requirement(text))
    assert finding.status is status
    assert bool(finding.fix) == (status is Status.FAIL)


def test_an_init_file_that_hijacks_the_namespace_is_named() -> None:
    assert namespace_finding(None, ["here"]).status is Status.OK
    hijacked = namespace_finding("site-packages/slotline/__init__.py", [])
    assert hijacked.status is Status.FAIL
    assert "site-packages/slotline/__init__.py" in hijacked.fix


def test_stale_metadata_of_an_editable_install_is_found() -> None:
    ours = distribution("slotline")
    source: dict[str, dict[str, str]] = {}
    for point in ours.entry_points:
        source.setdefault(point.group, {})[point.name] = point.value
    project = {"version": ours.version, "entry-points": source}
    assert list(differences(ours, project)) == []
    source["slotline.attention"]["new"] = "somewhere:descriptor"
    source["slotline.attention"]["torch"] = "elsewhere:descriptor"
    del source["slotline.kv_spec"]
    found = list(differences(ours, {**project, "version": "9"}))
    assert f"version {ours.version} is installed, the source says 9" in found
    assert "attention:new is not installed" in found
    assert "attention:torch has moved" in found
    assert "kv_spec:full is gone from the source" in found


def test_more_threads_than_cores_is_a_warning() -> None:
    assert threads_finding(2, 2).status is Status.OK
    assert threads_finding(8, 2).fix == "set OMP_NUM_THREADS=2"


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 1 00:00:00 UTC 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build",
    ],
)
def test_the_driver_version_is_read_from_the_kernel(line: str, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(f"{line}\nGCC version: 12.2.0\n")
    assert nvidia_driver(tmp_path / "version") == "570.86.15"
    assert nvidia_driver(tmp_path / "absent") is None


def test_no_rows_need_no_process() -> None:
    nothing: list[PluginRecord] = []
    assert list(import_findings(nothing)) == []
