"""The checks of KV connectors: no broken one survives them, no right one fails, ours among these."""

from __future__ import annotations

import pytest
from mutant_trials import until_killed

from slotline.registry.descriptor import Kind
from slotline.testing import Level, Outcome, all_checks, check_plugin
from slotline.testing.mutants.kv_connector import CORRECT, MUTANTS

pytestmark = pytest.mark.behaviour(96, 161)


@pytest.mark.spread(19, slow=6)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mandatory_check_kills_the_mutant_at_its_level(mutant):
    records = until_killed(mutant)
    assert records[-1].bad, f"{mutant.name} survives up to {mutant.level}"
    assert records[-1].level == mutant.level, f"{records[-1].id} kills it already: {records[-1].reason}"


@pytest.mark.spread(1)
@pytest.mark.parametrize("correct", CORRECT, ids=lambda correct: correct.descriptor.name)
def test_a_right_connector_passes_and_skips_only_what_it_does_not_declare(correct):
    records = check_plugin(correct.descriptor)
    assert [f"{r.key}: {r.reason}" for r in records if r.bad] == []
    skipped = {r.reason for r in records if r.outcome is Outcome.SKIPPED and Level.CONTRACT < r.level < Level.ENGINE}
    assert all("not declared" in reason for reason in skipped), skipped


@pytest.mark.slow
def test_ours_passes_all():
    records = check_plugin("kv_connector:host_memory", options={"memory": "1MiB"})  # 4 GiB are millions of these blocks
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    assert sum(record.outcome is Outcome.PASSED for record in records) > 15
    (traffic,) = [record for record in records if record.id == "kv_connector.fuzz.traffic"]
    assert traffic.details["loaded"] > 100


def test_there_are_checks_at_each_level_that_the_kind_has():
    levels = {item.level for item in all_checks(Kind.KV_CONNECTOR) if item.mandatory}
    assert levels >= {Level.CONTRACT, Level.NUMERICS, Level.HOSTILE, Level.STATEFUL, Level.ENGINE}
