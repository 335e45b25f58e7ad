"""Upper bounds made exact: by definition, and in Triton as in torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slotline.core.model_runner.device_inputs import UploadedInputs
from slotline.proposers.speculation.rejected_token_correction import Bounds, subtract_rejected

kernels = pytest.importorskip("slotline.backends.cuda.triton_bounds", reason="the kernel is Triton's")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_REQUESTS, SIZES, COLUMNS = 9, (16, 32), 8


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("groups", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_what_fell_is_taken_off_lengths_positions_and_slots(groups: int, states: bool, seed: int) -> None:
    """Requests of several tokens each, one padded, padded tokens behind; a group of an encoder stays as it is."""
    random = np.random.default_rng(seed)
    rows = random.permutation(MAX_REQUESTS)[:5]
    counts, ends = random.integers(1, 60, 5), random.integers(70, 100, 5)
    fallen = np.append(random.integers(0, 4, MAX_REQUESTS), 0)
    tokens, padded = int(counts.sum()), int(counts.sum()) + 3
    owner = np.append(np.repeat(np.arange(5), counts), [6, 6, 6])  # the sixth request is padded, as its tokens are
    which = np.append(rows, [MAX_REQUESTS, MAX_REQUESTS])
    positions = np.concatenate(
        [*(np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)), [0] * 3]
    )
    tables = [random.integers(1, 99, (6, COLUMNS)).astype(np.int32) for _ in SIZES[:groups]]
    slots = [np.where(np.arange(padded) < tokens, random.integers(0, 9, padded), -1) for _ in tables]
    for each in slots:
        each[0] = -1  # a token that is not stored
    exact = positions - fallen[which[owner]]
    request = np.minimum(owner, 5)
    found = []
    for triton in (False, True):
        made = [torch.from_numpy(array.copy()).to(DEVICE) for array in (positions, *slots)]
        seq_lens = torch.from_numpy(np.append(ends, 0).astype(np.int32)).to(DEVICE)
        accepted = torch.full((6,), 5, dtype=torch.int32, device=DEVICE)
        on_device = [torch.from_numpy(table).to(DEVICE) for table in tables]
        by_row, two = torch.from_numpy(fallen).to(DEVICE), [torch.from_numpy(t).to(DEVICE) for t in (which, owner)]
        if triton:
            each = list(zip(on_device, made[1:], SIZES, strict=False))
            kernels.take_off_triton(by_row, *two, made[0], seq_lens, accepted if states else None, each)
        else:
            encoder = torch.zeros(padded, dtype=torch.int64, device=DEVICE)
            sent = UploadedInputs(made[0], [*made[1:], encoder], two[0], seq_lens, two[0], two[0])
            kinds: Any = [SimpleNamespace(fixed_len=None)] * groups + [SimpleNamespace(fixed_len=7)]
            counted = accepted if states else None
            subtract_rejected(by_row, Bounds(*two), sent, [*on_device, two[0]], counted, kinds, [*SIZES[:groups], 16])
            assert not encoder.any()
        found.append([t.tolist() for t in (*made, seq_lens, accepted)])
    assert found[0] == found[1]
    assert found[0][0] == exact.tolist()
    for mine, table, before, size in zip(found[0][1:], tables, slots, SIZES, strict=False):
        assert (
            mine
            == np.where(before < 0, -1, table[request, exact // size].astype(np.int64) * size + exact % size).tolist()
        )
    assert found[0][-2] == (np.append(ends, 0) - fallen[which[:-1]]).tolist()
    assert found[0][-1] == (5 - states * fallen[which[:-1]]).tolist()
