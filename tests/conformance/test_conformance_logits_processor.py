"""The logits-processor checks: no broken processor survives them, no right one fails."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from mutant_trials import until_killed

from slotline.registry.descriptor import Kind
from slotline.testing import Level, Outcome, all_checks, check_plugin
from slotline.testing.environments.logits_processor import parameters
from slotline.testing.mutants.logits_processor import CORRECT, MUTANTS
from slotline.testing.oracles.logits_processor import difference, form_fault, greedy_change, lifted_ban

OURS = [
    f"logits_processor:{name}"
    for name in (
        "allowed_token_ids",
        "bad_words",
        "callables",
        "dry",
        "forced_tokens",
        "guidance",
        "logit_bias",
        "min_p",
        "min_tokens",
        "mirostat",
        "no_repeat_ngram",
        "penalties",
        "thinking_budget",
        "xtc",
    )
]
INF = float("inf")


@pytest.mark.spread(33, slow=11)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mandatory_check_kills_the_mutant_at_its_level(mutant):
    records = until_killed(mutant)
    assert records[-1].bad, f"{mutant.name} survives up to {mutant.level}"
    assert records[-1].level == mutant.level, f"{records[-1].id} kills it already: {records[-1].reason}"


@pytest.mark.slow
@pytest.mark.parametrize("target", [*(c.descriptor for c in CORRECT), *OURS], ids=lambda t: getattr(t, "name", t))
def test_a_right_processor_passes_and_skips_only_what_it_does_not_declare(target):
    records = check_plugin(target)
    assert [f"{r.key}: {r.reason}" for r in records if r.bad] == []
    skipped = {r.reason for r in records if r.outcome is Outcome.SKIPPED and r.level > Level.CONTRACT}
    assert all("declared" in reason for reason in skipped), skipped


@pytest.mark.parametrize(
    "name",
    ["place-for-row", "counts-stay", "release-all", "drafts-for-good", "one-beyond", "first-length", "all-drafts"],
)
def test_traffic_alone_sees_what_the_single_checks_see(name):
    mutant = next(item for item in MUTANTS if item.name == name)
    records = check_plugin(mutant.descriptor, only="logits_processor.fuzz.traffic", stop_at_first=True)
    assert records[-1].bad


def test_a_processor_without_examples_is_skipped_with_the_reason_and_reaches_no_level():
    capabilities = evolve(CORRECT[0].descriptor.capabilities, examples=())
    records = check_plugin(evolve(CORRECT[0].descriptor, capabilities=capabilities), level=Level.STATEFUL)
    reasons = {r.reason for r in records if r.level is Level.HOSTILE}
    assert reasons == {"not declared: examples, settings of the parameters that change logits"}


def test_examples_do_not_take_part_when_capabilities_are_compared_or_hashed():
    with_examples = CORRECT[0].descriptor.capabilities
    assert evolve(with_examples, examples=()) == with_examples
    assert hash(evolve(with_examples, examples=())) == hash(with_examples)


def test_there_are_checks_at_each_level_that_a_processor_has():
    levels = {item.level for item in all_checks(Kind.LOGITS_PROCESSOR) if item.mandatory}
    assert levels >= {Level.NUMERICS, Level.HOSTILE, Level.STATEFUL}


def test_settings_that_are_no_sampling_parameters_go_into_extra_args():
    found = parameters({"temperature": 0.5, "mine": 3, "extra_args": {"yours": 4}})
    assert (found["temperature"], found["mine"], found["yours"]) == (0.5, 3, 4)


def test_the_greedy_token_changes_with_a_new_best_a_lost_one_and_a_new_tie():
    before = torch.tensor([1.0, 3.0, 3.0, 2.0])
    assert greedy_change(before, torch.tensor([1.0, 3.0, 3.0, -INF])) is None
    assert greedy_change(before, torch.tensor([1.0, 3.0, 2.0, 2.0])) is None  # the first of the tied stays
    assert greedy_change(before, torch.tensor([1.0, 2.0, 3.0, 2.0])) == "the greedy token was 1 and is 2"
    assert greedy_change(before, torch.tensor([3.0, 3.0, 3.0, 2.0])) is not None


def test_forms_that_are_wrong_are_told():
    good = torch.zeros(2, 4)
    assert form_fault(good, good) is None
    assert "NoneType" in str(form_fault(good, None))
    assert "shape" in str(form_fault(good, good[:1]))
    assert "float64" in str(form_fault(good, good.double()))
    assert "token 3" in str(form_fault(good, torch.tensor([[0.0] * 4, [0.0, 0.0, 0.0, float("nan")]])))


def test_a_lifted_ban_and_a_difference_name_the_token():
    before = torch.tensor([[0.0, -INF], [0.0, 1.0]])
    assert lifted_ban(before, before) is None
    assert lifted_ban(before, torch.tensor([[0.0, -1e9], [0.0, 1.0]])) == (0, 1)
    assert difference(before[0], before[0]) is None
    assert "token 1 is 2" in str(difference(before[1], torch.tensor([0.0, 2.0])))
