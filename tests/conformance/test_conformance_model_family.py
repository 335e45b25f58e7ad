"""The checks of model families: no broken one survives them, no right one fails, ours among these."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutant_trials import until_killed

from slotline.registry.capability import Set
from slotline.registry.contracts.model_family import ModelContext, ModelFacts, ModelFamilyCapabilities
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import ModelError
from slotline.testing import Level, Outcome, all_checks, check_plugin
from slotline.testing.environments.model_family import WITHOUT
from slotline.testing.facts import machine_of, plugin_of, suite_of
from slotline.testing.mutants.model_family import CORRECT, MUTANTS
from slotline.testing.reference import model_family
from slotline.testing.report import Report, Settings
from slotline.testing.subject import subject_of
from slotline.testing.summary import verdict

REFERENCE = f"{Path(model_family.__file__).parent / 'descriptor.py'}:descriptor"
OURS = ("decoder", "vision", "encoder", "seq2seq", "speech", "audio")


@pytest.mark.spread(4, slow=8)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mandatory_check_kills_the_mutant_at_its_level(mutant):
    records = until_killed(mutant, device="cpu")
    assert records[-1].bad, f"{mutant.name} survives up to {mutant.level}"
    assert records[-1].level == mutant.level, f"{records[-1].id} kills it already: {records[-1].reason}"


@pytest.mark.slow
@pytest.mark.parametrize("correct", CORRECT, ids=lambda correct: correct.descriptor.name)
def test_a_right_family_fails_nothing(correct):
    records = check_plugin(correct.descriptor, level=Level.STATEFUL, device="cpu")
    assert [f"{r.key}: {r.reason}" for r in records if r.bad] == []


@pytest.mark.slow
def test_an_engine_gives_the_text_of_the_reference_family():
    records = check_plugin(REFERENCE, only=lambda item: item.level is Level.ENGINE, device="cpu")
    assert [f"{r.key}: {r.reason}" for r in records if r.bad] == []
    assert sum(record.outcome is Outcome.PASSED for record in records) == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OURS)
def test_ours_passes_all(name):
    records = check_plugin(f"model_family:transformers_{name}", device="cpu")
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    assert sum(record.outcome is Outcome.PASSED for record in records) > 60


def test_ours_computes_chunks_and_calls_attention_as_it_declares():
    def chosen(item):
        return item.id in ("model_family.calls.layers", "model_family.steps.chunks", "model_family.reload.addresses")

    records = check_plugin("model_family:transformers_seq2seq", only=chosen, device="cpu")
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    assert sum(record.outcome is Outcome.PASSED for record in records) == 8


class Silent:
    """A family without examples."""

    def inspect(self, path: Path) -> ModelFacts:
        raise ModelError(f"{path} is no checkpoint", fix="name another folder")

    def load(self, context: ModelContext) -> None:
        raise NotImplementedError


def test_of_a_family_without_examples_the_verdict_says_that_the_contract_alone_was_checked():
    offer = ModelFamilyCapabilities(architectures=Set(("SilentModel",)))
    descriptor = Descriptor(kind=Kind.MODEL_FAMILY, name="silent", capabilities=offer, factory=Silent)
    subject = subject_of(descriptor, device="cpu")
    records = check_plugin(subject)
    assert [record.key for record in records if record.bad] == []
    report = Report(
        suite=suite_of(subject),
        plugin=plugin_of(subject),
        machine=machine_of(subject),
        settings=Settings(),
        planned=len(records),
        records=tuple(records),
    )
    text = verdict(report).text
    assert text == f"conformant up to L0; level reached: L0 contract; nothing above it could run: {WITHOUT}"


def test_there_are_checks_at_each_level_that_the_kind_has():
    levels = {item.level for item in all_checks(Kind.MODEL_FAMILY) if item.mandatory}
    assert levels == {Level.CONTRACT, Level.NUMERICS, Level.HOSTILE, Level.STATEFUL, Level.ENGINE}
