"""The checks of scheduler policies: no broken plugin survives them, no right one fails, ours among these."""

from __future__ import annotations

import pytest
from mutant_trials import until_killed

from slotline.testing import Outcome, check_plugin
from slotline.testing.mutants.scheduler_policy import CORRECT, MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mandatory_check_kills_the_mutant_at_its_level(mutant):
    records = until_killed(mutant)
    assert records[-1].bad, f"{mutant.name} survives up to {mutant.level}"
    assert records[-1].level == mutant.level, f"{records[-1].id} kills it already: {records[-1].reason}"


@pytest.mark.parametrize("correct", CORRECT, ids=lambda correct: correct.descriptor.name)
def test_a_right_plugin_passes(correct):
    records = check_plugin(correct.descriptor)
    assert [f"{r.key}: {r.reason}" for r in records if r.bad] == []


@pytest.mark.parametrize("name", ["fcfs", "priority", "shortest", "fair"])
def test_ours_passes(name):
    records = check_plugin(f"scheduler_policy:{name}")
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    assert sum(record.outcome is Outcome.PASSED for record in records) >= 40
