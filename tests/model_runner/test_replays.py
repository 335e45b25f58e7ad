"""What backends are told of launches: whether a replay will repeat them for other steps."""

from __future__ import annotations

import pytest
import torch

from slotline.kernels.graph_capture_state import as_if_run, is_replayed


def test_nothing_is_replayed_where_nothing_is_captured() -> None:
    assert not is_replayed()


def test_what_is_captured_is_replayed_unless_it_is_recorded_as_if_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_replayed()
    with as_if_run():
        assert not is_replayed()
    assert is_replayed()
    with pytest.raises(ValueError, match="x"), as_if_run():
        raise ValueError("x")
    assert is_replayed()
