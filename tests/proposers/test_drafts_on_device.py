"""What overlapping steps do with drafts on the device: torch's way by its definition, and Triton's like torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.proposers.speculation.device_verification import AcceptedDrafts, find_accepted, keep_drafts
from slotline.proposers.speculation.verification import standing

pytest.importorskip("triton", reason="the kernels are Triton's")
from slotline.backends.cuda.triton_drafts import find_stood_triton, keep_drafts_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, MAX_REQUESTS, MAX_DRAFTS = 7, 9, 5


def table() -> PlaceholderTokens:
    return PlaceholderTokens(VOCAB, MAX_REQUESTS, DEVICE, MAX_DRAFTS)


def on_the_device(numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(DEVICE)


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows, drafts of each, and the sampled token and the draft at each place; some tokens mark an error."""
    rows = np.array(draw(st.lists(st.integers(0, MAX_REQUESTS - 1), min_size=1, max_size=6, unique=True)))
    verified = np.array([draw(st.integers(0, MAX_DRAFTS)) for _ in rows])
    count = int((verified + 1).sum())
    sampled = np.array(draw(st.lists(st.integers(-2, 2), min_size=count, max_size=count)))
    drafts = np.array(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    drafts[np.cumsum(verified + 1) - 1] = -1
    return rows, verified, sampled, drafts


@settings(max_examples=60, deadline=None)
@given(steps(), st.booleans())
def test_the_drafts_that_stand_are_those_that_the_host_will_find(
    step: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], drafted: bool
) -> None:
    rows, verified, sampled, drafts = step
    if not drafted:
        sampled = sampled[np.cumsum(verified + 1) - 1 - verified]
        verified, drafts = np.zeros_like(verified), np.full(len(rows), -1)
    first = np.cumsum(verified + 1) - verified - 1
    positions = np.arange(len(sampled)) - np.repeat(first, verified + 1)
    stood = np.add.reduceat(standing(sampled, drafts, positions).astype(np.int64), first) - 1
    known, stand_ins = 10 + rows, table().stand_ins(rows)
    packed = on_the_device(np.stack([first, verified, known, stand_ins, rows, rows]).astype(np.int64))
    # What went in: a known token or the row's own stand-in in front, stand-ins for its drafts behind; in any order.
    ids = np.where(positions > 0, np.repeat(stand_ins, verified + 1) + positions, np.repeat(rows % VOCAB, verified + 1))
    ids = np.where((positions == 0) & (np.repeat(rows, verified + 1) % 2 > 0), np.repeat(stand_ins, verified + 1), ids)
    order = np.random.default_rng(len(ids)).permutation(len(ids))
    input_ids, indices = np.empty_like(ids), order
    input_ids[order] = ids
    went_in = (on_the_device(input_ids), on_the_device(indices))
    found = []
    for triton in (False, True):
        own = table()
        own.tokens[VOCAB:] = torch.arange(len(own.tokens) - VOCAB, device=DEVICE) % VOCAB
        before = own.resolve(on_the_device(ids)).cpu().numpy()
        given_drafts = on_the_device(drafts) if drafted else None
        if triton:
            result = AcceptedDrafts(
                *find_stood_triton(on_the_device(sampled), given_drafts, packed, on_the_device(rows), *went_in, own)
            )
        else:
            places = on_the_device(np.repeat(np.arange(len(rows)), verified + 1))
            result = find_accepted(
                on_the_device(sampled), given_drafts, packed, on_the_device(rows), places, *went_in, own
            )
        found.append([t.cpu().tolist() for t in (*result, own.tokens, own.rejected)])
    last, newest, positions_found, fallen, previous, *_ = found[0]
    assert last == (first + stood).tolist()
    assert newest == np.maximum(sampled[first + stood], 0).tolist()
    assert positions_found == (known + stood).tolist()
    assert fallen == (verified - stood).tolist()
    assert previous == before[first + stood].tolist()
    assert found[0] == found[1]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, MAX_DRAFTS), st.sampled_from([torch.int64, torch.int32]), st.data())
def test_what_is_no_token_becomes_the_newest_one(columns: int, dtype: torch.dtype, data: st.DataObject) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, MAX_REQUESTS - 1), min_size=1, max_size=6, unique=True)))
    said = [data.draw(st.lists(st.integers(-3, VOCAB + 2), min_size=columns, max_size=columns)) for _ in rows]
    wider = torch.tensor(said, dtype=dtype, device=DEVICE).repeat(1, 2)
    newest = torch.arange(len(rows), device=DEVICE)
    own, other = table(), table()
    stand_ins = on_the_device(own.stand_ins(rows))
    found = keep_drafts(wider[:, :columns], newest, stand_ins, own, VOCAB)
    assert found[:, :columns].tolist() == said
    filled = [[t if 0 <= t < VOCAB else i for t in line] for i, line in enumerate(said)]
    assert found[:, columns:].tolist() == [line + [i] * (MAX_DRAFTS - columns) for i, line in enumerate(filled)]
    for row, line in zip(rows.tolist(), found[:, columns:].tolist(), strict=True):
        ids = on_the_device(own.stand_ins(np.array([row])) + 1 + np.arange(MAX_DRAFTS))
        assert own.resolve(ids).tolist() == line
    again = keep_drafts_triton(wider[:, :columns], newest, stand_ins, other, VOCAB)
    assert torch.equal(again, found)
    assert torch.equal(other.tokens, own.tokens)
