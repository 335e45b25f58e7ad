"""The checks of linear plugins: no broken one survives them, no right one fails, ours among these."""

from __future__ import annotations

import pytest
from mutant_trials import until_killed

from slotline.backends.linear.vnni_kernels import lanes
from slotline.registry.descriptor import Kind
from slotline.testing import Level, Outcome, all_checks, check_plugin
from slotline.testing.mutants.linear import CORRECT, MUTANTS


@pytest.mark.spread(3)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mandatory_check_kills_the_mutant_at_its_level(mutant):
    records = until_killed(mutant)
    assert records[-1].bad, f"{mutant.name} survives up to {mutant.level}"
    assert records[-1].level == mutant.level, f"{records[-1].id} kills it already: {records[-1].reason}"


@pytest.mark.spread(0, slow=1)
@pytest.mark.parametrize("correct", CORRECT, ids=lambda correct: correct.descriptor.name)
def test_a_right_plugin_passes_and_skips_only_what_it_does_not_declare(correct):
    records = check_plugin(correct.descriptor, level=Level.STATEFUL)
    assert [f"{r.key}: {r.reason}" for r in records if r.bad] == []
    skipped = {r.reason for r in records if r.outcome is Outcome.SKIPPED and Level.CONTRACT < r.level < Level.ENGINE}
    assert all(any(word in reason for word in ("declared", "joins", "border")) for reason in skipped), skipped


@pytest.mark.slow
@pytest.mark.parametrize("name", ["numba", "vnni", "dequantized", "torch_int8", "torch_int4"])
def test_ours_passes_all(name):
    if name == "vnni" and not lanes():
        pytest.skip("this processor has no dot product of bytes")
    records = check_plugin(f"linear:{name}", level=Level.STATEFUL)
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    assert sum(record.outcome is Outcome.PASSED for record in records) > 40


@pytest.mark.slow
@pytest.mark.skipif(lanes() != 16, reason="needs AVX-512 VNNI, which has both widths")
def test_the_narrow_dot_product_is_right_too(monkeypatch):
    monkeypatch.setattr("slotline.backends.linear.vnni_kernels.lanes", lambda: 8)
    records = check_plugin("linear:vnni", level=Level.NUMERICS, only="linear.apply.few")
    assert sum(record.outcome is Outcome.PASSED for record in records) > 3
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []


@pytest.mark.slow
def test_a_whole_engine_gives_the_text_of_the_dequantized_weights():
    records = check_plugin("linear:numba", level=Level.ENGINE, only="linear.engine.text")
    assert [record.outcome for record in records if record.id == "linear.engine.text"] == [Outcome.PASSED] * 3


def test_there_are_checks_at_each_level_that_the_kind_has():
    levels = {item.level for item in all_checks(Kind.LINEAR) if item.mandatory}
    assert levels >= {Level.CONTRACT, Level.NUMERICS, Level.HOSTILE, Level.STATEFUL, Level.ENGINE}
