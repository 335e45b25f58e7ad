"""Data parallelism: replicas behind one front give the outputs of one engine, and go away together.

Replicas run as threads here, by the programs and messages of the processes. `test_replica_processes.py` has processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
from attrs import evolve
from engine_driver import GREEDY
from replica_threads import replicas_as_threads
from running_server import RunningServer, running_server
from tiny_engines import DEFAULTS
from tiny_vision import image

from slotline.core import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from slotline.core.engine.engine import Engine
from slotline.llm.beam_search import BeamSearchParams
from slotline.ranks.replicas.replica_front import ReplicaFront
from slotline.ranks.replicas.reports import NAME
from slotline.registry.errors import ConfigError, NegotiationError, RankError, RequestError
from slotline.registry.lora_request import LoRARequest

T = TypeVar("T")
SETTINGS = {"dtype": "float32", "lora.name": "torch", "observability.progress": False}
CHECKED = {**SETTINGS, "parallel.data": 2, "observability.check_integrity": True}
PROMPTS = ["def main(", "class A:\n    def", "import numpy as np\n", "for i in range(", "x = [", "# a comment\n"]
MIXED = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=8, logprobs=3, prompt_logprobs=1, temperature=0.7),
    SamplingParams(max_tokens=9, n=3, temperature=1.2),
    SamplingParams(max_tokens=30, stop=["\n"], temperature=0.5),
    SamplingParams(max_tokens=6, seed=7, n=2, top_k=5),
    SamplingParams(
        max_tokens=24, temperature=0.9, structured_outputs=StructuredOutputsParams(regex="[a-f]{4}[0-9]{3}")
    ),
]


@pytest.fixture(scope="module")
def replicas() -> Iterator[LLM]:
    with replicas_as_threads():
        llm = LLM(**CHECKED)
        assert isinstance(llm.front, ReplicaFront)
        yield llm
        llm.front.close()


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    with replicas_as_threads(), running_server(**CHECKED) as running:
        yield running


@pytest.fixture(scope="module")
def one() -> LLM:
    return LLM(**SETTINGS)


def plain(output: RequestOutput) -> object:
    """Return what two engines must agree on: everything but times and cached tokens."""
    scores = [
        [
            {token: (round(one.logprob, 4), one.rank, one.decoded_token) for token, one in entry.items()}
            for entry in each
        ]
        for each in ([part.logprobs or () for part in output.outputs])
    ]
    whole = [(part.index, part.text, part.token_ids, part.finish_reason, part.stop_reason) for part in output.outputs]
    return output.prompt, output.prompt_token_ids, whole, scores, output.prompt_logprobs is None, output.finished


def test_mixed_prompts_have_the_outputs_of_one_engine(replicas: LLM, one: LLM) -> None:
    """Requests without a seed draw by the order of arrival, whichever replica has them."""
    guided = [SamplingParams(max_tokens=5, guidance_scale=1.5), SamplingParams(max_tokens=5)]
    for prompts, params in ((PROMPTS, MIXED), (PROMPTS[:2], guided), (PROMPTS * 6, SamplingParams(max_tokens=7))):
        assert list(map(plain, replicas.generate(prompts, params))) == list(map(plain, one.generate(prompts, params)))
    assert [load.running + load.waiting for load in replicas.front.loads] == [0, 0]
    assert replicas.front.router.loads == [0, 0]


def test_the_front_knows_what_each_replica_holds(replicas: LLM) -> None:
    """After evictions too: the cache is far smaller than what was sent."""
    front = replicas.front
    assert isinstance(front, ReplicaFront)
    assert front.told is not None
    replicas.generate([f"x{n} = [" + "1, 2, 3, " * (n % 7) for n in range(40)], SamplingParams(max_tokens=9))
    held = front.ask(held_names, front.told.group)
    replicas.generate(["done"], SamplingParams(max_tokens=1))  # whose end comes with all that came before
    told = front.router.held
    assert all(found <= names for found, names in zip(held, told, strict=True))
    assert front.ask(held_names, front.told.group) == told
    assert all(len(names) > 5 for names in told)


def held_names(engine: Engine, group: int) -> set[bytes]:
    return {one[:NAME] for number, one in engine.scheduler.cache.pool.findable().values() if number == group}


@pytest.mark.slow
def test_conversations_return_to_the_replica_that_holds_them() -> None:
    """Each turn finds all of the turn before. By load alone it finds it on the wrong replica."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    hits = dict[str, int]()
    for routing in ("held", "load"):
        with replicas_as_threads():
            llm = LLM(**{**CHECKED, "parallel.routing": routing})
            prompts, cached = [[9 + n] * 20 for n in range(8)], 0
            for _ in range(4):
                outputs = llm.generate(prompts, params)
                cached += sum(output.metrics.num_cached_tokens for output in outputs)
                turns = [[*output.prompt_token_ids, *output.outputs[0].token_ids, 5] for output in outputs]
                prompts = turns[1:] + turns[:1]  # the next turn of each comes when it is the other replica's turn
            whole = 8 * sum((20 + 9 * turn + 7) // 16 * 16 for turn in range(3))
            assert cached == whole or routing == "load"
            hits[routing] = cached
            assert ("replicas tell which prefixes" in llm.plan.explain()) == (routing == "held")
            llm.front.close()
    assert hits["load"] < hits["held"] / 1.5


def test_both_replicas_work_and_equal_prompts_find_their_prefix(replicas: LLM) -> None:
    seen: set[int] = set()
    front = replicas.front
    for request in (front.add(f"spread-{i}", [i + 5] * 40, SamplingParams(max_tokens=2)) for i in range(4)):
        seen.add(request.replica)
    assert seen == {0, 1}
    while front.requests:
        front.step()
    prompt = {"prompt_token_ids": list(range(20, 340))}
    first, second = (replicas.generate(prompt, SamplingParams(max_tokens=2))[0] for _ in range(2))
    assert first.metrics.num_cached_tokens == 0
    assert second.metrics.num_cached_tokens >= 256


def test_a_stream_grows_with_text_and_log_probabilities(replicas: LLM, one: LLM) -> None:
    params = SamplingParams(max_tokens=9, temperature=0, logprobs=2, stop=["zzz"])
    outputs = list(replicas.stream("def f(", params))
    assert len(outputs) > 3
    assert [len(each.outputs[0].logprobs or ()) for each in outputs] == [len(e.outputs[0].token_ids) for e in outputs]
    assert plain(outputs[-1]) == plain(one.generate("def f(", params)[0])
    assert all(outputs[-1].outputs[0].text.startswith(each.outputs[0].text) for each in outputs)


def test_a_wrong_prompt_is_refused_with_its_number_and_the_next_request_draws_as_before(
    replicas: LLM, one: LLM
) -> None:
    one.engine.intake.arrivals = replicas.front._arrivals
    wrong = [SamplingParams(), SamplingParams(logit_bias={10**6: 1.0}), SamplingParams()]
    for llm in (replicas, one):
        with pytest.raises(RequestError, match="prompt 1: logit_bias names token 1000000"):
            llm.generate(["a", "b", "c"], wrong)
        with pytest.raises(RequestError, match="prompt 1: token id 1000000 is outside"):
            llm.generate([[1, 2], [10**6]])
    after = SamplingParams(max_tokens=12)
    assert plain(replicas.generate("x", after)[0]) == plain(one.generate("x", after)[0])
    assert not [each for each in replicas.front.rows.requests.values() if not each.aborted]


def test_what_cannot_be_sent_or_needs_the_engine_is_refused_by_name(replicas: LLM) -> None:
    with pytest.raises(RequestError, match="cannot be sent to another process"):
        replicas.generate("a", SamplingParams(logits_processors=[lambda tokens, logits: logits]))
    with pytest.raises(RequestError, match="the 2 replicas of parallel"):
        replicas.engine  # noqa: B018
    grammar = StructuredOutputsParams(regex="[ab]+")
    with pytest.raises(RequestError, match="the 2 replicas of parallel"):
        replicas.beam_search(["a"], BeamSearchParams(beam_width=2, max_tokens=3, structured_outputs=grammar))
    assert len(replicas.beam_search(["a"], BeamSearchParams(beam_width=2, max_tokens=3))[0].sequences) == 2


def test_adapters_are_known_to_all_replicas(replicas: LLM, one: LLM) -> None:
    folder = one.engine.runner.model.facts.path / "adapters" / "typed"
    adapter = LoRARequest("typed", 1, folder)
    params = SamplingParams(max_tokens=8, temperature=0)
    expected = [plain(each) for each in one.generate(PROMPTS, params, lora_request=adapter)]
    assert replicas.add_lora(adapter)
    assert not replicas.add_lora(adapter)
    assert [plain(each) for each in replicas.generate(PROMPTS, params, lora_request="typed")] == expected
    assert replicas.front.ask(_adapters) == [{1}, {1}]
    assert replicas.list_loras() == {1}
    assert replicas.remove_lora(1)
    assert replicas.list_loras() == set()
    assert one.remove_lora(1)


def _adapters(engine: object) -> set[int]:
    return set(engine.extension("adapters").numbers)  # type: ignore[attr-defined]


def test_weights_are_read_again_everywhere_and_not_beside_requests(replicas: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(400, 700))}
    params = SamplingParams(max_tokens=2, temperature=0)
    before = replicas.generate(prompt, params)[0]
    request = replicas.front.add("running", [1, 2, 3], SamplingParams(max_tokens=50))
    with pytest.raises(RequestError, match="1 requests are unfinished"):
        replicas.reload_weights()
    assert replicas.front.abort("running") is request
    replicas.reload_weights()
    after = replicas.generate(prompt, params)[0]
    assert plain(after) == plain(before)
    assert after.metrics.num_cached_tokens == 0
    assert request.finish_reason == "abort"


