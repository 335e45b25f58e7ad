"""Capturing: what it leaves behind in the host process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from slotline.builder.graph_capture import _no_collection


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The collector of a test process as it was; what the suite has frozen is frozen again."""
    enabled = gc.isenabled()
    yield
    gc.enable() if enabled else gc.disable()
    gc.freeze()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_what_the_host_process_froze_stays_frozen_and_nothing_else(frozen: bool, enabled: bool, fails: bool) -> None:
    gc.unfreeze()
    gc.enable() if enabled else gc.disable()
    if frozen:
        gc.collect()
        gc.freeze()
    before = gc.get_freeze_count()
    try:
        with _no_collection():
            assert not gc.isenabled()
            with _no_collection():  # a drafter's captures, inside
                pass
            assert not gc.isenabled()
            assert gc.get_freeze_count() > 0
            if fails:
                raise ValueError
    except ValueError:
        pass
    assert gc.isenabled() is enabled
    after = gc.get_freeze_count()
    assert (after > 0) is frozen
    assert before - 100 < after <= before  # single objects may have gone since
