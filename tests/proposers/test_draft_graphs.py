"""Whether a drafter's own steps are captured: what is decided, and where places are found for steps in graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import head_folders
import numpy as np
import pytest
import torch
from engine_driver import random_prompts, tokens_of
from repository import SUPPORT

from slotline.core import LLM
from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.proposers.speculation import draft_graphs as graphs
from slotline.proposers.speculation.draft_attention import Places, StagedAttention
from slotline.proposers.speculation.draft_graphs import DraftGraphs
from slotline.proposers.speculation.draft_runner import DraftRunner
from slotline.registry.contracts import Draft, DraftBatch
from slotline.registry.errors import NegotiationError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
SMALLER = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def settings_of(path: Path) -> dict[str, Any]:
    return {
        "drafter.name": "draft_model",
        "drafter.path": str(path),
        "drafter.tokens": 4,
        "drafter.adaptive": False,
        "memory": "8MiB",
    }


def test_what_is_in_the_way_of_capturing_is_told(tiny: Tiny, engines: Engines) -> None:
    settings = settings_of(tiny("llama", **SMALLER))
    llm = engines(tiny("llama"), **settings)
    setting = next(setting for setting in llm.plan.settings if setting.key == "drafter.graphs")
    assert (setting.asked, setting.resolved) == ("auto", "false")
    for text in ("no verifying step is captured", "is not captured", "attention backend 'torch': plan once: needs"):
        assert text in setting.origin
    assert setting.origin in llm.plan.explain()
    with pytest.raises(NegotiationError, match=r"drafter.graphs = true .*no verifying step is captured"):
        engines(tiny("llama"), **settings, **{"drafter.graphs": True})


@pytest.mark.parametrize(("family", "told"), [("llama", False), ("mistral", True)])
def test_plans_that_a_backend_repeats_for_other_layers_alone_are_not_counted_on(
    tiny: Tiny, engines: Engines, family: str, told: bool
) -> None:
    """The drafter's layers are like the model's; only mistral's have a window, where the backend says no."""
    plugin = {"plugins.inline": (f"{SUPPORT / 'partial_trees.py'}:descriptor",)}
    llm = engines(tiny(family), **settings_of(tiny(family, **SMALLER)), **plugin, backend="partial_trees")
    setting = next(setting for setting in llm.plan.settings if setting.key == "drafter.graphs")
    assert ("plan once: needs it, not implemented with sliding_window" in setting.origin) == told
    assert ("plan once" in setting.origin) == told


def test_capturing_a_drafter_that_is_not_there_is_refused(tiny: Tiny, engines: Engines) -> None:
    with pytest.raises(NegotiationError, match=r"drafter.graphs = true .*there is no drafter to capture"):
        engines(tiny("llama"), **{"drafter.graphs": True})


def test_a_drafter_that_reads_the_host_is_not_captured(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **{"drafter.name": "ngram"})
    setting = next(setting for setting in llm.plan.settings if setting.key == "drafter.graphs")
    assert "drafter 'ngram': graphs" in setting.origin
    assert all(setting.key != "drafter.graphs" for setting in engines(tiny("llama")).plan.settings)


def test_a_padded_request_has_no_keys_and_stores_none(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **settings_of(tiny("llama", **SMALLER)))
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    assert drafting.attention is not None
    longest = llm.engine.limits.max_model_len
    columns = longest // 16
    tables = [torch.arange(1, 1 + 4 * columns, dtype=torch.int32).view(4, columns) for _ in llm.engine.gatherer.groups]
    tables[0][1, 1:] = 0  # no block behind the first
    found = drafting.attention.places(torch.tensor([3, 14, longest - 2, -1]), tables[:1])
    assert found.seq_lens.T.tolist() == [[4, 5, 6, 7], [15, 16, 17, 18], [longest - 1, *[longest] * 3], [0] * 4]
    assert all(tensor.is_contiguous() for tensor in (found.seq_lens, found.positions, *found.slots))
    first = np.arange(4) * columns + 1
    assert found.slots[0].T.tolist() == [
        [16 + 3, 16 + 4, 16 + 5, 16 + 6],
        [int(first[1]) * 16 + 14, int(first[1]) * 16 + 15, -1, -1],
        [(int(first[2]) + columns - 1) * 16 + 14, (int(first[2]) + columns - 1) * 16 + 15, -1, -1],
        [-1] * 4,
    ]
    pairs = [found.lead_positions.view(4, 2).tolist(), found.lead_slots[0].view(4, 2).tolist()]
    assert pairs[0] == [[2, 3], [13, 14], [longest - 3, longest - 2], [0, 0]]
    last = (int(first[2]) + columns - 1) * 16
    assert pairs[1] == [
        [16 + 2, 16 + 3],
        [int(first[1]) * 16 + 13, int(first[1]) * 16 + 14],
        [last + 13, last + 14],
        [-1, -1],
    ]
    assert drafting.attention.has_room(np.array([0]), np.array([3])).tolist() == [False]  # no request, no blocks


