"""`AsyncLLM`: the outputs of `LLM` on an event loop, requests that end early, slow readers, errors, closing."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import pytest
import torch
from attrs import evolve
from engine_driver import GREEDY, random_prompts
from tiny_engines import DEFAULTS

from slotline.core import LLM, AsyncLLM, PoolingParams, RequestOutput, SamplingParams
from slotline.registry.errors import CapacityError, ConfigError, EngineFailedError, RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

T = TypeVar("T")
Tiny = Callable[..., Path]
Engines = Callable[..., LLM]

PROMPTS = [{"prompt_token_ids": tokens} for tokens in random_prompts([3, 30, 17, 9])]
SHORT = evolve(GREEDY, max_tokens=8)
LONG = evolve(GREEDY, max_tokens=64)


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The small model that ships, offline."""
    return LLM()


@pytest.fixture(scope="module")
def served() -> Iterator[AsyncLLM]:
    """The small model that ships, for event loops."""
    served = AsyncLLM()
    yield served
    served.close()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run on an event loop of its own, for at most two minutes."""
    return asyncio.run(asyncio.wait_for(work, 120))


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


def everything_returned(served: AsyncLLM) -> None:
    """No request, row, stream or block is left in the engine."""

    async def look() -> tuple[int, int, int]:
        for _ in range(200):
            left = await served.on_engine(lambda: (len(served.engine.requests), served.engine.rows.num_free))
            if not left[0]:
                break
            await asyncio.sleep(0.01)
        return (*left, served.num_unfinished)

    assert run(look()) == (0, len(served.engine.rows.requests), 0)


def plain(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(one.index, one.text, one.token_ids, one.finish_reason, one.stop_reason) for one in output.outputs]


SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=20)


@pytest.mark.parametrize("kind", ["cumulative", "final_only"])
@pytest.mark.parametrize(
    "params",
    [
        SHORT,
        SAMPLED,
        evolve(SAMPLED, n=3),
        evolve(SAMPLED, stop=("\n", "retu"), max_tokens=60),
        evolve(SAMPLED, stop=("\n",), include_stop_str_in_output=True, max_tokens=60),
        evolve(SAMPLED, logprobs=2, prompt_logprobs=1),
        evolve(SAMPLED, stop_token_ids=(10, 11, 12), max_tokens=100),
        evolve(SAMPLED, detokenize=False),
    ],
    ids=["greedy", "seeded", "n", "stop", "stop kept", "logprobs", "stop tokens", "no text"],
)
def test_the_last_output_is_that_of_llm(params: SamplingParams, kind: Any, llm: LLM, served: AsyncLLM) -> None:
    prompt = "def read_file(path"
    (expected,) = llm.generate(prompt, params)
    found = run(last(served.generate(prompt, params, output_kind=kind)))
    assert plain(found) == plain(expected)
    assert [one.logprobs for one in found.outputs] == [one.logprobs for one in expected.outputs]
    assert [one.cumulative_logprob for one in found.outputs] == pytest.approx(
        [one.cumulative_logprob for one in expected.outputs]
    )
    assert (found.prompt, found.prompt_token_ids) == (expected.prompt, expected.prompt_token_ids)
    assert found.prompt_logprobs == expected.prompt_logprobs
    assert found.finished
    everything_returned(served)


@pytest.mark.parametrize("params", [SAMPLED, evolve(SAMPLED, n=3, stop=("\n", "retu"), logprobs=1, max_tokens=50)])
def test_deltas_add_up_to_the_whole_output(params: SamplingParams, llm: LLM, served: AsyncLLM) -> None:
    prompt = "def größe(naïve): # 日本"
    (expected,) = llm.generate(prompt, params)

    async def read() -> list[RequestOutput]:
        return [output async for output in served.generate(prompt, params, output_kind="delta")]

    deltas = run(read())
    assert len(deltas) > 2
    for whole in expected.outputs:
        parts = [one for output in deltas for one in output.outputs if one.index == whole.index]
        assert "".join(one.text for one in parts) == whole.text
        assert [token for one in parts for token in one.token_ids] == whole.token_ids
        assert [entry for one in parts for entry in one.logprobs or ()] == (whole.logprobs or [])
        assert (parts[-1].finish_reason, parts[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)
        assert all(one.finish_reason is None for one in parts[:-1])


def test_several_requests_share_the_steps(tiny: Tiny, engines: Engines) -> None:
    expected = [plain(output) for output in engines(tiny("llama")).generate(PROMPTS, SHORT)]
    with_closing = AsyncLLM(tiny("llama"), **DEFAULTS)

    async def all_at_once() -> list[RequestOutput]:
        return await asyncio.gather(*(last(with_closing.generate(prompt, SHORT)) for prompt in PROMPTS))

    assert [plain(output) for output in run(all_at_once())] == expected
    with_closing.close()


def test_a_conversation_is_that_of_llm(llm: LLM, served: AsyncLLM) -> None:
    messages = [{"role": "user", "content": "def f("}]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (expected,) = llm.chat(messages, SHORT, chat_template=template)
    assert plain(run(last(served.chat(messages, SHORT, chat_template=template)))) == plain(expected)
    with pytest.raises(RequestError, match="2 conversations in one call"):
        run(last(served.chat([messages, messages], SHORT)))  # type: ignore[list-item]


def test_embeddings_are_those_of_llm(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), task="embed")
    expected = llm.embed(PROMPTS[:2])
    with_task = AsyncLLM(tiny("llama"), task="embed", **DEFAULTS)

    async def embed(prompt: Any) -> Any:
        return [output async for output in with_task.embed(prompt)]

    for prompt, wanted in zip(PROMPTS, expected, strict=False):
        (output,) = run(embed(prompt))
        torch.testing.assert_close(output.outputs.data, wanted.outputs.data)
    with pytest.raises(RequestError, match="task"):
        run(last(with_task.encode(PROMPTS[0], PoolingParams(task="classify"))))  # type: ignore[arg-type]
    texts = ["def f(", "x = 1", "def g("]
    for cut in (None, 2):
        params = PoolingParams(truncate_prompt_tokens=cut)
        scores = [llm.score(texts[0], texts, params), run(with_task.score(texts[0], texts, params))]
        assert scores[1][1].prompt_token_ids == scores[0][1].prompt_token_ids
        torch.testing.assert_close(*([one.outputs.score for one in each] for each in scores))
    with pytest.raises(RequestError, match="truncate_prompt_tokens=99 is above"):
        run(with_task.score("a", "b", PoolingParams(truncate_prompt_tokens=99)))
    with pytest.raises(RequestError, match="no rewards of texts"):
        run(with_task.reward("a"))
    with_task.close()
    path = tiny("llama", architecture="LlamaForSequenceClassification", num_labels=1)
    (reward,) = engines(path).reward(PROMPTS[:1])
    rewarding = AsyncLLM(path, **DEFAULTS)
    torch.testing.assert_close(run(rewarding.reward(PROMPTS[0])).outputs.data, reward.outputs.data)
    rewarding.close()


@pytest.mark.parametrize("way", ["break", "cancel", "cancel at once", "abort"])
def test_a_request_that_nobody_reads_any_more_is_aborted(way: str, served: AsyncLLM) -> None:
    async def leave() -> None:
        outputs = served.generate("def main(", evolve(LONG, n=2), output_kind="delta")
        if way == "break":
            async for _ in outputs:
                break
            await outputs.aclose()
            return
        task = asyncio.create_task(last(outputs))
        await asyncio.sleep(0 if way == "cancel at once" else 0.05)
        if way == "abort":
            (request_id,) = await served.on_engine(
                lambda: [name for name in served.engine.requests if not name.endswith("/1")]
            )
            assert await served.abort(request_id)
            assert not await served.abort(request_id)
            assert {one.finish_reason for one in (await task).outputs} == {"abort"}
            return
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(leave())
    everything_returned(served)


def test_a_slow_reader_gets_what_it_missed_as_one_output(served: AsyncLLM) -> None:
    async def read_slowly() -> list[RequestOutput]:
        seen = []
        async for output in served.generate("def main(", LONG, output_kind="delta"):
            seen.append(output)
            while len(seen) == 1 and served.num_unfinished:
                await asyncio.sleep(0.01)
        return seen

    first, rest = run(read_slowly())
    assert len(first.outputs[0].token_ids) + len(rest.outputs[0].token_ids) == LONG.max_tokens
    assert rest.finished


def test_prompts_that_the_engine_has_not_taken_yet_are_unfinished(served: AsyncLLM) -> None:
    async def queue() -> int:
        free = threading.Event()
        busy = asyncio.create_task(served.on_engine(free.wait))
        tasks = [asyncio.create_task(last(served.generate("def main(", SHORT))) for _ in range(3)]
        await asyncio.sleep(0.01)
        queued = served.num_unfinished
        free.set()
        await asyncio.gather(busy, *tasks)
        return queued

    assert run(queue()) == 3
    assert served.num_unfinished == 0


def test_the_loop_is_free_while_the_engine_works(served: AsyncLLM) -> None:
    async def ticking() -> float:
        worst, task = 0.0, asyncio.gather(*(last(served.generate("def main(", LONG)) for _ in range(4)))
        while not task.done():
            start = perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, perf_counter() - start)
        return worst

    assert min(run(ticking()) for _ in range(3)) < 0.1  # a step of this model, and other processes on this machine


def test_wrong_requests_are_refused_and_the_next_is_served(served: AsyncLLM) -> None:
    for prompt, params, message in (
        ("", SHORT, "the prompt is empty"),
        ([10**9], SHORT, "vocabulary"),
        ("x", evolve(SHORT, logprobs=10**6), "logprobs"),
        ("x", evolve(SAMPLED, n=2, best_of=4), "best_of=4 in a stream"),
        ({"prompt": "x", "promt": 1}, SHORT, "promt"),
    ):
        with pytest.raises(RequestError, match=message):
            run(last(served.generate(prompt, params)))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="output_kind='all'"):
        run(last(served.generate("x", SHORT, output_kind="all")))  # type: ignore[arg-type]
    assert run(last(served.generate("def main(", SHORT))).finished
    everything_returned(served)


def test_the_best_outputs_are_chosen_at_the_end(llm: LLM, served: AsyncLLM) -> None:
    params = SamplingParams(n=1, best_of=3, seed=1, max_tokens=8)
    (expected,) = llm.generate("def main(", params)
    assert plain(run(last(served.generate("def main(", params, output_kind="final_only")))) == plain(expected)


def test_a_second_event_loop_is_refused_while_the_first_is_open(served: AsyncLLM) -> None:
    first = asyncio.new_event_loop()
    first.run_until_complete(last(served.generate("def main(", SHORT)))
    with pytest.raises(RequestError, match="serves another event loop"):
        run(last(served.generate("def main(", SHORT)))
    first.close()
    assert run(last(served.generate("def main(", SHORT))).finished


def test_memory_that_ends_in_a_step_ends_its_requests_alone(served: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 1 GiB")

    async def two() -> list[Any]:
        with monkeypatch.context() as patched:
            patched.setattr(type(served.engine.runner), "launch", out_of_memory)
            tasks = [last(served.generate("def main(", SHORT)) for _ in range(2)]
            return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(error) for error in run(two())] == [CapacityError] * 2
    assert run(last(served.generate("def main(", SHORT))).finished
    everything_returned(served)


def test_a_crash_ends_all_requests_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    served = AsyncLLM()

    def crash(*_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    async def two() -> list[Any]:
        tasks = [asyncio.create_task(last(served.generate("def main(", LONG))) for _ in range(2)]
        await asyncio.sleep(0.05)
        monkeypatch.setattr(type(served.engine.runner), "launch", crash)
        return await asyncio.gather(*tasks, return_exceptions=True)

    errors = run(two())
    assert [type(error) for error in errors] == [EngineFailedError] * 2
    assert "ZeroDivisionError: a bug" in str(errors[0])
    assert isinstance(errors[0].__cause__, ZeroDivisionError)
    monkeypatch.undo()
    with pytest.raises(EngineFailedError, match="a bug"):
        run(last(served.generate("def main(", SHORT)))
    assert served.error is not None
    served.close()


def test_closing_ends_the_thread_and_what_runs(served: AsyncLLM) -> None:
    async def closed_early() -> Any:
        async with AsyncLLM() as short_lived:
            task = asyncio.create_task(last(short_lived.generate("def main(", LONG)))
            await asyncio.sleep(0.02)
        with pytest.raises(RequestError, match="the engine was closed"):
            await task
        with pytest.raises(RequestError, match="the engine is closed"):
            await last(short_lived.generate("def main(", SHORT))
        short_lived.close()

    before = threading.active_count()
    run(closed_early())
    assert threading.active_count() <= before + 1  # the loop's own pool ends with the loop


def test_an_engine_that_nobody_holds_ends_its_thread() -> None:
    forgotten = AsyncLLM()
    run(last(forgotten.generate("def main(", SHORT)))
    thread, gone = forgotten._thread._thread, weakref.ref(forgotten)
    del forgotten
    gc.collect()
    thread.join(10)
    assert gone() is None
    assert not thread.is_alive()


def test_a_configuration_that_is_wrong_is_refused_in_the_constructor() -> None:
    with pytest.raises(ConfigError, match="blok_size"):
        AsyncLLM(**{"cache.blok_size": 16})
