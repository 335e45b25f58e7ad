"""The checks of devices: no broken one survives them, no right one fails, ours and a third party's among these."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cli_cases import pretend_project_installed
from mutant_trials import until_killed
from repository import TESTS

from slotline.registry.descriptor import DeviceInfo, Kind
from slotline.registry.errors import PluginError
from slotline.testing import Level, Outcome, Record, all_checks, check_plugin
from slotline.testing.check import Run
from slotline.testing.environments import engine
from slotline.testing.environments.device import LAYOUTS, DeviceUnderTest, poison
from slotline.testing.mutants.device import CORRECT, MUTANTS
from slotline.testing.oracles import device as oracle
from slotline.testing.reference.device import descriptor
from slotline.testing.subject import subject_of

ACME = TESTS / "third_party" / "acme-device"


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the third party's device, installed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme_device"]:
            monkeypatch.delitem(sys.modules, name)
        pretend_project_installed(monkeypatch, tmp_path_factory.mktemp("site"), ACME)
        yield "device:acme"


def bad(records: list[Record]) -> list[str]:
    return [f"{record.key}: {record.reason}" for record in records if record.bad]


@pytest.mark.spread(55, slow=18)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mandatory_check_kills_the_mutant_at_its_level(mutant: Any) -> None:
    records = until_killed(mutant)
    assert records[-1].bad, f"{mutant.name} survives up to {mutant.level}"
    assert records[-1].level == mutant.level, f"{records[-1].id} kills it already: {records[-1].reason}"


@pytest.mark.parametrize("correct", CORRECT, ids=lambda correct: correct.descriptor.name)
def test_a_right_device_passes_and_skips_only_what_it_does_not_declare(correct: Any) -> None:
    records = check_plugin(correct.descriptor, level=Level.GRAPHS)
    assert bad(records) == []
    skipped = {
        record.reason for record in records if record.outcome is Outcome.SKIPPED and record.level > Level.CONTRACT
    }
    reasons = ("not declared", "leaves repeated steps to the host", "no sampler for steps", "needs 24 GiB")
    assert all(any(reason in text for reason in reasons) for text in skipped), skipped


def test_the_cpu_passes_all() -> None:
    records = check_plugin("device:cpu", level=Level.STATEFUL)
    assert bad(records) == []
    assert sum(record.outcome is Outcome.PASSED for record in records) > 150


def test_a_third_partys_device_passes_all_with_graphs(acme: str) -> None:
    records = check_plugin(acme, level=Level.GRAPHS)
    assert bad(records) == []
    assert sum(record.level is Level.GRAPHS and record.outcome is Outcome.PASSED for record in records) > 4


def test_a_third_partys_device_gives_the_texts_of_the_cpu(acme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "NEW_TOKENS", 5)
    monkeypatch.setattr(engine, "PROMPTS", engine.PROMPTS[:2])
    (record,) = check_plugin(acme, only="device.engine.text[steps=chunked]")
    assert (record.outcome, record.reason) == (Outcome.PASSED, "")


def test_a_device_is_tested_on_itself() -> None:
    assert subject_of(descriptor).device.type == "host_torch"
    assert subject_of(descriptor, device="host_torch").device.total_memory > 0
    with pytest.raises(PluginError, match="device:host_torch is the device that is tested"):
        subject_of(descriptor, device="cpu")
    with pytest.raises(PluginError, match="fix: leave the device out, or ask for 'host_torch'"):
        subject_of(descriptor, device=DeviceInfo(type="cuda"))


@pytest.mark.parametrize("layout", ["plain", *LAYOUTS])
@pytest.mark.parametrize("shape", [(3, 5), (4,), (0, 7), (2, 3, 4), (1, 1)])
def test_a_layout_holds_the_array_and_notices_a_write_beside_it(layout: str, shape: tuple[int, ...]) -> None:
    import numpy as np

    under_test = DeviceUnderTest(Run(subject_of(descriptor), {}, 0))
    for dtype in (np.float32, np.int64, np.bool_):
        array = np.ones(shape, dtype)
        laid = under_test.lay(array, layout)
        assert np.array_equal(laid.tensor.numpy(), array)
        laid.tensor.zero_()
        assert not laid.touched_outside()
        beside = laid.whole.clone()
        beside.as_strided(laid.tensor.shape, laid.tensor.stride(), laid.tensor.storage_offset()).fill_(
            poison(array.dtype)
        )
        assert len(beside) >= array.size + 16
        laid.whole[-1] = 0
        assert laid.touched_outside()
    strides = under_test.lay(np.zeros((3, 5)), layout).tensor.stride()
    assert strides == {"padded": (10, 1), "spread": (13, 2), "turned": (1, 6)}.get(layout, (5, 1))


def test_the_oracles_numbers_and_draws_are_those_of_the_core() -> None:
    import numpy as np

    from slotline.core.batch.sampling_metadata import uniforms

    seeds, positions = np.array([0, 7, 2**64 - 1], np.uint64), np.array([0, 1, 4095])
    own = [oracle.uniform(int(seed), int(place)) for seed, place in zip(seeds, positions, strict=True)]
    assert own == uniforms(seeds, positions).tolist()
    final = oracle.kept(np.array([0, 3, 1, 2], np.float32), 1.0, -np.inf, 2, 1.0)
    assert np.isfinite(final).tolist() == [False, True, False, True]
    assert oracle.drawn(final, 0.0, 0.0) == {1}
    assert oracle.drawn(final, 0.999, 0.0) == {3}


def test_there_are_checks_at_every_level() -> None:
    assert {item.level for item in all_checks(Kind.DEVICE) if item.mandatory} == set(Level)