@pytest.mark.parametrize("leads", [True, False])
def test_the_kernel_finds_the_places_that_torch_finds(
    tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    kernel = pytest.importorskip("slotline.backends.cuda.triton_places", reason="the kernel is Triton's")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    llm = engines(tiny("llama"), **settings_of(tiny("llama", **SMALLER)))
    drafting, longest = llm.engine.extension("drafts").drafting, llm.engine.limits.max_model_len
    assert drafting is not None
    assert drafting.attention is not None
    monkeypatch.setattr(drafting.attention, "_leads", leads)  # the engine is other tests', too
    columns, positions = longest // 16, torch.tensor([3, 14, longest - 2, -1, 0, 31])
    table = torch.arange(1, 1 + 12 * columns, dtype=torch.int32).view(6, -1)[:, :columns]
    table[1, 1:] = table[5, 1] = 0
    expected = drafting.attention.places(positions, [table])
    found = Places(
        *(
            [torch.full_like(t, 7).to(device) for t in part]
            if isinstance(part, list)
            else torch.full_like(part, 7).to(device)
            for part in expected
        )
    )
    given = (positions.to(device), table.to(device), 16, longest)
    kernel.fill_places(found, found.slots[0], found.lead_slots[0], *given)
    for own, other in zip(found, expected, strict=True):
        assert [t.tolist() for t in own] == [t.tolist() for t in other]


class Again:
    """Stands in for a graph where there is none: the same calls with the same tensors, results where they were."""

    def __init__(self, work: Callable[[], Any], result: Any) -> None:
        self.work, self.result = work, result

    def replay(self) -> None:
        self.result.token_ids.copy_(self.work().token_ids)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], list[Any]]:
    """What each engine's drafter is asked, and what it answers."""
    ask, asked = DraftRunner.call_drafter, dict[int, list[Any]]()

    def recorded(self: DraftRunner, batch: DraftBatch, attend: StagedAttention | None) -> Draft:
        draft = ask(self, batch, attend)
        tensors = (batch.rows, batch.positions, batch.last_token_ids, draft.token_ids)
        asked.setdefault(id(self), []).append([tensor.tolist() for tensor in tensors])
        return draft

    monkeypatch.setattr(DraftRunner, "call_drafter", recorded)
    return lambda llm: asked[id(llm.engine.extension("drafts").drafting)]


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", ["draft_model", "eagle"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_captured_proposal_is_the_eager_one(
    tiny: Tiny,
    engines: Engines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    drafts: Callable[[LLM], list[Any]],
    kind: str,
    asynchronous: bool,
) -> None:
    """Padded, at fixed addresses, planned once for the longest sequences; calls stand in for replays."""
    path = draft = tiny("llama")  # a draft model that is the model itself is right, a head of random weights is not
    if kind == "eagle":
        draft = head_folders.build(tmp_path, path, kind)
    settings = {**settings_of(draft), "drafter.name": kind, "scheduler.async": asynchronous, "backend": "planned_once"}
    settings["plugins.inline"] = (f"{SUPPORT / 'planned_once.py'}:descriptor",)
    prompts = random_prompts((5, 30, 17, 1, 12), seed=3)
    eager, llm = engines(path, **settings), engines(path, **settings, **{"observability.count_nans": True})
    expected, drafting = tokens_of(eager, prompts), llm.engine.extension("drafts").drafting
    assert drafting is not None
    made = DraftGraphs.__new__(DraftGraphs)
    hidden = torch.zeros(1, llm.engine.runner.model.facts.hidden_size)
    observed = (hidden, hidden) if kind == "eagle" else ()
    vars(made).update(_drafter=drafting.drafter, _attention=drafting.attention, _needs_computed=True, _device="cpu")
    vars(made)["_catches_up"] = drafting.catches_up
    vars(made).update(_needs_hidden_states=drafting.needs_hidden_states, _sizes=(2, 8), _observations={})
    vars(made)["_target"] = SimpleNamespace(results=lambda shape: (hidden, {}))
    shapes = {size: GraphShape(size * 5, 5) for size in (2, 8)}
    seen: Any = SimpleNamespace(observed=observed)
    made._observations = dict.fromkeys(shapes.values(), seen)
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "_captured", lambda work, pool: (Again(work, found := work()), found))
        made._proposals = {size: made._capture_proposal(shape, None) for size, shape in shapes.items()}
    vars(made)["observes"] = lambda states: False
    monkeypatch.setattr(drafting, "graphs", made)
    assert tokens_of(llm, prompts) == expected
    assert drafting.counts.failures == 0, drafting.counts.last_failure
    assert drafts(llm) == drafts(eager)
    assert (drafting.counts.accepted > 0) == (kind == "draft_model")


def test_what_a_captured_proposal_reads_stays_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph knows addresses alone: memory that it reads or writes must not be given to anybody else."""
    seen: list[weakref.ref[torch.Tensor]] = []

    class Watching:
        def propose(self, batch: DraftBatch) -> Draft:
            read = (batch.last_token_ids, batch.positions, batch.temperature, batch.hidden_states, *batch.observed)
            read += (batch.previous_token_ids,)
            seen.extend(weakref.ref(tensor) for tensor in read if tensor is not None)
            return Draft(token_ids=torch.zeros(2, 4, dtype=torch.int64))

    monkeypatch.setattr(graphs, "_captured", lambda work, pool: (SimpleNamespace(replay=None), work()))
    made, shape = DraftGraphs.__new__(DraftGraphs), GraphShape(10, 5)
    hidden = torch.zeros(1, 8)
    vars(made).update(_drafter=Watching(), _attention=None, _needs_computed=True, _needs_hidden_states=True)
    vars(made).update(_catches_up=True, _device="cpu", _target=SimpleNamespace(results=lambda shape: (hidden, {})))
    vars(made)["_observations"] = {shape: SimpleNamespace(observed=(hidden,))}
    proposal = made._capture_proposal(shape, None)
    gc.collect()
    assert len(seen) == 6
    assert all(reference() is not None for reference in seen)
    assert proposal.token_ids.shape == (2, 4)
