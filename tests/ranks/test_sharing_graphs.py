"""Replicas that share experts and replay captured steps: all in the same shape, also those without requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import recorded_communicator
import tiny_models
from cli_cases import pretend_project_installed
from repository import TESTS
from sharing_threads import Replicas, sharing_replicas

from slotline.core import LLM, SamplingParams
from slotline.core.batch.graph_dispatcher import GraphShape
from slotline.ranks.replicas.agreed_shapes import AgreedShapes
from slotline.ranks.replicas.meetings import EAGER, Pass
from slotline.registry.errors import ConfigError

PROMPTS = ["def main(", "class A:\n    def", "import numpy as np\n", "for i in range(", "x = ["]
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "memory": "8MiB",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
    "observability.progress": False,
}


def shapes(*given: tuple[int, int]) -> tuple[GraphShape, ...]:
    return tuple(GraphShape(tokens, length) for tokens, length in given)


def agreed(*given: tuple[int, int]) -> GraphShape | None:
    """Return the shape of replicas with so many tokens and wishes."""
    known = AgreedShapes(shapes((8, 1), (4, 1), (4, 0), (2, 1)))
    return known.agreed([Pass(1, tokens, shape) for tokens, shape in given])


@pytest.mark.behaviour(60)
def test_all_take_the_smallest_shape_that_holds_the_steps_of_those_with_tokens() -> None:
    assert agreed((2, 3), (3, 1)) == GraphShape(4, 1)
    assert agreed((0, EAGER), (2, 3), (8, 0)) == GraphShape(8, 1)
    assert agreed((0, EAGER), (3, 2)) == GraphShape(4, 0)
    assert agreed((2, 3), (3, 2)) is None  # of another kind
    assert agreed((2, 3), (70, EAGER)) is None


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Replicas, Path]]:
    path = tiny_models.build("mixtral", tmp_path_factory.mktemp("mixtral") / "model")
    with pytest.MonkeyPatch.context() as patch, sharing_replicas(recorded_communicator) as (replicas, settings):
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme_device"]:
            patch.delitem(sys.modules, name)
        device = TESTS / "third_party" / "acme-device"
        pretend_project_installed(patch, tmp_path_factory.mktemp("site"), device)
        sizes = {"graphs.sizes": (1, 2, 4)}
        llm = LLM(path, data=2, expert=2, device="acme", **SMALL, **settings, **sizes)
        yield llm, replicas, path
        llm.close()


@pytest.mark.behaviour(131, 134)
@pytest.mark.slow
def test_the_text_is_that_of_one_engine_and_idle_replicas_replay_too(shared: tuple[LLM, Replicas, Path]) -> None:
    llm, replicas, path = shared
    one = LLM(path, device="cpu", **SMALL)
    replays = counted(replicas)
    for prompts in (PROMPTS, PROMPTS[:3], PROMPTS[:1], PROMPTS * 2):
        for params in (SamplingParams(max_tokens=12, temperature=0), SamplingParams(max_tokens=9, temperature=1)):
            found, expected = (each.generate(prompts, params, progress=False) for each in (llm, one))
            assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    time.sleep(0.05)
    assert replays[0] == replays[1]
    assert {1, 2, 4} <= {shape.num_tokens for shape in replays[0]}


@pytest.mark.slow
def test_steps_are_captured_anew_for_a_third_replica(
    shared: tuple[LLM, Replicas, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, replicas, path = shared
    with pytest.raises(ConfigError, match="3 replicas need 3 acme devices, and there are 2"):
        llm.scale(3)
    monkeypatch.setattr("acme_device.device.AcmeFactory.count", lambda _factory: 3)
    one = LLM(path, device="cpu", **SMALL)
    params = SamplingParams(max_tokens=12, temperature=0)
    for data in (3, 2):
        llm.scale(data)
        replays = counted(replicas)
        found, expected = (each.generate(PROMPTS, params, progress=False) for each in (llm, one))
        assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
        time.sleep(0.05)
        assert replays[0]
        assert all(each == replays[0] for each in replays[:data])


def counted(replicas: Replicas) -> list[list[GraphShape]]:
    """Return lists that the shapes of the replicas' replays are appended to."""
    replays: list[list[GraphShape]] = [[] for _ in replicas.engines]
    for number, engine in replicas.engines.items():
        graphs: Any = engine.graphs

        def replay(inputs: Any, plain: Any = graphs.replay, found: list[GraphShape] = replays[number]) -> Any:
            found.append(inputs.shape)
            return plain(inputs)

        graphs.replay = replay
    return replays
