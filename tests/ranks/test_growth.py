"""Replicas that come and go while others run: the outputs of one engine, and nothing is lost when one cannot start.

Replicas run as threads here, by the programs and messages of the processes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import replica_threads
from replica_threads import replicas_as_threads
from running_server import running_server

from slotline.core import LLM, SamplingParams
from slotline.core.engine.engine import Engine
from slotline.ranks.replicas import replica
from slotline.registry.config import LoadedConfig
from slotline.registry.errors import CapacityError, ConfigError, RankError, RequestError
from slotline.registry.lora_request import LoRARequest
from slotline.server.keys import Keys

SETTINGS: dict[str, Any] = {"dtype": "float32", "lora.name": "torch", "observability.progress": False}
CHECKED = {**SETTINGS, "parallel.data": 2, "observability.check_integrity": True}
PROMPTS = ["def main(", "class A:\n    def", "import numpy as np\n", "for i in range("]
LONG = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with replicas_as_threads():
        llm = LLM(**CHECKED)
        yield llm
        llm.close()


@pytest.fixture(scope="module")
def one() -> LLM:
    return LLM(**SETTINGS)


def texts(llm: LLM, params: SamplingParams = LONG, **more: Any) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, params, **more)]


def numbers(engine: Engine) -> set[int]:
    return set(engine.extension("adapters").numbers)


def replica_names() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("replica-")}


def test_a_third_replica_joins_while_requests_run_and_leaves_with_its_last(llm: LLM, one: LLM) -> None:
    folder = Path(one.engine.runner.model.facts.path) / "adapters" / "typed"
    adapter = LoRARequest("typed", 1, folder)
    one.add_lora(adapter)
    llm.add_lora(adapter)
    expected = texts(one)
    front: Any = llm.front
    stream = llm.stream("def f(", LONG)
    first = next(stream)
    report = llm.scale(data=3)
    assert (report.data, report.started, report.leaving) == (3, 1, 0)
    assert len(front.loads) == 3
    assert replica_names() == {"replica-0", "replica-1", "replica-2"}
    assert front.ask(numbers) == [{1}, {1}, {1}]
    assert {one.key: one.resolved for one in llm.plan.settings}["parallel.data"] == "3"
    assert "scale(data=3)" in llm.plan.explain(400)
    front.add("last", list(range(5, 50)), SamplingParams(max_tokens=12, ignore_eos=True))
    front.add("second", list(range(60, 90)), SamplingParams(max_tokens=12, ignore_eos=True))
    assert texts(llm) == expected
    *_, last = stream
    assert last.outputs[0].text.startswith(first.outputs[0].text)
    assert last.outputs[0].text == one.generate("def f(", LONG)[0].outputs[0].text
    while front.requests:
        front.step()
    used = [front.add(f"r{i}", [i + 5] * 40, SamplingParams(max_tokens=16, ignore_eos=True)) for i in range(3)]
    assert {each.replica for each in used} == {0, 1, 2}
    report = llm.scale(1)
    assert (report.data, report.started, report.leaving) == (1, 0, 2)
    assert len(front.loads) == 3
    assert texts(llm) == expected
    while front.requests:
        front.step()
    assert [each.finish_reason for each in used] == ["length"] * 3
    assert len(front.loads) == 1
    assert front.router.loads == [0]
    assert "parallel.data" not in {one.key for one in llm.plan.settings}
    assert llm.scale(2).started == 1  # the leaving threads have ended then
    assert replica_names() == {"replica-0", "replica-1"}
    assert front.ask(numbers) == [{1}, {1}]
    assert texts(llm) == expected


def test_a_leaving_replica_is_taken_back(llm: LLM) -> None:
    front: Any = llm.front
    llm.scale(2)
    requests = [front.add(f"b{i}", [i + 9] * 30, SamplingParams(max_tokens=20, ignore_eos=True)) for i in range(2)]
    assert {each.replica for each in requests} == {0, 1}
    assert llm.scale(1).leaving == 1
    links = list(front.links.replicas)
    report = llm.scale(2)
    assert (report.started, report.leaving) == (0, 0)
    assert front.links.replicas == links
    while front.requests:
        front.step()
    assert len(front.loads) == 2


def test_a_replica_that_cannot_start_leaves_the_others_serving(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    front: Any = llm.front
    llm.scale(2)
    before = llm.plan.digest
    built = replica.start_engine

    def fails(loaded: LoadedConfig, first: int) -> Engine:
        if loaded.config.parallel.data == 3:
            raise CapacityError("no memory is left", fix="free some")
        return built(loaded, first)

    monkeypatch.setattr(replica, "start_engine", fails)
    running = front.add("running", [5] * 30, SamplingParams(max_tokens=16, ignore_eos=True))
    with pytest.raises(CapacityError, match="no memory is left"):
        llm.scale(3)
    monkeypatch.setattr(replica, "start_engine", lambda _loaded, _first: 1 / 0)
    with pytest.raises(RankError, match="replica 2 failed: it raised ZeroDivisionError") as caught:
        llm.scale(3)
    assert "the other replicas go on" in str(caught.value)
    monkeypatch.setattr(replica_threads.ReplicaThreads, "ended", lambda _self: "replica 2 has ended: exit code 1")
    monkeypatch.setattr(replica, "serve", lambda *_: 1)
    monkeypatch.setattr(replica_threads, "_serve", lambda *_: None)
    with pytest.raises(RankError, match="replica 2 has ended: exit code 1"):
        llm.scale(3)
    assert replica_names() == {"replica-0", "replica-1"}
    assert (front.failure, llm.plan.digest, len(front.loads)) == (None, before, 2)
    while front.requests:
        front.step()
    assert running.finish_reason == "length"
    assert all(texts(llm))


def test_wrong_numbers_are_refused(llm: LLM, one: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (0, -1, True, "3", 1.5):
        with pytest.raises(RequestError, match="is no positive number"):
            llm.scale(wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="the engine runs in this process"):
        one.scale(2)

    def refuse(loaded: LoadedConfig, _there: object) -> None:
        raise ConfigError(f"{loaded.config.parallel.data} replicas need as many devices", fix="set fewer")

    monkeypatch.setattr("slotline.ranks.replicas.growth.refuse_few_devices", refuse)
    with pytest.raises(ConfigError, match="9 replicas need as many devices"):
        llm.scale(9)
    assert len(llm.front.loads) == 2  # type: ignore[union-attr]


def test_weights_that_were_read_again_are_those_of_new_replicas(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    front: Any = llm.front
    llm.scale(1)
    read: list[Path | None] = []
    llm.update_config(model=front.model_folder)
    llm.reload_weights()
    monkeypatch.setattr(Engine, "reload_weights", lambda _engine, path: read.append(path))
    llm.scale(2)
    assert read == [front.model_folder]


@pytest.mark.slow
def test_a_server_scales_for_an_administrator_and_shows_it() -> None:
    with replicas_as_threads(), running_server(Keys((b"user",), (b"admin",)), **CHECKED) as served:

        def ask(key: str, data: object, path: str = "/v1/scale", name: str = "data") -> httpx.Response:
            given = {"headers": {"authorization": f"Bearer {key}"}, "json": {name: data}, "timeout": 60}
            return httpx.post(served.url + path, **given)  # type: ignore[arg-type]

        def metrics() -> str:
            return httpx.get(f"{served.url}/metrics", headers={"authorization": "Bearer user"}).text

        assert ask("user", 3).status_code == 401
        assert 'slotline:replicas{model_name="slotline-small"} 2.0' in metrics()
        assert ask("admin", 3).json() == {"data": 3, "started": 1, "leaving": 0}
        assert 'slotline:replicas{model_name="slotline-small"} 3.0' in metrics()
        body = {"prompt": PROMPTS, "max_tokens": 8}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, headers={"authorization": "Bearer user"})
        assert len(answer.json()["choices"]) == len(PROMPTS)
        wrong = ask("admin", 0)
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "not_scaled")
        assert ask("admin", 1).json()["data"] == 1
        assert ask("user", 2, "/scale_elastic_ep", "new_data_parallel_size").status_code == 401
        answer = ask("admin", 2, "/scale_elastic_ep", "new_data_parallel_size")
        assert answer.json() == {"message": "Scaled to 2 data parallel engines"}
        assert ask("admin", 2, "/scale_elastic_ep").json()["error"]["code"] == "unknown_field"
