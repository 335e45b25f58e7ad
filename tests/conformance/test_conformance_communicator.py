"""The checks of communicators: no broken one survives them, no right one fails, gloo among these."""

from __future__ import annotations

import pytest
from mutant_trials import until_killed

from slotline.registry.descriptor import Kind
from slotline.testing import Level, Outcome, all_checks, check_plugin
from slotline.testing.mutants.communicator import CORRECT, MUTANTS


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mandatory_check_kills_the_mutant_at_its_level(mutant):
    records = until_killed(mutant, lowest=min(mutant.level, Level.NUMERICS))
    assert records[-1].bad, f"{mutant.name} survives up to {mutant.level}"
    assert records[-1].level == mutant.level, f"{records[-1].id} kills it already: {records[-1].reason}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("correct", CORRECT, ids=lambda correct: correct.descriptor.name)
def test_a_right_plugin_passes_and_skips_only_what_it_does_not_declare(correct):
    records = check_plugin(correct.descriptor, device="cpu", level=Level.STATEFUL)
    assert [f"{r.key}: {r.reason}" for r in records if r.bad] == []
    assert [r.key for r in records if r.outcome is Outcome.SKIPPED and r.level > Level.CONTRACT] == []


@pytest.mark.slow
def test_gloo_passes_all():
    records = check_plugin("communicator:gloo", level=Level.STATEFUL)
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    assert sum(record.outcome is Outcome.PASSED for record in records) > 50


def test_there_are_checks_at_each_level():
    levels = {item.level for item in all_checks(Kind.COMMUNICATOR) if item.mandatory}
    assert levels == set(Level)
