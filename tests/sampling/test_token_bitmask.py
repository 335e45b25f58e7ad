"""Bitmasks: what is banned on the host is banned in the logits, by the way of either device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import device_for
from hypothesis import given, settings
from hypothesis import strategies as st

from slotline.core.device.torch_ops import unpacked
from slotline.plugins.structured_output.bitmask import TokenBitmask

pytest.importorskip("triton", reason="the kernel is Triton's")
from slotline.backends.cuda.triton_logits_ops import ban_by_bitmask

pytestmark = [pytest.mark.behaviour(102)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def filled(allowed: np.ndarray, places: list[int], vocab_size: int, device: str = "cpu") -> TokenBitmask:
    """A bitmask of these rows."""
    bitmask = TokenBitmask(len(places), vocab_size, device_for(device))
    bitmask.places[:] = places
    padded = np.zeros((len(places), bitmask.words.shape[1] * 32), bool)
    padded[:, :vocab_size] = allowed
    bitmask.words[:] = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    return bitmask


@settings(max_examples=60, deadline=None)
@given(vocab_size=st.integers(1, 100), num_rows=st.integers(1, 5), seed=st.integers(0, 999), share=st.floats(0.1, 1))
def test_what_is_not_allowed_is_minus_infinity_and_nothing_else_changes(
    vocab_size: int, num_rows: int, seed: int, share: float
) -> None:
    rng = np.random.default_rng(seed)
    places = np.flatnonzero(rng.random(num_rows) < share).tolist() or [0]
    allowed = rng.random((len(places), vocab_size)) < 0.5
    logits = torch.from_numpy(rng.standard_normal((num_rows, vocab_size)).astype(np.float32))
    before, want = logits.clone(), logits.clone()
    want[places] = want[places].masked_fill(torch.from_numpy(~allowed), -torch.inf)
    bitmask = filled(allowed, places, vocab_size)
    assert torch.equal(bitmask.apply(logits), want)
    assert torch.equal(logits, before)
    words, found_places = bitmask._on_device(torch.device(DEVICE))  # as it is done on a GPU
    assert found_places.tolist() == places
    assert unpacked(words, vocab_size).tolist() == (~allowed).tolist()
    ban_by_bitmask(there := logits.clone().to(DEVICE), words, found_places)
    assert torch.equal(there.cpu(), want)
    if DEVICE == "cuda":
        bitmask, kept = filled(allowed, places, vocab_size, DEVICE), logits.to(DEVICE)
        assert torch.equal(bitmask.apply(kept).cpu(), want)
        assert torch.equal(kept.cpu(), before)
        bitmask.apply(kept, in_place=True)
        assert torch.equal(kept.cpu(), want)


def test_tokens_are_banned_in_the_rows_asked_for() -> None:
    bitmask = filled(np.ones((3, 70), bool), [0, 1, 2], 70)
    bitmask.ban(np.array([True, False, True]), (0, 31, 32, 69))
    kept = bitmask.apply(torch.zeros(3, 70)).isfinite()
    assert kept[1].all()
    assert [(~kept[row]).nonzero().flatten().tolist() for row in (0, 2)] == [[0, 31, 32, 69]] * 2


def test_a_bitmask_of_ones_allows_everything() -> None:
    logits = torch.randn(2, 33)
    bitmask = TokenBitmask(2, 33, device_for("cpu"))
    bitmask.allow_all(2)
    bitmask.places[:] = [0, 1]
    assert torch.equal(bitmask.apply(logits), logits)


def test_rows_that_share_a_mask_are_banned_alike() -> None:
    bitmask = TokenBitmask(3, 33, device_for("cpu"), num_masks=2)
    bitmask.allow_all(2)
    bitmask.places[:] = [2, 0, 1]
    bitmask.mask_of[:] = [1, 0, 1]
    bitmask.ban(np.array([True, False, True]), (32,))
    assert bitmask.apply(torch.zeros(4, 33)).isneginf().nonzero().tolist() == [[1, 32], [2, 32]]


def test_what_is_banned_is_minus_infinity_whatever_it_was_and_what_is_allowed_stays() -> None:
    strange = torch.tensor([[torch.nan, torch.inf, -torch.inf, -0.0] * 2])
    allowed = np.array([[True] * 4 + [False] * 4])
    found = filled(allowed, [0], 8).apply(strange)
    assert torch.equal(found[:, :4].view(torch.int32), strange[:, :4].view(torch.int32))
    assert (found[:, 4:] == -torch.inf).all()


@pytest.mark.parametrize("places", [[0, 1, 2, 3, 4], [0, 2, 3]])
@pytest.mark.parametrize("in_place", [True, False])
def test_rows_are_banned_a_few_at_a_time_where_they_are_long(places: list[int], in_place: bool) -> None:
    vocab_size, rng = 30_000, np.random.default_rng(0)
    allowed = rng.random((len(places), vocab_size)) < 0.5
    logits = torch.from_numpy(rng.standard_normal((5, vocab_size)).astype(np.float32))
    logits[0, :2] = torch.tensor([torch.nan, torch.inf])
    before, want = logits.clone(), logits.clone()
    want[places] = want[places].masked_fill(torch.from_numpy(~allowed), -torch.inf)
    found = filled(allowed, places, vocab_size).apply(logits, in_place=in_place)
    assert np.array_equal(found.numpy(), want.numpy(), equal_nan=True)
    assert (found.data_ptr() == logits.data_ptr()) == in_place
    assert in_place or np.array_equal(logits.numpy(), before.numpy(), equal_nan=True)
