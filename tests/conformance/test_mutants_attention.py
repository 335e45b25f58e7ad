"""Every broken attention backend is caught at the level it states, and right ones that compute differently pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mutant_trials import until_killed
from small_sizes import in_small

from slotline.registry.descriptor import Kind
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant, all_correct, all_mutants
from slotline.testing.runner import Outcome, check_plugin

MUTANTS = all_mutants(Kind.ATTENTION)
CORRECT = all_correct(Kind.ATTENTION)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """These backends share no work between threads, and starting threads takes longer than their arithmetic."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    yield
    monkeypatch.undo()
    torch.set_num_threads(before)


@pytest.mark.spread(215, slow=70)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mandatory_check_of_its_level_kills_the_mutant(mutant: Mutant) -> None:
    records = until_killed(mutant, lowest=mutant.level, device="cpu")
    killers = [record for record in records if record.bad]
    assert killers, f"{mutant.name} passes all {len(records)} runs of {mutant.level}"
    assert killers[0].reason


@pytest.mark.spread(0, slow=1)
@pytest.mark.parametrize("right", CORRECT, ids=lambda right: right.descriptor.name)
def test_a_right_implementation_passes_everything(right: Correct) -> None:
    records = check_plugin(right.descriptor, level=Level.STATEFUL, device="cpu", only=in_small)
    failed = [(record.key, record.reason) for record in records if record.outcome is Outcome.FAILED]
    assert not failed
    passed = {record.level for record in records if record.outcome is Outcome.PASSED}
    assert passed == {Level.CONTRACT, Level.NUMERICS, Level.HOSTILE, Level.STATEFUL}


@pytest.mark.exhaustive
@pytest.mark.parametrize("right", CORRECT, ids=lambda right: right.descriptor.name)
def test_a_right_implementation_passes_at_large_sizes(right: Correct) -> None:
    records = check_plugin(right.descriptor, level=Level.STATEFUL, device="cpu", only=lambda item: not in_small(item))
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []


def test_mutants_are_many_named_once_and_of_every_level() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) >= 45
    assert len(set(names)) == len(names)
    assert {mutant.level for mutant in MUTANTS} >= set(Level) - {Level.GRAPHS, Level.ENGINE}
    assert len(CORRECT) >= 3