def test_threads_share_the_replicas(replicas: LLM, one: LLM) -> None:
    params = SamplingParams(max_tokens=10, temperature=0)
    expected = {prompt: plain(one.generate(prompt, params)[0]) for prompt in PROMPTS}
    found: dict[str, object] = {}

    def work(prompt: str) -> None:
        found[prompt] = plain(replicas.generate(prompt, params)[0])

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == expected


def test_an_error_of_a_step_reaches_the_caller_and_the_replica_goes_on(replicas: LLM) -> None:
    replicas.front.ask_first(break_next_step)
    with pytest.raises(ValueError, match="on purpose") as caught:
        replicas.generate(["a", "b"], SamplingParams(max_tokens=4))
    assert any("in schedule" in note for note in caught.value.__notes__)  # where it was raised
    assert replicas.generate("a", SamplingParams(max_tokens=4))[0].finished


def break_next_step(engine: Engine) -> None:
    """Have an engine's next step fail."""

    def schedule() -> None:
        del engine.scheduler.schedule
        raise ValueError("on purpose")

    engine.scheduler.schedule = schedule  # type: ignore[assignment, method-assign]


def test_ctrl_c_aborts_the_requests_of_the_call_and_the_replicas_go_on(replicas: LLM) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        replicas.generate(PROMPTS, SamplingParams(max_tokens=2000, ignore_eos=True))
    timer.join()
    signal.signal(signal.SIGINT, before)
    assert replicas.generate("a", SamplingParams(max_tokens=3))[0].finished
    while replicas.front.requests:
        replicas.front.step()
    assert replicas.front.router.loads == [0, 0]


