"""The drafter checks: no broken drafter survives them, no right one fails, and the statistics are what they claim."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from mutant_trials import until_killed
from transformers import LlamaConfig, Qwen3Config

from slotline.conformance.drafter.config_fields import COUNTS, HARMLESS, REFUSED
from slotline.registry.descriptor import Kind
from slotline.testing import Level, Outcome, all_checks, check_plugin
from slotline.testing.mutants.drafter import CORRECT, MUTANTS
from slotline.testing.oracles.drafter import chi_square, draw, verify_by_match, verify_by_rejection
from slotline.testing.reference.drafter_heads import eagle3


@pytest.mark.spread(3)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mandatory_check_kills_the_mutant_at_its_level(mutant):
    records = until_killed(mutant)
    assert records[-1].bad, f"{mutant.name} survives up to {mutant.level}"
    assert records[-1].level == mutant.level, f"{records[-1].id} kills it already: {records[-1].reason}"


@pytest.mark.spread(1)
@pytest.mark.parametrize("correct", CORRECT, ids=lambda correct: correct.descriptor.name)
def test_a_right_drafter_passes_and_skips_only_what_it_does_not_declare(correct):
    records = check_plugin(correct.descriptor)
    assert [f"{r.id}: {r.reason}" for r in records if r.outcome not in (Outcome.PASSED, Outcome.SKIPPED)] == []
    skipped = {r.reason for r in records if r.outcome is Outcome.SKIPPED and r.level > Level.CONTRACT}
    assert all("not declared" in reason for reason in skipped), skipped


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", ["sharpened-draws", "greedy-draws", "sharpened-statement", "one-draw"])
def test_probabilities_that_lie_change_the_text_and_the_engine_sees_it(name):
    mutant = next(item for item in MUTANTS if item.name == name)
    (record,) = check_plugin(mutant.descriptor, only=lambda item: item.id == "drafter.engine.distribution")
    assert record.bad
    assert "chi-square" in record.reason


def test_drafts_are_accepted_in_the_greedy_loop():
    """Equality would mean little if no draft were ever taken."""
    (record,) = check_plugin(CORRECT[0].descriptor, only=lambda item: item.id == "drafter.engine.greedy")
    assert record.details["accepted"] > 1000


def test_drafters_whose_needs_only_an_engine_can_give_are_skipped_with_the_reason():
    from attrs import evolve

    capabilities = evolve(CORRECT[0].descriptor.capabilities, needs_kv_group=True)
    records = check_plugin(evolve(CORRECT[0].descriptor, capabilities=capabilities), level=Level.NUMERICS)
    shape = next(record for record in records if record.id == "drafter.draft.shape")
    assert (shape.outcome, shape.reason) == (Outcome.SKIPPED, "needs_kv_group: only an engine can give it")


@pytest.mark.spread(1, slow=1)
@pytest.mark.parametrize(
    "name", [f"drafter:{name}" for name in ("medusa", "medusa_tree", "dflash", "eagle", "eagle3", "eagle_tree")]
)
def test_a_drafter_with_weights_runs_with_those_that_it_makes_up(name):
    records = check_plugin(name)
    assert [f"{r.id}: {r.reason}" for r in records if r.outcome not in (Outcome.PASSED, Outcome.SKIPPED)] == []
    (greedy,) = [record for record in records if record.id == "drafter.engine.greedy"]
    assert greedy.outcome is Outcome.PASSED
    assert greedy.details["drafted"] > 1000


def test_a_drafter_that_makes_no_weights_up_is_skipped_and_one_that_fails_to_is_told():
    from attrs import evolve

    from slotline.testing.reference.drafter import PromptLookup

    class Broken(PromptLookup):
        @staticmethod
        def write_example(folder, context):
            raise OSError("no room")

    capabilities = evolve(CORRECT[0].descriptor.capabilities, needs_checkpoint=True)
    reasons = []
    for factory in (PromptLookup, Broken):
        descriptor = evolve(CORRECT[0].descriptor, capabilities=capabilities, factory=factory)
        records = check_plugin(descriptor, level=Level.NUMERICS)
        shape = next(record for record in records if record.id == "drafter.draft.shape")
        reasons.append((shape.outcome, shape.reason))
    assert reasons[0] == (Outcome.SKIPPED, "needs_checkpoint: its factory has no write_example")
    assert reasons[1][0] is Outcome.FAILED
    assert "write_example raised OSError: no room" in reasons[1][1]


@pytest.mark.parametrize(("form", "config"), [("eagle", LlamaConfig), ("eagle3", LlamaConfig), ("dflash", Qwen3Config)])
def test_each_field_of_the_configuration_of_a_head_is_in_the_lists(form, config):
    """A newer transformers with another field fails here, and whoever updates it decides what the field means."""
    known = set(HARMLESS[form]) | set(COUNTS[form]) | set(REFUSED[form])
    assert {field.name for field in dataclasses.fields(config)} - known == set()


@pytest.mark.spread(1)
def test_a_reader_of_published_heads_that_keeps_hidden_states_passes_up_to_histories():
    records = check_plugin(eagle3, level=Level.HOSTILE)
    assert [f"{r.id}: {r.reason}" for r in records if r.outcome not in (Outcome.PASSED, Outcome.SKIPPED)] == []


def test_there_are_checks_at_each_level_that_a_drafter_has():
    levels = {item.level for item in all_checks(Kind.DRAFTER) if item.mandatory}
    assert levels >= {Level.NUMERICS, Level.HOSTILE, Level.STATEFUL, Level.ENGINE}


def test_rejection_sampling_gives_the_target_distribution_exactly():
    """The law of the verified token, integrated over fine grids of both draws, is the target's."""
    p, q = np.array([0.1, 0.2, 0.7]), np.array([0.5, 0.4, 0.1])
    steps = 400
    grid = (np.arange(steps) + 0.5) / steps
    law = np.zeros(3)
    for token in range(3):
        for accept in grid:
            draws = iter((accept, 0.5))
            taken = verify_by_rejection([token], q[None], lambda _: p, lambda draws=draws: next(draws))
            if taken[0] == token and len(taken) > 1:
                law[token] += q[token] / steps
            else:  # the residual is drawn on its own grid
                rest = np.maximum(p - q, 0)
                law += rest / rest.sum() * q[token] / steps
    assert np.abs(law - p).max() < 2 / steps


