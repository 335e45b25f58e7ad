"""The checks of structured output: no broken plugin survives them, no right one fails, ours among these."""

from __future__ import annotations

import re

import pytest
from mutant_trials import until_killed

from slotline.registry.descriptor import Kind
from slotline.testing import Level, Outcome, all_checks, check_plugin
from slotline.testing.mutants.structured_output import CORRECT, MUTANTS
from slotline.testing.oracles.structured_output import Language, matches

pytestmark = pytest.mark.behaviour(102)


@pytest.mark.spread(2)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mandatory_check_kills_the_mutant_at_its_level(mutant):
    records = until_killed(mutant)
    assert records[-1].bad, f"{mutant.name} survives up to {mutant.level}"
    assert records[-1].level == mutant.level, f"{records[-1].id} kills it already: {records[-1].reason}"


@pytest.mark.spread(0, slow=1)
@pytest.mark.parametrize("correct", CORRECT, ids=lambda correct: correct.descriptor.name)
def test_a_right_plugin_passes_and_skips_only_what_it_does_not_declare(correct):
    records = check_plugin(correct.descriptor)
    assert [f"{r.key}: {r.reason}" for r in records if r.bad] == []
    skipped = {r.reason for r in records if r.outcome is Outcome.SKIPPED and Level.CONTRACT < r.level < Level.ENGINE}
    assert all("not declared" in reason for reason in skipped), skipped


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_ours_pass_up_to_random_traffic(name):
    records = check_plugin(f"structured_output:{name}", level=Level.STATEFUL)
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    assert sum(record.outcome is Outcome.PASSED for record in records) > 70


def test_there_are_checks_at_each_level_that_the_kind_has():
    levels = {item.level for item in all_checks(Kind.STRUCTURED_OUTPUT) if item.mandatory}
    assert levels >= {Level.CONTRACT, Level.NUMERICS, Level.HOSTILE, Level.STATEFUL, Level.ENGINE}


def test_the_oracle_is_a_search():
    language = Language(["ab", "abc", "d"])
    tokens = [None, b"a", b"ab", b"b", b"abc", b"d", b"da"]
    assert language.allowed(b"", tokens, [0]).tolist() == [False, True, True, False, True, True, False]
    assert language.allowed(b"ab", tokens, [0]).tolist() == [True, False, False, False, False, False, False]
    assert (language.over(b"ab"), language.over(b"abc"), language.over(b"d")) == (False, True, True)
    assert (language.forced(b"a"), language.forced(b""), language.forced(b"ab")) == (True, False, False)


def test_texts_that_an_expression_matches_are_found_by_trying_all():
    assert matches("a?b{1,2}", "ab", 3).texts == {b"b", b"ab", b"bb", b"abb"}
    assert all(re.fullmatch("(ab|a)c?", text.decode()) for text in matches("(ab|a)c?", "abc", 4).texts)
