"""The data of a step: frozen objects, each made in one place, and a named field for a batch that did not change."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from attrs.exceptions import FrozenInstanceError
from core_cases import Bench

from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.core.batch.input_batch_cpu import InputBatchCPU
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.sampling_metadata import SamplingMetadata
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.batch.step_output import ForwardOutput, PendingSample, StepOutput
from slotline.core.engine.engine import PendingStep
from slotline.core.engine.output_processor import StepResult
from slotline.plugins.pooling.head import PendingPooling
from slotline.proposers.speculation.verified_drafts import Proposal, VerifiedDrafts

STEP_DATA = [
    SchedulerOutput, InputBatchCPU, SamplingMetadata, ModelInputs, ForwardOutput, PendingSample, PendingPooling,
    PendingStep, VerifiedDrafts, Proposal, StepOutput, StepResult,
]  # fmt: skip


@pytest.mark.parametrize("kind", STEP_DATA, ids=lambda kind: kind.__name__)
def test_nothing_is_assigned_to_the_data_of_a_step_after_it_is_made(kind: type[attrs.AttrsInstance]) -> None:
    made = kind.__new__(kind)
    assert attrs.fields(kind)
    for one in attrs.fields(kind):
        with pytest.raises(FrozenInstanceError):
            setattr(made, one.name, None)


def test_padding_makes_another_batch() -> None:
    rows, two = np.array([3, 1]), np.array([1, 1])
    batch = InputBatchCPU(
        rows=rows, table_rows=rows, counts=two, starts=np.array([0, 1, 2]), seq_lens=np.array([5, 4]),
        fixed_lens=two, input_ids=np.array([8, 9]), positions=np.array([4, 3]), slots=[np.array([20, 7])],
        logits_indices=np.array([0, 1]), logits_rows=rows, num_decodes=2,
    )  # fmt: skip
    assert batch.pad(GraphShape(2, 1), null_row=6) is batch
    padded = batch.pad(GraphShape(4, 1), null_row=6)
    assert batch.input_ids.tolist() == [8, 9]
    assert (batch.num_tokens, batch.batch_tokens, batch.num_decodes) == (2, 2, 2)
    assert padded.input_ids.tolist() == [8, 9, 0, 0]
    assert padded.starts32.tolist() == [0, 1, 2, 3, 4]
    assert padded.seq_lens32.tolist() == [5, 4, 0, 0]
    assert padded.table_rows.tolist() == [3, 1, 6, 6]
    assert (padded.num_tokens, padded.batch_tokens, padded.num_decodes) == (2, 4, 4)
    assert (padded.max_query_len, padded.max_seq_len) == (1, 5)


def test_a_batch_that_only_goes_a_token_further_says_so() -> None:
    bench = Bench()
    bench.add("a", 3, max_tokens=9)
    bench.add("b", 5, max_tokens=4)
    steps = [bench.step() for _ in range(4)]
    assert [step.same_batch for step in steps] == [False, False, True, True]  # prompts, then one token each
    assert bench.step().rows.tolist() == [0]  # b has ended
    assert bench.step().same_batch
    bench.add("c", 2, max_tokens=9)
    joined, after, again = bench.step(), bench.step(), bench.step()
    assert [joined.same_batch, after.same_batch, again.same_batch] == [False, False, True]


def test_a_step_without_some_of_its_rows_is_another_batch() -> None:
    bench = Bench()
    bench.add("a", 3, max_tokens=9)
    bench.add("b", 5, max_tokens=9)
    for _ in range(3):
        step = bench.step()
    assert step.same_batch
    assert step.without([]).same_batch
    assert not step.without([0]).same_batch
    assert attrs.evolve(step, rows=step.rows.copy()).same_batch  # a copy is no other batch