def test_streams_of_an_event_loop_have_the_outputs_of_one_engine(served: RunningServer, one: LLM) -> None:
    llm, params = served.state.llm, evolve(MIXED[3], temperature=0)

    async def last(prompt: str) -> object:
        return plain([each async for each in llm.generate(prompt, params)][-1])

    async def work() -> list[object]:
        return list(await asyncio.gather(*map(last, PROMPTS)))

    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    httpx.post(f"{served.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=60)
    loop = llm._loop
    assert loop is not None
    assert run(work()) == [plain(each) for each in one.generate(PROMPTS, params)]
    assert run(ended_early(llm)) == ("abort", True, "logit_bias names token 1000000")


async def ended_early(llm: AsyncLLM) -> tuple[str | None, bool, str]:
    """Return how an aborted stream ends, whether an id may be used again at once, and what a refused one says."""
    stream = llm.generate({"prompt": "def f(", "request_id": "mine"}, SamplingParams(max_tokens=300, ignore_eos=True))
    await anext(stream)
    await llm.abort("mine")
    again = llm.generate({"prompt": "def f(", "request_id": "mine"}, SamplingParams(max_tokens=2))
    ended = [each async for each in again][-1].finished
    reason = [each async for each in stream][-1].outputs[0].finish_reason
    message = ""
    try:
        await anext(llm.generate("a", SamplingParams(logit_bias={10**6: 1.0})))
    except RequestError as error:
        message = error.message
    await llm.drain()
    return reason, ended, message


def test_a_server_shows_the_sum_of_its_replicas(served: RunningServer, one: LLM) -> None:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        body = {"prompt": PROMPTS, "max_tokens": 8, "temperature": 0}
        choices = client.post("/v1/completions", json=body).json()["choices"]
        params = SamplingParams(max_tokens=8, temperature=0)
        assert [each["text"] for each in choices] == [each.outputs[0].text for each in one.generate(PROMPTS, params)]
        lines = client.post("/v1/completions", json={**body, "prompt": "def", "stream": True}).text
        assert lines.count("data: ") > 5
        view = client.get("/v1/engine").json()
        assert view["requests"]["most_running"] == 2 * len(one.engine.rows.requests)
        assert view["cache"]["blocks"] == 2 * view["cache"]["free"] / 2
        metrics = client.get("/metrics").text
        assert f'slotline:kv_cache_blocks{{model_name="slotline-small"}} {float(view["cache"]["blocks"])}' in metrics
        refused = client.post("/v1/completions", json={"prompt": "a", "logit_bias": {"1000000": 1}})
        assert refused.status_code == 400
        settings = {one["key"]: one for one in client.get("/v1/plan").json()["settings"]}
        assert settings["parallel.data"]["resolved"] == "2"


@pytest.mark.exhaustive
def test_images_are_read_by_the_replicas(tiny_vision_model: Callable[[str], Path]) -> None:
    pytest.importorskip("PIL", reason="image processors need Pillow")
    path = tiny_vision_model("llava")
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": [image(seed) for seed in seeds]}}
        for text, seeds in (("def <image> main(", [0]), ("a <image><image> b", [1, 0]), ("import os", []))
    ]
    with replicas_as_threads():
        llm = LLM(path, data=2, **DEFAULTS)
    outputs = [plain(each) for each in llm.generate(prompts, GREEDY)]
    with pytest.raises(RequestError, match="prompt 0: multi_modal_data has sound; this model takes image"):
        llm.generate([{"prompt": "a", "multi_modal_data": {"sound": [1]}}] * 2)
    llm.close()
    assert outputs == [plain(each) for each in LLM(path, **DEFAULTS).generate(prompts, GREEDY)]