def test_a_draft_lives_as_long_as_the_target_says_the_same():
    text = (4, 7, 1, 9)
    assert verify_by_match((4, 7, 2), None, lambda taken: text[len(taken)]) == (4, 7, 1)
    assert verify_by_match((4, 7, 1), None, lambda taken: text[len(taken)]) == (4, 7, 1, 9)
    assert verify_by_match((), None, lambda taken: text[len(taken)]) == (4,)


def test_a_tree_is_followed_into_the_branch_that_the_target_takes():
    text = (4, 7, 1, 9)
    assert verify_by_match((3, 4, 8, 7), (-1, -1, 1, 1), lambda taken: text[len(taken)]) == (4, 7, 1)


def test_chi_square_knows_its_table_and_what_cannot_be():
    observed, expected = np.array([60.0, 40.0]), np.array([50.0, 50.0])
    result = chi_square({0: (observed, expected)})
    assert result.freedom == 1
    assert result.statistic == pytest.approx(4.0)
    assert result.p_value == pytest.approx(0.0455, abs=1e-4)
    assert chi_square({0: (np.array([9.0, 1.0]), np.array([10.0, 0.0]))}).p_value == 0.0


def test_a_draw_never_takes_a_token_of_weight_zero():
    weights = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    assert {draw(weights, u) for u in (0.0, 0.25, 0.5, 0.75, np.nextafter(1.0, 0.0))} == {1, 3}
