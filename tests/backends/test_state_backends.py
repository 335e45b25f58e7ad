"""The built-in state backend passes the conformance suite, also where the host does not know the slots."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from slotline.backends.torch_state import descriptor
from slotline.backends.torch_state.backend import TorchState
from slotline.backends.torch_state.batches import CHUNK, plan_of
from slotline.registry.contracts.state import STATE_KINDS, StateBatch, StateContext
from slotline.testing import Level, Outcome, check_plugin

pytestmark = pytest.mark.usefixtures("one_thread")


class DeviceSlots(TorchState):
    """As on a GPU: padding is handled without looking at the slots."""

    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        self.on_host = False


@pytest.mark.slow
@pytest.mark.parametrize("factory", [TorchState, DeviceSlots])
@pytest.mark.behaviour(153)
def test_the_torch_backend_passes_the_suite_up_to_long_histories(factory: type[TorchState]) -> None:
    records = check_plugin(evolve(descriptor, factory=factory), device="cpu", level=Level.STATEFUL)
    assert [f"{record.key}: {record.reason}" for record in records if record.bad] == []
    kinds = {r.case["kind"] for r in records if r.outcome is Outcome.PASSED and "kind" in r.case}
    assert kinds == set(STATE_KINDS)
    taken_back = [r for r in records if r.id.startswith("state.rollback.") and r.outcome is Outcome.PASSED]
    assert {r.case["kind"] for r in taken_back} == set(STATE_KINDS)
    worst = max((record for record in records if record.mandatory), key=lambda record: record.ratio or 0.0)
    assert worst.ratio is not None
    assert worst.ratio < 0.75, f"{worst.key} uses {worst.ratio:.2f} of what is allowed: right kernels leave room"


def test_waves_hold_the_chunks_of_the_requests_that_have_them() -> None:
    lens = [1, 2 * CHUNK + 3, 0, 5, 1, CHUNK]
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    batch = StateBatch(
        num_requests=len(lens),
        num_tokens=sum(lens),
        max_query_len=max(lens),
        query_start_loc=starts,
        slots=torch.arange(len(lens), dtype=torch.int32),
        has_initial_state=torch.zeros(len(lens), dtype=torch.bool),
        num_accepted=torch.ones(len(lens), dtype=torch.int32),
        query_start_loc_cpu=starts.numpy(),
    )
    singles, longer = plan_of(batch, recurs=True, convolves=False, on_host=True).parts
    assert singles.waves == ((2, 1),)
    assert singles.tokens.take(torch.arange(sum(lens))).tolist() == [0, starts[4]]
    assert longer.waves == ((3, CHUNK), (1, CHUNK), (1, 3))
    values = longer.tokens.take(torch.arange(1, sum(lens) + 1))
    spread = longer.spread(values)
    assert spread.shape == (5, CHUNK)
    assert spread[:, 0].tolist() == [2, int(starts[5]) + 1, int(starts[3]) + 1, 2 + CHUNK, 2 + 2 * CHUNK]
    assert torch.equal(longer.gather(spread), values)
    assert int((spread == 0).sum()) == 5 * CHUNK - len(values)
