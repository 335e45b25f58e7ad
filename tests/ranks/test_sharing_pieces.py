"""Replicas that share experts and cut steps: pieces take turns while tokens travel, with the text of whole steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from attrs import define
from sharing_threads import Replicas, sharing_replicas
from tiny_engines import DEFAULTS

from slotline.core import LLM, SamplingParams
from slotline.llm.settings import load_settings
from slotline.planner import microbatches
from slotline.planner.plan import make_plan
from slotline.plugins.model_families.tensor_parallel.threads import Finished, ThreadCommunicator
from slotline.registry.errors import NegotiationError

pytest.importorskip("greenlet")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(17, 73, 91)]
PROMPTS = [{"prompt_token_ids": [5 + (7 * i + j) % 300 for j in range(3 + 9 * i)]} for i in range(5)]
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True, repetition_penalty=1.2)
CUT: dict[str, Any] = {**DEFAULTS, "scheduler.microbatches": 2, "scheduler.microbatch_tokens": 4}


@define(eq=False)
class Travelling:
    """Exchange that notes when it is finished."""

    out: torch.Tensor
    seen: list[int]

    def finish(self) -> torch.Tensor:
        self.seen.append(-1)
        return self.out


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Replicas, Path]]:
    path = tiny_models.build("mixtral", tmp_path_factory.mktemp("mixtral") / "model")
    with sharing_replicas() as (replicas, settings):
        llm = LLM(path, data=2, expert=2, **{**CUT, **settings})
        yield llm, replicas, path
        llm.close()


@pytest.mark.slow
def test_the_text_is_that_of_whole_steps_and_pieces_overlap(
    shared: tuple[LLM, Replicas, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _, path = shared
    seen: tuple[list[int], list[int]] = ([], [])
    plain = ThreadCommunicator.all_to_all

    def all_to_all(self: ThreadCommunicator, x: torch.Tensor, sent: Any, received: Any) -> Any:
        found: Finished = plain(self, x, sent, received)
        seen[self.rank].append(1)
        return Travelling(found.out, seen[self.rank])

    monkeypatch.setattr(ThreadCommunicator, "all_to_all", all_to_all)
    one = LLM(path, **DEFAULTS)
    for prompts in (PROMPTS, PROMPTS[4:], PROMPTS * 2):
        for params in (GREEDY, DRAWN):
            found, expected = (each.generate(prompts, params, progress=False) for each in (llm, one))
            assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    assert most_at_once(seen[0]) == most_at_once(seen[1]) > 3  # a piece alone has three parts on their way


def most_at_once(seen: list[int]) -> int:
    """Return how many exchanges were on their way at a time."""
    most = now = 0
    for change in seen:
        now += change
        most = max(most, now)
    return most


def planned(path: Path, **more: Any) -> Any:
    settings = {"model": path, "dtype": "float32", "parallel.data": 2, "parallel.expert": 2}
    return make_plan(load_settings(None, (), {**settings, "scheduler.microbatches": 2, **more}))


def test_the_plan_says_what_overlaps_and_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_models.build("mixtral", tmp_path / "model")
    (setting,) = [one for one in planned(path).plan.settings if one.key == "scheduler.microbatches"]
    assert setting.origin.endswith("while tokens of one are on their way to experts, another one computes")
    with pytest.raises(NegotiationError, match="the step that gives scales is whole on one replica alone"):
        planned(path, **{"cache.calculate_kv_scales": True})
    monkeypatch.setattr(microbatches, "find_spec", lambda name: None)
    with pytest.raises(NegotiationError, match="without the package greenlet"):
        planned(path)
