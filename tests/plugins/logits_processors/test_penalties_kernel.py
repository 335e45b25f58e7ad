"""Penalties counted on the device against those counted afresh from the histories: on the card where there is one, else
in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from processor_cases import MAX_REQUESTS, VOCAB_SIZE, Asked, asked, batch_of, build, some_logits

pytest.importorskip("triton", reason="the kernels are Triton's")
from slotline.plugins.logits_processors.penalties import device_counts
from slotline.registry.contracts import LogitsBatch

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(103)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PENALTIES = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.sampled_from([0.7, -1.1]),
        "frequency_penalty": st.sampled_from([0.3, -0.4]),
        "repetition_penalty": st.sampled_from([1.3, 0.6]),
    },
)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_counts, "_LEAST_CAPACITY", 2)


class Both:
    """The processor as it runs on a CPU, and as it runs on a card."""

    def __init__(self) -> None:
        self.afresh, self.counted = build("penalties"), build("penalties")
        self.counted._counts = device_counts.DeviceCounts(MAX_REQUESTS, VOCAB_SIZE, DEVICE)

    def admit(self, row: int, one: Asked) -> None:
        for processor in (self.afresh, self.counted):
            processor.admit(row, dict(one.settings), one.prompt)

    def agree(self, batch: LogitsBatch, seed: int) -> None:
        logits = some_logits(len(batch.rows), seed)
        want = self.afresh.apply(logits.clone(), batch)
        found = self.counted.apply(logits.clone().to(DEVICE), batch)
        assert torch.equal(found.cpu(), want)


def longer(one: Asked, more: list[int], drafts: list[int]) -> Asked:
    return evolve(one, output=one.output + more, drafts=drafts)


@settings(max_examples=60, deadline=None)
@given(asked(PENALTIES), st.data())
def test_tokens_counted_as_they_come_give_the_bits_of_those_counted_afresh(requests: list[Asked], data: Any) -> None:
    both, rows = Both(), data.draw(st.permutations(range(MAX_REQUESTS)))[: len(requests)]
    for row, one in zip(rows, requests, strict=True):
        both.admit(row, one)
    ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3)
    for step in range(4):
        which = data.draw(st.permutations(range(len(requests))))[: data.draw(st.integers(1, len(requests)))]
        for i in which:
            requests[i] = longer(requests[i], data.draw(ids), data.draw(ids))
        batch = batch_of([requests[i] for i in which], [rows[i] for i in which])
        both.agree(batch, step)
        both.agree(batch, step)  # as after another processor's failure
        if data.draw(st.booleans()):  # the request leaves, and another takes its row
            i = which[0]
            prompt = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12))
            requests[i] = Asked({"frequency_penalty": 0.5}, prompt, [], [])
            both.admit(rows[i], requests[i])


def test_every_draft_position_of_a_row_has_a_row_of_logits_of_its_own() -> None:
    both = Both()
    one = Asked({"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.2}, [1, 2, 1], [3], [])
    both.admit(2, one)
    drafts = [3, 7, 7, 1]
    both.agree(batch_of([longer(one, [], drafts[:count]) for count in range(5)], [2] * 5), 0)


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("few", [0, 1024])
def test_lists_grow_with_the_distinct_tokens_of_the_longest(monkeypatch: pytest.MonkeyPatch, few: int) -> None:
    monkeypatch.setattr(device_counts, "_FEW", few)
    both, one = Both(), Asked({"repetition_penalty": 1.5}, [4, 5], [], [])
    both.admit(0, one)
    sizes = []
    for more in ([], [6], [6, 6, 4], [6] * 9, [7, 8, 9], [1, 2, 3, 10, 11, 0]):
        one = longer(one, more, [])
        both.agree(batch_of([one], [0]), len(more))
        sizes.append(both.counted._counts._entries.shape[1])
    assert sizes == [2, 4, 4, 4, 8, 16]


@pytest.mark.parametrize("count", [3, 9])
def test_rows_with_many_new_tokens_and_few_are_counted_alike(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(device_counts, "_MOST_ADDED", 4)
    both, one = Both(), Asked({"frequency_penalty": 0.5}, [1, 2], [3], [])
    others = [Asked({"presence_penalty": 0.5}, [row], [], []) for row in range(2)]
    for row, each in enumerate([one, *others]):
        both.admit(row, each)
    for step in range(3):
        one = longer(one, [token % VOCAB_SIZE for token in range(step, step + count)], [])
        others = [longer(each, [5], []) for each in others]
        both.agree(batch_of([*others, one], [1, 2, 0]), step)


def test_steps_of_the_same_rows_and_others_between_them_are_counted_alike() -> None:
    both, rows = Both(), [2, 0, 3]
    asked = [Asked({"frequency_penalty": 0.5, "repetition_penalty": 1.1 + row}, [row, 4], [], []) for row in rows]
    for row, one in zip(rows, asked, strict=True):
        both.admit(row, one)
    again = []
    for step in range(14):
        more, drafts = [step % 7] * (2 if step in (4, 9) else 1), [5] * (step == 11)
        asked = [longer(one, more, drafts) for one in asked]
        if step == 7:
            asked[1] = Asked({"frequency_penalty": -1.5}, list(range(len(asked[1].prompt + asked[1].output))), [], [])
            both.admit(0, asked[1])
        before = both.counted._counts._last
        both.agree(batch_of(asked, rows), step)
        again.append(before is not None and before is both.counted._counts._last)
        if step == 2:
            both.agree(batch_of(asked, rows), step)  # as after another processor's failure
    assert [step for step, same in enumerate(again) if same] == [2, 6, 13]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_nothing_waits_for_the_device() -> None:
    both = Both()
    one = Asked({"frequency_penalty": 0.5}, [1, 2], [3], [])
    both.admit(0, one)
    logits = some_logits(1).to(DEVICE)
    both.counted.apply(logits, batch_of([one], [0]))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both.counted.apply(logits, batch_of([longer(one, [4], [])], [0]))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tokens_outside_the_vocabulary_are_left_alone() -> None:
    both = Both()
    one = Asked({"repetition_penalty": 2.0}, [1, VOCAB_SIZE + 3], [], [])
    both.admit(0, one)
    both.counted.apply(some_logits(1).to(DEVICE), batch_of([one], [0]))
    batch = batch_of([longer(one, [VOCAB_SIZE + 3, -1], [])], [0])  # one that is in the list and one that is not
    logits = some_logits(1)
    found = both.counted.apply(logits.clone().to(DEVICE), batch).cpu()
    assert (found != logits).nonzero()[:, 1].tolist() == [1]
    assert np.isfinite(found.numpy()).all()
