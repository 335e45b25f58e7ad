"""Report as JUnit XML for CI systems: a test case for each run, with its record as properties."""

from __future__ import annotations

from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from slotline.testing.report import Report, plain
from slotline.testing.runner import Outcome, Record

_SAID = ("id", "summary", "level", "family", "since", "profile", "outcome", "reason")
_FIELDS = (*_SAID, "error", "allowed", "baseline", "ratio", "seed", "reproducer")
_NOT_RUN = (Outcome.SKIPPED, Outcome.DISABLED, Outcome.XFAILED)


def properties(record: Record) -> list[tuple[str, str]]:
    """Return the record's non-empty fields as texts."""
    shown = plain(record)
    return [(name, str(shown[name])) for name in _FIELDS if shown[name] not in (None, "")]


def to_junit(report: Report) -> str:
    """Return the XML text."""
    root = Element("testsuites", name="slotline.conformance")
    failed, skipped = len(report.failures), sum(record.outcome in _NOT_RUN for record in report.records)
    suite = SubElement(
        root,
        "testsuite",
        name=f"{report.plugin.label} on {report.machine.device}",
        tests=str(len(report.records)),
        failures=str(failed),
        skipped=str(skipped),
        errors="0",
        time=f"{sum(record.seconds for record in report.records):.3f}",
    )
    for record in report.records:
        _case(suite, report, record)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: Element, report: Report, record: Record) -> None:
    case = SubElement(
        suite, "testcase", classname=f"slotline.{report.plugin.name}", name=record.key, time=f"{record.seconds:.3f}"
    )
    held = SubElement(case, "properties")
    for name, value in properties(record):
        SubElement(held, "property", name=name, value=_printable(value))
    if record.bad:
        failure = SubElement(case, "failure", message=_printable(record.reason))
        failure.text = _printable(str(record.details.get("traceback", record.reason)))
    elif record.outcome in _NOT_RUN:
        SubElement(case, "skipped", type=record.outcome.value, message=_printable(record.reason))


def _printable(text: str) -> str:
    """Return the text without control characters that XML cannot contain."""
    return "".join(letter if letter >= " " or letter in "\n\t" else "?" for letter in text)
