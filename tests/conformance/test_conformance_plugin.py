"""The pytest plugin of the conformance suite, in an author's folder: outcomes, expectations, report, JUnit."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conformance_cases import author_folder, fake_check, pytest_run, python_run

from slotline.registry.descriptor import Kind
from slotline.registry.errors import ConfigError
from slotline.testing import Level, Outcome
from slotline.testing.expectations import Cause, check_expectations, read_expectations
from slotline.testing.report import Report, ReportError

FAKE = "logits_processor.fake"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A broken plugin, nothing expected: the folder with report, JUnit file and output."""
    folder = author_folder(tmp_path_factory.mktemp("whole"))
    done = pytest_run(
        folder, "--slotline-options=broken=true", "--slotline-report=r.json", "--junitxml=j.xml", "-ra", "-n", "0"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (folder / "output.txt").write_text(done.stdout)
    return folder


def test_every_outcome_is_recorded_once_for_each_run(whole_run: Path) -> None:
    report = Report.load(whole_run / "r.json")
    assert {record.key.removeprefix(f"{FAKE}."): record.outcome.value for record in report.records} == {
        "passes[n=1,shape=1+2]": "passed",
        "passes[n=2,shape=2+2]": "passed",
        "broken": "failed",
        "partly[n=1]": "passed",
        "partly[n=2]": "failed",
        "partly.more": "passed",
        "undeclared": "skipped",
        "elsewhere": "skipped",
        "dies": "passed",
        "fuzz": "passed",
        "provisional": "failed",
        "more": "passed",
        "later": "skipped",
    }
    assert not report.conformant
    assert report.complete
    assert report.level_reached is Level.CONTRACT
    assert {record.key for record in report.failures} == {f"{FAKE}.broken", f"{FAKE}.partly[n=2]"}


def test_skips_name_their_reason(whole_run: Path) -> None:
    reasons = {record.id: record.reason for record in Report.load(whole_run / "r.json").records}
    assert reasons[f"{FAKE}.undeclared"] == "not declared: argmax invariant needs True, offers False"
    assert reasons[f"{FAKE}.elsewhere"] == "no such machine"
    assert reasons[f"{FAKE}.later"] == "since contract 2, the plugin speaks 1"


def test_the_report_says_who_what_where_and_how_to_repeat(whole_run: Path) -> None:
    told = json.loads((whole_run / "r.json").read_text())
    assert told["schema"] == 1
    assert told["suite"]["contract"] == "1"
    assert told["plugin"]["kind"] == "logits_processor"
    assert told["plugin"]["name"] == "tiny"
    assert told["machine"]["device"] == "cpu"
    assert told["machine"]["torch"]
    assert told["settings"]["options"] == {"broken": True}
    assert told["summary"]["L1"]["failed"] == 2
    assert {"reason": "no such machine", "checks": [f"{FAKE}.elsewhere"]} in told["skips"]
    records = {(record["id"], record["case"].get("n")): record for record in told["records"]}
    passed, failed = records[f"{FAKE}.passes", 2], records[f"{FAKE}.partly", 2]
    assert passed["case"] == {"n": 2, "shape": [2, 2]}
    assert (passed["error"], passed["allowed"], passed["baseline"], passed["ratio"]) == (0.5, 1.0, 0.25, 0.5)
    assert failed["level"] == "L1"
    assert failed["reason"] == "the second is wrong"
    assert failed["reproducer"] == (
        f"slotline conform ./tiny.py:descriptor --check '{FAKE}.partly[n=2]' --device cpu --set=broken=true"
    )


def test_a_report_survives_the_way_to_json_and_back(whole_run: Path) -> None:
    report = Report.load(whole_run / "r.json")
    assert Report.from_json(report.to_json()) == report


def test_a_report_that_was_changed_by_hand_is_refused(whole_run: Path) -> None:
    told = json.loads((whole_run / "r.json").read_text())
    next(record for record in told["records"] if record["outcome"] == "failed")["outcome"] = "passed"
    with pytest.raises(ReportError, match="changed by hand"):
        Report.from_json(told)
    with pytest.raises(ReportError, match="no conformance report"):
        Report.from_json({"some": "json"})


def test_junit_carries_the_record_as_properties(whole_run: Path) -> None:
    cases = ElementTree.parse(whole_run / "j.xml").getroot().iter("testcase")
    failed = next(case for case in cases if "broken" in case.attrib["name"])
    properties = {item.attrib["name"]: item.attrib["value"] for item in failed.iter("property")}
    assert properties["id"] == f"{FAKE}.broken"
    assert properties["level"] == "L1"
    assert properties["profile"] == "decode"
    assert properties["outcome"] == "failed"
    assert properties["reproducer"].startswith("slotline conform ./tiny.py:descriptor --check ")


def test_the_terminal_shows_levels_failures_and_how_to_repeat_them(whole_run: Path) -> None:
    text = (whole_run / "output.txt").read_text()
    assert "slotline: logits_processor:tiny (./tiny.py:descriptor), contract 1, on cpu" in text
    assert "against the plugin: 2" in text
    assert "request 3, position 7: expected 1, came 2" in text
    assert f"slotline conform ./tiny.py:descriptor --check {FAKE}.broken --device cpu --set=broken=true" in text
    assert "not conformant up to L5: 2 failed; level reached: L0 contract" in text
    assert f"L3 {FAKE}.provisional: not yet right" in text
    assert f"L3 {FAKE}.more: More works than is declared." in text


@pytest.mark.slow
def test_expected_failures_keep_pytest_green_but_are_not_conformant(tmp_path: Path) -> None:
    table = '{id = "logits_processor.fake.partly[n=2]", kind = "bug", reason = "off by one", url = "https://x/1"}'
    folder = author_folder(
        tmp_path,
        f'slotline_expected_failures = [{{id = "{FAKE}.broken", reason = "wait for it", until = "0.2"}}, {table}]',
        f'slotline_disabled = ["{FAKE}.fuzz=too slow here"]',
    )
    done = pytest_run(folder, "--slotline-options=broken=true", "--slotline-report=r.json", "-n", "2", "-p", "xdist")
    assert done.returncode == 0, done.stdout + done.stderr
    report = Report.load(folder / "r.json")
    outcomes = {record.key: (record.outcome, record.reason) for record in report.records}
    assert outcomes[f"{FAKE}.broken"] == (Outcome.XFAILED, "not-yet: wait for it (until 0.2)")
    assert outcomes[f"{FAKE}.partly[n=2]"] == (Outcome.XFAILED, "bug: off by one (https://x/1)")
    assert outcomes[f"{FAKE}.partly[n=1]"][0] is Outcome.PASSED
    assert outcomes[f"{FAKE}.fuzz"] == (Outcome.DISABLED, "not-yet: too slow here")
    assert [item.kind for item in report.expected] == [Cause.NOT_YET, Cause.BUG]
    assert not report.conformant
    assert report.level_reached is Level.CONTRACT
    assert [record.level for record in report.records] == sorted(record.level for record in report.records)
    assert "not conformant up to L5: 2 expected to fail, 1 switched off" in done.stdout


def test_a_check_that_passes_against_its_expectation_fails(tmp_path: Path) -> None:
    folder = author_folder(tmp_path, f'slotline_expected_failures = ["{FAKE}.partly=both are wrong"]')
    done = pytest_run(folder, "--slotline-options=broken=true", f"--slotline-check={FAKE}.partly")
    assert done.returncode == 1
    assert "it passed, but is expected to fail (not-yet: both are wrong)" in done.stdout
    assert "or name the cases that fail, as check.id[case]" in done.stdout
    assert "1 failed, 1 xfailed" in done.stdout


def test_an_expectation_of_no_check_is_a_usage_error(tmp_path: Path) -> None:
    done = pytest_run(author_folder(tmp_path, f'slotline_expected_failures = ["{FAKE}.brokn=x"]'))
    assert done.returncode == 4
    assert f"there is no logits_processor check '{FAKE}.brokn'; did you mean '{FAKE}.broken'?" in done.stderr


def test_a_check_that_draws_histories_can_only_be_switched_off() -> None:
    check = fake_check("fuzz", Level.STATEFUL, explores=True)
    entries = read_expectations(["kv_spec.fake.fuzz=x"], "here")
    check_expectations({}, entries, [check], Kind.KV_SPEC)
    with pytest.raises(ConfigError, match="may pass by luck, so it cannot be expected to fail"):
        check_expectations(entries, {}, [check], Kind.KV_SPEC)


def test_expectations_are_texts_or_tables() -> None:
    found = read_expectations(
        ["a.b=c = d", "a.b[n=1,m=2]=e", '{id = "f.g", kind = "unsupported-upstream", reason = "h"}'], "here"
    )
    assert found["a.b"].reason == "c = d"
    assert found["a.b[n=1,m=2]"].reason == "e"
    assert found["f.g"].kind is Cause.UNSUPPORTED_UPSTREAM
    with pytest.raises(ConfigError, match="unknown key 'resaon'"):
        read_expectations([{"id": "a.b", "resaon": "c"}], "here")
    with pytest.raises(ConfigError, match=r"use one of: unsupported-upstream, not-yet, bug"):
        read_expectations([{"id": "a.b", "reason": "c", "kind": "sometime"}], "here")
    with pytest.raises(ConfigError, match=r"'a\.b' has no reason"):
        read_expectations(["a.b"], "here")
    with pytest.raises(ConfigError, match="named twice"):
        read_expectations(["a.b=c", "a.b=d"], "here")


def test_without_namespace_packages_the_suite_refuses_to_run(tmp_path: Path) -> None:
    done = pytest_run(author_folder(tmp_path), "-o", "consider_namespace_packages=false")
    assert done.returncode == 4
    assert "set consider_namespace_packages = true" in done.stderr


@pytest.mark.slow
def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    options = ("-p", "slotline.testing.plugin", "-o", "consider_namespace_packages=true")
    done = pytest_run(tmp_path, *options, "--slotline-plugin=full", "--collect-only", "-q")
    assert done.returncode in (0, 5), done.stdout + done.stderr
    done = pytest_run(tmp_path, *options)
    assert done.returncode == 4
    assert "no plugin is named to test" in done.stderr
    done = pytest_run(tmp_path, *options, "--slotline-plugin=no_such.module:thing")
    assert done.returncode == 4
    assert "cannot load 'no_such.module:thing': ModuleNotFoundError" in done.stderr


def test_strict_settings_of_the_author_do_not_matter(tmp_path: Path) -> None:
    folder = author_folder(tmp_path, "strict = true", 'filterwarnings = ["error"]')
    done = pytest_run(folder, "--slotline-options=loses=true")
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"{FAKE}.dies left the device unusable: run it alone" in done.stdout
    assert "not conformant: 4 of 13 runs are missing" in done.stdout


def test_the_plugin_imports_no_torch() -> None:
    done = python_run(Path(), "-c", "import slotline.testing.plugin, sys; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_the_plugin_lets_other_tests_of_the_author_alone(tmp_path: Path) -> None:
    folder = author_folder(tmp_path)
    (folder / "tiny.py").write_text("raise RuntimeError('nobody asked for it')\n")
    (folder / "test_own.py").write_text("def test_own() -> None:\n    pass\n")
    done = python_run(folder, "-m", "pytest", "-p", "no:cacheprovider", "test_own.py")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert "slotline conformance" not in done.stdout
