"""Garbage is collected rarely while a process starts."""

from __future__ import annotations

import gc

import pytest

from slotline.registry.collection import frozen_objects, rare_collection


@pytest.fixture(autouse=True)
def own_threshold():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_collection_is_rare_inside_and_as_before_afterwards() -> None:
    gc.set_threshold(700, 10, 10)
    with rare_collection():
        with rare_collection():
            assert gc.get_threshold()[0] > 10_000
        assert gc.get_threshold()[0] > 10_000
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("threshold", [0, 1_000_000])
def test_a_process_that_collects_more_rarely_keeps_its_threshold(threshold: int) -> None:
    gc.set_threshold(threshold, 5, 5)
    with rare_collection():
        assert gc.get_threshold() == (threshold, 5, 5)
    assert gc.get_threshold() == (threshold, 5, 5)


def test_objects_are_looked_at_once_and_count_again_afterwards() -> None:
    gc.unfreeze()  # what another test's libraries froze
    with frozen_objects():
        frozen = gc.get_freeze_count()
        assert frozen > 10_000
        with frozen_objects():
            assert gc.get_freeze_count() <= frozen
            assert len(gc.get_objects()) < 1_000
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_what_a_process_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        with frozen_objects():
            assert gc.get_freeze_count() > 10_000
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
