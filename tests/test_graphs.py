"""What captured graphs share, as far as a CPU can show it: memory that is read without being held."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slotline.core import LLM
from slotline.core.execution.attention import unowned


def test_an_unowned_tensor_is_the_same_memory_and_does_not_hold_it() -> None:
    whole = torch.randn(6, 8, 10, dtype=torch.bfloat16)
    part = whole[1:4, 2:5]
    same = unowned(part)
    assert (same.data_ptr(), same.shape, same.stride(), same.dtype) == (
        part.data_ptr(),
        part.shape,
        part.stride(),
        part.dtype,
    )
    same += 1
    assert torch.equal(same, part)
    alive = weakref.ref(whole)
    del whole, part
    gc.collect()
    assert alive() is None


@pytest.mark.behaviour(92, 131)
def test_the_calls_between_graphs_work_on_the_memory_of_the_forward_and_hold_none_of_it(
    tiny: Callable[..., Path], engines: Callable[..., LLM]
) -> None:
    engine = engines(tiny("gemma3")).engine
    router, model = engine.runner.router, engine.runner.model
    calls: list[Callable[[], None]] = []
    queries: list[Any] = []

    def now(call: Callable[[], None]) -> None:
        calls.append(call)
        call()

    breaking = router.breaking({group.name for group in router.groups}, now)

    def watched(layer: Any, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        queries.append(weakref.ref(query))
        return breaking(layer, query, *rest)

    with torch.inference_mode():
        inputs = engine.gatherer.dummy([3, 5], vocab_size=50)
        attend = router.plan(inputs.batches)
        expected = model.forward(inputs.input_ids, inputs.positions, attend)
        found = model.forward(inputs.input_ids, inputs.positions, watched)
    assert torch.equal(found, expected)
    gc.collect()
    assert len(calls) == len(queries) == sum(len(group.layers) for group in router.groups)
    assert all(query() is None for query in queries)
