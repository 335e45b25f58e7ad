"""`slotline conform` and `slotline matrix`: exit codes, plugins by name, crashes, tables, badges."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import attrs
import pytest
from cli_cases import pretend_installed
from conformance_cases import author_folder, fake_check, slotline_run

from slotline.cli import conform_run, main
from slotline.cli.conform_run import run_suite
from slotline.registry.descriptor import HOST_CONTRACTS, ContractRange, DeviceInfo, Kind
from slotline.registry.errors import (
    ConfigError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginNotFoundError,
    SlotlineError,
)
from slotline.testing import Level, Outcome, check_plugin
from slotline.testing.badge import badge
from slotline.testing.facts import Machine, Plugin, Suite
from slotline.testing.matrix import tables, to_html, to_markdown
from slotline.testing.report import Report, Settings
from slotline.testing.runner import cases_of, record_of
from slotline.testing.selection import select
from slotline.testing.stream import Reader
from slotline.testing.subject import subject_of
from slotline.testing.summary import verdict
from slotline.testing.target import find_target

FAKE = "logits_processor.fake"
SOURCE = """
from slotline.registry.contracts.logits_processor import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor

descriptor = Descriptor(
    kind="logits_processor", name="tiny", capabilities=LogitsProcessorCapabilities(), factory="nowhere:Nothing"
)
"""


def test_a_conformant_plugin_exits_with_0_and_leaves_report_junit_and_badge(tmp_path: Path) -> None:
    author_folder(tmp_path)
    files = ("--report", "r.json", "--junit", "f.xml", "--badge", "b.json")
    done = slotline_run(tmp_path, "conform", "./tiny.py:descriptor", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conformant up to L3; level reached: L3 stateful, the last one with checks of its kind" in done.stdout
    assert "L1 numerics    6 of 6 runs" in done.stderr
    report = Report.load(tmp_path / "r.json")
    assert report.conformant
    assert len(report.records) == report.planned == 13
    assert json.loads((tmp_path / "b.json").read_text()) == {
        "schemaVersion": 1,
        "label": "slotline logits processor contract 1",
        "message": "L3",
        "color": "green",
    }
    suite = ElementTree.parse(tmp_path / "f.xml").getroot()[0]
    assert (suite.attrib["tests"], suite.attrib["failures"], suite.attrib["skipped"]) == ("13", "0", "3")


@pytest.mark.spread(1)
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_crash_is_a_failure_of_its_check_and_the_rest_still_runs(tmp_path: Path, jobs: str) -> None:
    author_folder(tmp_path)
    options = ("--set", "dies=true", "--set", "broken=true", "--report", "r.json", "--junit", "f.xml", "--jobs", jobs)
    done = slotline_run(tmp_path, "conform", "./tiny.py:descriptor", *options)
    assert done.returncode == 1
    assert f"L2 {FAKE}.dies" in done.stdout
    assert ("its process died: signal SIGABRT" if jobs == "1" else "crashed while running") in done.stdout
    assert f"--check {FAKE}.dies --device cpu --set=dies=true --set=broken=true" in done.stdout
    report = Report.load(tmp_path / "r.json")
    assert report.complete
    assert {record.key for record in report.failures} == {f"{FAKE}.{x}" for x in ("broken", "partly[n=2]", "dies")}
    assert {record.outcome for record in report.records if record.id == f"{FAKE}.fuzz"} == {Outcome.PASSED}


def test_after_a_fault_that_loses_the_device_another_process_goes_on(tmp_path: Path) -> None:
    author_folder(tmp_path)
    done = slotline_run(tmp_path, "conform", "./tiny.py:descriptor", "--set=loses=true", "--report", "r.json")
    assert done.returncode == 1, done.stdout + done.stderr
    report = Report.load(tmp_path / "r.json")
    assert report.complete
    assert [record.key for record in report.failures] == [f"{FAKE}.dies"]
    assert "against the plugin: 1" in done.stdout


@pytest.mark.spread(1)
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_check_that_does_not_end_is_ended(tmp_path: Path, jobs: str) -> None:
    author_folder(tmp_path)
    only = ("--check", f"{FAKE}.dies", "--check", f"{FAKE}.fuzz", "--jobs", jobs)
    done = slotline_run(tmp_path, "conform", "./tiny.py:descriptor", "--set=hangs=true", "--timeout=1.5", *only)
    assert done.returncode == 1
    assert "it did not end within 1.5 s" in done.stdout
    assert re.search(r"L3 stateful +1 +0 ", done.stdout)


def test_what_the_session_s_time_does_not_allow_is_missing_and_stands_against_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    author_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    jump = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + jump[0], sleep=time.sleep)
    monkeypatch.setattr(conform_run, "time", clock)

    def on_news(reader: Reader) -> None:
        if reader.running is not None and reader.running.key == f"{FAKE}.dies":
            jump[0] = 1000

    options = ["--slotline-plugin=./tiny.py:descriptor", "--slotline-options=hangs=true"]
    report = run_suite(options, on_news, timeout=10_000, session_timeout=900)
    assert not report.complete
    assert report.clean
    assert 0 < len(report.records) < report.planned
    assert "runs are missing" in verdict(report).text
    with pytest.raises(SlotlineError, match="over before the suite began"):
        run_suite(options, on_news, timeout=10_000, session_timeout=0)


@pytest.mark.spread(1)
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_run_that_is_told_to_end_leaves_no_process_behind(tmp_path: Path, jobs: str) -> None:
    author_folder(tmp_path)
    options = ["./tiny.py:descriptor", "--set=hangs=true", "--check", f"{FAKE}.dies"]
    command = [sys.executable, "-P", "-m", "slotline", "conform", *options, "--jobs", jobs]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        for _ in range(600):
            if any('"start"' in events.read_text() for events in tmp_path.glob("*/events.jsonl")):
                break
            time.sleep(0.05)
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("slotline-conform-*"))
    assert str(tmp_path) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


def test_the_reproducer_runs_exactly_one_check_again(tmp_path: Path) -> None:
    author_folder(tmp_path)
    done = slotline_run(tmp_path, "conform", "./tiny.py:descriptor", "--set=broken=true", "--level", "L1", "--json")
    assert done.returncode == 1
    (line,) = [r["reproducer"] for r in json.loads(done.stdout)["records"] if r["case"] == {"n": 2}]
    again = slotline_run(tmp_path, *line.replace("'", "").split()[1:], "--traceback")
    assert again.returncode == 1
    assert "the second is wrong" in again.stdout
    assert "in partly" in again.stdout
    assert re.search(r"L1 numerics +0 +1 ", again.stdout)


def test_what_the_suite_refuses_is_an_error_of_the_command(tmp_path: Path) -> None:
    author_folder(tmp_path)
    done = slotline_run(tmp_path, "conform", "./tiny.py:descriptor", "--check", f"{FAKE}.pases")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: there is no logits_processor check '{FAKE}.pases'; did you mean")
    assert "  fix: list them with: slotline conform NAME --list" in done.stderr


def test_an_id_means_its_check_alone_and_a_beginning_all_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [fake_check(name, Level.CONTRACT) for name in ("pages", "pages.split", "pagination")]
    monkeypatch.setattr("slotline.testing.selection.all_checks", lambda kind: checks)

    def ids(*wanted: str) -> list[str]:
        return [item.key for item in select(subject_of("full"), wanted=wanted)]

    assert ids("kv_spec.fake.pages") == ["kv_spec.fake.pages"]
    assert ids("kv_spec.fake.pages.") == ["kv_spec.fake.pages", "kv_spec.fake.pages.split"]
    assert len(ids("kv_spec.fake")) == 3
    with pytest.raises(ConfigError, match=r"no kv_spec check 'kv_spec\.fake\.pag'"):
        ids("kv_spec.fake.pag")


def test_options_and_device_are_checked_as_the_configuration_checks_them() -> None:
    with pytest.raises(ConfigError, match="the kv_spec plugin 'full' takes no options"):
        subject_of("full", options={"pages": 3})
    with pytest.raises(ConfigError, match="is not there"):
        subject_of("full", device="cuda:99")
    with pytest.raises(PluginError, match="does not declare the device: needs cuda, offers cpu"):
        subject_of("cpu", device=DeviceInfo(type="cuda"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["torhc"], "there is no plugin 'torhc'; did you mean 'torch'?"),
        (["attention:torhc"], "there is no attention plugin 'torhc'; did you mean 'torch'?"),
        (["ngram", "--kind", "lora"], "there is no lora plugin 'ngram'"),
        (["torch", "--kind", "lorra"], "'lorra' is no kind of plugin"),
        (["torch", "--level", "L9"], "there is no level 'L9'"),
    ],
)
def test_wrong_names_are_errors_with_what_was_meant(
    arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conform", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_list_shows_the_selection_and_runs_nothing(tmp_path: Path) -> None:
    author_folder(tmp_path)
    done = slotline_run(tmp_path, "conform", "./tiny.py:descriptor", "--list", "--set=dies=true", "--level=L2")
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^L1 +{FAKE}.partly +2 +Its second case fails if the plugin is broken.$", done.stdout, re.M)
    assert re.search(rf"^L1 +{FAKE}.undeclared +- +not declared: argmax invariant", done.stdout, re.M)
    assert "fuzz" not in done.stdout


def test_several_processes_need_their_package_and_a_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conform_run, "find_spec", lambda name: None if name == "xdist" else object())
    assert main(["conform", "./tiny.py:descriptor", "--jobs", "2"]) == 2
    assert "--jobs 2 needs pytest-xdist, not installed here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["conform", "./tiny.py:descriptor", "--jobs", "0"])
    assert "0 is less than 1" in capsys.readouterr().err


def test_without_pytest_the_fix_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(conform_run, "find_spec", lambda name: None if name == "hypothesis" else object())
    assert main(["conform", "torch"]) == 2
    assert "needs hypothesis, not installed here" in (error := capsys.readouterr().err)
    assert "pip install 'slotline[conformance]'" in error


def test_a_name_of_two_distributions_or_two_kinds_must_be_made_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tiny_one", "tiny_two"):
        (tmp_path / f"{module}.py").write_text(SOURCE)
    group = {"slotline.logits_processor": {"tiny": "tiny_one:descriptor"}}
    pretend_installed(monkeypatch, tmp_path / "one", "tiny-one", group, tmp_path)
    found = find_target("tiny")
    assert (found.name, found.distribution, found.version) == ("logits_processor:tiny", "tiny-one", "0.1.0")
    pretend_installed(monkeypatch, tmp_path / "two", "tiny-two", {**group, "slotline.lora": {"tiny": "x:y"}})
    with pytest.raises(PluginConflictError, match=r"is offered by tiny-(one|two).* and tiny-(one|two)"):
        find_target("tiny")
    with pytest.raises(PluginConflictError, match="name the object: tiny_one:descriptor"):
        find_target("logits_processor:tiny")
    assert find_target("tiny_one:descriptor").distribution in ("tiny-one", "tiny-two")
    pretend_installed(monkeypatch, tmp_path / "three", "other", {"slotline.lora": {"cpu": "x:y"}})
    with pytest.raises(PluginConflictError, match=r"several plugins 'cpu': attention:cpu, lora:cpu"):
        find_target("cpu")
    assert find_target("cpu", kind=Kind.ATTENTION).name == "attention:cpu"
    with pytest.raises(PluginLoadError, match="ModuleNotFoundError"):
        find_target("lora:cpu")
    with pytest.raises(PluginNotFoundError, match="no lora plugin 'ngram'"):
        find_target("ngram", kind=Kind.LORA)


def test_a_plugin_of_contract_1_lives_on_under_a_host_of_1_and_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HOST_CONTRACTS, Kind.KV_SPEC, ContractRange(1, 2))
    subject = subject_of("kv_spec:full")
    assert subject.contract == 1
    assert cases_of(fake_check("old", Level.CONTRACT), subject) == (({},), None)
    assert cases_of(fake_check("new", Level.CONTRACT, since=2), subject) == (
        (),
        "since contract 2, the plugin speaks 1",
    )


def test_a_plugin_of_contracts_1_to_3_is_bound_to_2_and_gets_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HOST_CONTRACTS, Kind.KV_SPEC, ContractRange(1, 2))
    descriptor = attrs.evolve(find_target("full").descriptor, contract=ContractRange(1, 3))
    subject = subject_of(descriptor)
    assert subject.contract == 2
    assert cases_of(fake_check("new", Level.CONTRACT, since=2), subject) == (({},), None)


def test_records_from_python_say_how_to_repeat_them(monkeypatch: pytest.MonkeyPatch) -> None:
    check = fake_check("cases", Level.CONTRACT, cases=lambda _subject: ({"n": n} for n in (1, 2)))
    monkeypatch.setattr("slotline.testing.runner.all_checks", lambda kind: (check,))
    command = "slotline conform kv_spec:full --check 'kv_spec.fake.cases[n={}]' --device cpu"
    records = check_plugin("full", device="cpu")
    assert [record.reproducer for record in records] == [command.format(1), command.format(2)]
    moved = check_plugin("full", device="cpu", seed=5, exhaustive=True)
    assert [record.reproducer for record in moved] == [f"{command.format(n)} --exhaustive --seed 5" for n in (1, 2)]
    assert records[0].seed != moved[0].seed
    with pytest.raises(ConfigError, match=r"no kv_spec check 'kv_spec.fake.cases\[n=3\]' up to L5"):
        check_plugin("full", device="cpu", only="kv_spec.fake.cases[n=3]")
    only = check_plugin(find_target("full").descriptor, device="cpu", only="kv_spec.fake.cases[n=2]")
    assert [record.case for record in only] == [{"n": 2}]
    assert only[0].reproducer.startswith("check_plugin(descriptor, only='kv_spec.fake.cases[n=2]')")


def _report(name: str, outcomes: dict[str, Outcome], reason: str = "it is wrong") -> Report:
    records = tuple(
        record_of(
            fake_check(check, Level.NUMERICS, profile="pages"),
            {},
            outcome,
            reason="" if outcome == "passed" else reason,
        )
        for check, outcome in outcomes.items()
    )
    return Report(
        suite=Suite(version="0.1.0", contract="1"),
        plugin=Plugin(kind="kv_spec", name=name, contract=1, distribution=f"my-{name}", version="0.3"),
        machine=Machine(device="cpu", name="AVX2"),
        settings=Settings(level=Level.STATEFUL),
        planned=len(records),
        records=records,
    )


GOOD = _report("good", {"a": Outcome.PASSED, "b": Outcome.PASSED, "c": Outcome.SKIPPED}, "not declared: c")
POOR = _report("poor", {"a": Outcome.FAILED, "b": Outcome.XFAILED, "d": Outcome.PASSED}, "pages | differ")


def test_the_matrix_is_made_of_results_with_footnotes() -> None:
    text = to_markdown(tables([GOOD, POOR]))
    assert "### kv_spec" in text
    assert "| check | profile | good | poor |" in text
    assert "| level reached |  | L1 | none |" in text
    assert "| conformant |  | up to L3 | no |" in text
    assert "| from |  | my-good 0.3 | my-poor 0.3 |" in text
    assert "| `kv_spec.fake.a` | pages | ✅ | ❌ <sup>1</sup> |" in text
    assert "| `kv_spec.fake.b` | pages | ✅ | ⚠️ <sup>1</sup> |" in text
    assert "| `kv_spec.fake.c` | pages | - <sup>2</sup> | · |" in text
    assert "| `kv_spec.fake.d` | pages | · | ✅ |" in text
    assert "\n1. pages | differ\n2. not declared: c\n" in text


def test_the_html_matrix_needs_nothing_else_and_escapes() -> None:
    page = to_html(tables([GOOD, attrs.evolve(POOR, plugin=attrs.evolve(POOR.plugin, name="<poor>"))]))
    assert "&lt;poor&gt;" in page
    assert "<poor>" not in page
    assert "<code>kv_spec.fake.a</code><br><small>a works.</small>" in page
    assert not re.search(r"(src|href)=", page)


def test_matrix_writes_files_and_badges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    GOOD.save(tmp_path / "good.json")
    POOR.save(tmp_path / "poor.json")
    names = [str(tmp_path / "good.json"), str(tmp_path / "poor.json")]
    assert main(["matrix", *names]) == 0
    assert capsys.readouterr().out == to_markdown(tables([GOOD, POOR]))
    assert main(["matrix", *names, "--out", str(tmp_path / "m.html"), "--badges", str(tmp_path / "badges")]) == 0
    assert (tmp_path / "m.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "badges" / "kv_spec-poor.json").read_text()) == badge(POOR)
    assert (badge(GOOD)["message"], badge(POOR)["message"]) == ("L1", "none")


def test_matrix_names_the_file_that_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert main(["matrix", str(tmp_path / "x.json")]) == 2
    assert "x.json': it is no conformance report" in capsys.readouterr().err
    assert main(["matrix", str(tmp_path / "absent.json")]) == 2
    assert "cannot read" in capsys.readouterr().err
