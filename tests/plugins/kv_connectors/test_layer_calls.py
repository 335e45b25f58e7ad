"""Calls at each layer: loads and saves of a layer around its attention, and the plans in which there are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from engine_driver import tokens_of
from handoff_engines import MIXED, SHORT, SMALL, connector_of
from repository import SUPPORT
from tiny_engines import everything_returned

from slotline.core import LLM
from slotline.planner.kv_connector import _against_layers
from slotline.planner.plan import make_plan
from slotline.registry.config import load_config
from slotline.registry.errors import NegotiationError

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96)]

Tiny = Callable[..., Path]
LAYERED: dict[str, Any] = {
    **SMALL,
    "plugins.inline": (f"{SUPPORT / 'layer_connector.py'}:Layered",),
    "kv_connector.name": "layered",
    "kv_connector.leave_out_slow": False,
}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"scheduler.async": False}),
    "overlapping": ("llama", {"scheduler.async": True}),
    "drafted": ("llama", {"drafter.name": "ngram", "drafter.tokens": 3}),
    "windows": ("gemma2", {}),
}


@pytest.mark.parametrize("mode", [m if m == "plain" else pytest.param(m, marks=pytest.mark.slow) for m in MODES])
def test_layers_are_loaded_and_saved_where_they_attend(tiny: Tiny, mode: str) -> None:
    """Until its layer attends, a loaded block holds what no reader may take for keys."""
    family, settings = MODES[mode]
    path = tiny(family)
    want = tokens_of(LLM(path, **SMALL, **settings), MIXED, SHORT)
    llm = LLM(path, **LAYERED, **settings)
    connector = connector_of(llm)
    assert not connector.calls  # steps that are made up call nothing
    assert tokens_of(llm, MIXED, SHORT) == want
    layers = len([layer for group in connector.context.groups for layer in group.layers])
    one_step = connector.calls[: 2 * layers]
    assert one_step == [(what, layer) for layer in range(layers) for what in ("wait", "save")]
    assert len(connector.calls) % (2 * layers) == 0
    llm.engine.scheduler.cache.pool.reset()
    outputs = llm.generate(MIXED, SHORT)
    assert [list(one.outputs[0].token_ids) for one in outputs] == want
    assert sum(one.metrics.num_loaded_tokens for one in outputs) > 60
    for how in ("wait_layer", "save_layer"):
        connector.how = how
        llm.engine.scheduler.cache.pool.reset()
        assert tokens_of(llm, MIXED, SHORT) == want
    everything_returned(llm)


def test_captured_attention_and_layers_that_do_not_run_once_exclude_it(tiny: Tiny) -> None:
    kept = {name: value for name, value in LAYERED.items() if name not in SMALL}
    values = {"model": str(tiny("llama")), "device": "cpu", "attention.backend": "torch", **kept}
    with pytest.raises(NegotiationError, match=r"layered.*scheduler\.microbatches = 2: a layer does not run once"):
        make_plan(load_config(values={**values, "scheduler.microbatches": 2, "scheduler.max_batched_tokens": 2048}))
    loaded = load_config(values=values)
    plan = make_plan(loaded).plan
    assert _against_layers(loaded, plan) == []
    (group,) = plan.groups
    whole = evolve(plan, groups=(evolve(group, graphs=(("decode", "captured"), ("mixed", "eager"))),))
    (text,) = _against_layers(loaded, whole)  # as on a GPU with graphs of whole steps
    assert "the attention of full layers is inside the graphs of decode steps (graphs.mode = 'auto')" in text
    pieces = evolve(plan, groups=(evolve(group, graphs=(("decode", "eager"), ("mixed", "eager"))),))
    assert _against_layers(loaded, pieces) == []