@pytest.mark.exhaustive
def test_embeddings_are_those_of_one_engine() -> None:
    with replicas_as_threads():
        llm = LLM(data=2, task="embed", **SETTINGS)
    found = [each.outputs.embedding for each in llm.embed(PROMPTS)]
    with pytest.raises(RequestError, match="this engine runs 'embed'"):
        llm.generate(["a", "b"])
    scores = [one.outputs.score for one in llm.score("def f(x):", ["x = 1", "def g(x):"])]
    llm.close()
    single = LLM(task="embed", **SETTINGS)
    expected = [each.outputs.embedding for each in single.embed(PROMPTS)]
    assert scores == pytest.approx(
        [one.outputs.score for one in single.score("def f(x):", ["x = 1", "def g(x):"])], abs=1e-5
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_replica_that_ends_while_nothing_runs_ends_the_engine(replicas: LLM, served: RunningServer) -> None:
    for front in (replicas.front, served.state.llm.front):
        front.links.replicas[1].connection.send_bytes(b"")  # nothing that a replica understands
    while replicas.front.failure is None:
        time.sleep(0.01)
    with pytest.raises(RankError, match="replica 1 failed"):
        replicas.generate("a", SamplingParams(max_tokens=1))
    with pytest.raises(RankError, match="replica 1 failed"):
        replicas.list_loras()
    for _ in range(500):
        if (answer := httpx.get(f"{served.url}/health")).status_code == 503:
            break
        time.sleep(0.01)
    assert "replica 1 failed" in answer.text
    assert httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}).status_code == 503
    assert httpx.get(f"{served.url}/v1/engine").json()["status"] == "failed"


def test_what_replicas_do_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NegotiationError, match=r"parallel\.data = 2 .* cannot hold: parallel\.context_shards = 2"):
        LLM(data=2, **{"parallel.context_shards": 2})
    with pytest.raises(
        NegotiationError, match=r"cannot hold: parallel\.pipeline = \('cpu', 'cpu'\) divides the layers"
    ):
        LLM(data=2, **{"parallel.pipeline": ("cpu", "cpu")})
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match=r"parallel\.data = 2 under torchrun"):
        LLM(data=2)
