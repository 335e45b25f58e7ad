"""Test tools for plugin authors: checks, oracles, reference plugins, mutants and reports.

`check_plugin(target)` runs the conformance checks from Python. `pytest --pyargs slotline.conformance` and `slotline
conform NAME` run the same checks with pytest.
"""

from __future__ import annotations

from slotline.testing.check import Case, Check, Failed, Family, Level, NotApplicable, Run, all_checks, check
from slotline.testing.runner import Outcome, Record, check_plugin
from slotline.testing.subject import Subject

__all__ = [
    "Case",
    "Check",
    "Failed",
    "Family",
    "Level",
    "NotApplicable",
    "Outcome",
    "Record",
    "Run",
    "Subject",
    "all_checks",
    "check",
    "check_plugin",
]
