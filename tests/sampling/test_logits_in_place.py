"""Logits that only a processor with `keeps_finite` works on are neither copied nor searched for spoiled rows."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch

from slotline.core.batch.request_table import RequestTable
from slotline.core.device import TorchOps
from slotline.core.sampling.logits_processors import FAILED, NONE_LEFT, ProcessorPipeline, ProcessorSlot
from slotline.registry.contracts import LogitsBatch, LogitsProcessor, LogitsProcessorCapabilities
from slotline.registry.contracts import LogitsProcessorContext as Context
from slotline.testing.reference.logits_processor import RecentPenalty

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = np.arange(3)


class Lowers(RecentPenalty):
    """Lowers token 2, and refuses row 1 if `broken`."""

    broken = False

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        if self.broken and 1 in batch.rows:
            raise ValueError("row 1")
        logits[:, 2] -= 1
        return logits


def slot_of(*, keeps_finite: bool = True, rows: tuple[int, ...] = (0, 1, 2)) -> ProcessorSlot:
    context = Context(
        contract=1, vocab_size=8, eos_token_ids=(), max_requests=3, max_model_len=16, device="cpu", options=None
    )
    capabilities = LogitsProcessorCapabilities(keeps_finite=keeps_finite)
    lowers = cast("LogitsProcessor", Lowers(context))
    slot = ProcessorSlot(name="lowers", processor=lowers, capabilities=capabilities, active=np.zeros(3, dtype=bool))
    for row in rows:
        slot.set_active(row, True)
    return slot


def pipeline_of(*slots: ProcessorSlot) -> ProcessorPipeline:
    return ProcessorPipeline(slots, RequestTable(3, 16), frozenset())


def lowered(logits: torch.Tensor, rows: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
    want = logits.clone()
    want[list(rows), 2] -= 1
    return want


@pytest.mark.parametrize("rows", [(0, 1, 2), (1,)])
def test_logits_that_nobody_reads_afterwards_are_processed_where_they_are(rows: tuple[int, ...]) -> None:
    logits = torch.randn(3, 8)
    want = lowered(logits, rows)
    found = pipeline_of(slot_of(rows=rows)).apply(logits, ROWS, all_greedy=False, keep_raw=False)
    assert found.logits is logits
    assert torch.equal(logits, want)
    tokens = torch.arange(3)
    assert found.mark(tokens, TorchOps()) is tokens


def test_they_are_copied_if_they_are_read_or_something_else_works_on_them() -> None:
    for slots, keep_raw, marked in (
        ([slot_of()], True, False),
        ([slot_of(keeps_finite=False)], False, True),
        ([slot_of(rows=(0,)), slot_of(keeps_finite=False, rows=(2,))], False, True),
    ):
        logits = torch.randn(3, 8)
        logits[2] = -torch.inf
        before = logits.clone()
        found = pipeline_of(*slots).apply(logits, ROWS, all_greedy=False, keep_raw=keep_raw)
        assert torch.equal(logits, before)
        assert torch.equal(found.logits[0], lowered(before)[0])
        assert found.mark(torch.arange(3), TorchOps()).tolist() == [0, 1, NONE_LEFT if marked else 2]


def test_a_row_that_the_processor_fails_on_is_marked_and_the_others_are_processed_once() -> None:
    slot, logits = slot_of(), torch.randn(3, 8)
    assert isinstance(slot.processor, Lowers)
    slot.processor.broken, want = True, lowered(logits)
    found = pipeline_of(slot).apply(logits, ROWS, all_greedy=False, keep_raw=False)
    assert list(found.errors) == [1]
    assert torch.equal(found.logits[[0, 2]], want[[0, 2]])
    assert found.mark(torch.arange(3), TorchOps()).tolist() == [0, FAILED, 2]
