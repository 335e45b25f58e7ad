"""A request that cannot be scheduled ends with its error, and the others go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from engine_driver import GREEDY, add, random_prompts, run_all, tokens_of
from tiny_engines import everything_returned

from slotline.core import LLM, BeamSearchParams
from slotline.core.scheduler.admission import MAX_SALT_BYTES
from slotline.registry.errors import ModelError, RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]

PROMPTS = random_prompts([20, 9, 33])
SHORT = evolve(GREEDY, max_tokens=8)
SALTS: dict[str, tuple[Any, str]] = {
    "half a surrogate pair": ("\ud800", r"cache_salt='\\ud800' has half a surrogate pair at place 0"),
    "the other half, inside": ("tenant\udfff7", "at place 6"),
    "bytes": (b"tenant", "cache_salt=b'tenant'"),
    "nothing": (None, "cache_salt=None"),
    "too long": ("x" * (MAX_SALT_BYTES + 1), f"has {MAX_SALT_BYTES + 1} bytes; at most {MAX_SALT_BYTES}"),
    "too many bytes": ("é" * (MAX_SALT_BYTES // 2 + 1), f"at most {MAX_SALT_BYTES} are allowed"),
}


@pytest.mark.parametrize(("salt", "message"), SALTS.values(), ids=SALTS)
def test_a_salt_that_cannot_be_hashed_is_refused_at_admission(
    salt: Any, message: str, tiny: Tiny, engines: Engines
) -> None:
    llm = engines(tiny("llama"))
    expected = tokens_of(llm, PROMPTS[:1], SHORT)
    going = add(llm, "going", PROMPTS[0], SHORT)
    llm.engine.step()
    prompt = {"prompt_token_ids": PROMPTS[1], "cache_salt": salt}
    for call in (
        lambda: llm.generate([PROMPTS[2], prompt], SHORT),
        lambda: llm.stream(prompt, SHORT),
        lambda: llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2)),
    ):
        with pytest.raises(RequestError, match=message) as error:
            call()
        assert error.value.fix
    run_all(llm)
    assert [going.output_token_ids] == expected
    everything_returned(llm)


@pytest.mark.parametrize("salt", ["", "tenant 7", "日本 🜚", "x" * MAX_SALT_BYTES, "a\0b"])
def test_any_other_text_may_be_a_salt(salt: str, tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"))
    expected = tokens_of(llm, PROMPTS[:1], SHORT)
    (output,) = llm.generate({"prompt_token_ids": PROMPTS[0], "cache_salt": salt}, SHORT)
    assert [output.outputs[0].token_ids] == expected


STAGES = ["find_prefix", "try_admit", "admit", "prefix_hit", "keep"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_what_scheduling_raises_for_one_request_ends_that_one(
    stage: str, asynchronous: bool, tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a row, blocks and an encoder's outputs that it may hold by then."""
    family = "bamba" if stage == "keep" else "llama"
    llm = engines(tiny(family), block_size=4, **{"scheduler.async": asynchronous})
    cache = llm.engine.scheduler.cache
    expected = tokens_of(llm, PROMPTS, SHORT)
    cache.reset()
    part: Any = {
        "admit": llm.engine.rows,
        "prefix_hit": cache.groups[0].spec,
        "keep": getattr(llm.engine.extension("states"), "checkpoints", None),
    }.get(stage, cache)
    original, calls = getattr(type(part), stage), []

    def failing(self: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(stage)
        given = original(self, *arguments, **options)
        if len(calls) == 2:
            raise ModelError("a plugin says no", fix="ask another one")
        return given

    monkeypatch.setattr(type(part), stage, failing)
    requests = [add(llm, str(index), prompt, SHORT) for index, prompt in enumerate(PROMPTS)]
    reported = []
    while llm.engine.has_work:
        reported += llm.engine.step().finished
    failed = [request for request in requests if request.finish_reason == "error"]
    assert [str(request.stop_reason) for request in failed] == ["ModelError: a plugin says no\n  fix: ask another one"]
    assert set(map(id, reported)) == set(map(id, requests))
    for request, wanted in zip(requests, expected, strict=True):
        assert request in failed or request.output_token_ids == wanted
    monkeypatch.undo()
    everything_returned(llm)
    assert tokens_of(llm, PROMPTS, SHORT) == expected


def test_generate_returns_a_request_that_cannot_be_scheduled(
    tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines(tiny("llama"))
    cache = llm.engine.scheduler.cache
    find = cache.find_prefix

    def failing(request: Any, *arguments: Any) -> Any:
        if request.request_id == "bad":
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
        return find(request, *arguments)

    expected = tokens_of(llm, PROMPTS[:1], SHORT)
    monkeypatch.setattr(cache, "find_prefix", failing)
    good, bad = llm.generate([PROMPTS[0], {"prompt_token_ids": PROMPTS[1], "request_id": "bad"}], SHORT)
    assert [good.outputs[0].token_ids] == expected
    assert bad.outputs[0].finish_reason == "error"
    assert str(bad.outputs[0].stop_reason).startswith("UnicodeEncodeError")
    (last,) = list(llm.stream({"prompt_token_ids": PROMPTS[1], "request_id": "bad"}, SHORT))
    assert (last.finished, last.outputs[0].finish_reason) == (True, "error")
