"""The checks of step extensions: no broken one survives them, no right one fails, a third party's among these."""

from __future__ import annotations

from typing import Any

import pytest
from cli_cases import pretend_project_installed
from mutant_trials import until_killed
from repository import SUPPORT, TESTS

from slotline.registry.contracts.extension import CARRIED, METHODS
from slotline.registry.descriptor import Kind
from slotline.registry.errors import PluginError
from slotline.testing import Level, Outcome, Record, all_checks, check_plugin
from slotline.testing.mutants.extension import CORRECT, MUTANTS
from slotline.testing.reference.extension import Everywhere

ACME = TESTS / "third_party" / "acme-slotline"


def bad(records: list[Record]) -> list[str]:
    return [f"{record.key}: {record.reason}" for record in records if record.bad]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mandatory_check_kills_the_mutant_at_its_level(mutant: Any) -> None:
    records = until_killed(mutant)
    assert records[-1].bad, f"{mutant.name} survives up to {mutant.level}"
    assert records[-1].level == mutant.level, f"{records[-1].id} kills it already: {records[-1].reason}"


@pytest.mark.parametrize("correct", CORRECT, ids=lambda correct: correct.descriptor.name)
def test_a_right_extension_passes_and_skips_only_what_it_lacks(correct: Any) -> None:
    records = check_plugin(correct.descriptor)
    assert bad(records) == []
    skipped = {r.reason for r in records if r.outcome is Outcome.SKIPPED and Level.CONTRACT < r.level < Level.ENGINE}
    assert all(reason.startswith("it has no ") for reason in skipped), skipped


def test_one_of_the_right_ones_has_every_method() -> None:
    assert all(hasattr(Everywhere, name) for name in METHODS)


def test_a_third_partys_extension_passes_all(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_project_installed(monkeypatch, tmp_path_factory.mktemp("site"), ACME)
    records = check_plugin("extension:acme_rate")
    assert bad(records) == []
    (text,) = [record for record in records if record.level is Level.ENGINE]
    assert (text.outcome, text.reason) == (Outcome.PASSED, "")


@pytest.mark.parametrize("name", ["wrong_limits", "wrong_logits", "wrong_inputs", "kwargs"])
def test_extensions_that_fail_in_an_engine_fail_before(name: str) -> None:
    assert bad(check_plugin(f"{SUPPORT / 'extension_plugins.py'}:{name}", level=Level.NUMERICS))


@pytest.mark.parametrize("name", CARRIED)
def test_an_extension_that_carries_a_feature_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(PluginError, match=f"extension:{name} carries a feature of the plan") as raised:
        check_plugin(f"extension:{name}", level=Level.CONTRACT)
    assert raised.value.fix


@pytest.mark.parametrize(("name", "what"), [("kv_events", "prefix_events"), ("kv_compression", "frees_tokens")])
def test_an_extension_that_uses_the_pool_is_refused_before_it_is_built(name, what):
    if name == "kv_events":
        pytest.importorskip("zmq")
    with pytest.raises(PluginError, match=f"extension:{name} declares {what}, and needs an engine's pool") as raised:
        check_plugin(f"extension:{name}", level=Level.CONTRACT)
    assert raised.value.fix == "test it in an engine"


def test_there_are_checks_at_each_level_that_the_kind_has() -> None:
    levels = {item.level for item in all_checks(Kind.EXTENSION) if item.mandatory}
    assert levels == set(Level) - {Level.GRAPHS}
