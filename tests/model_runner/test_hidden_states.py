"""What drafters read of the model: last hidden states and those of chosen layers, of every token as it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import sound_family
import tiny_models
import torch
from engine_driver import GREEDY, add, random_prompts, run_all, tokens_of
from repository import SUPPORT
from watching_drafter import LAYERS

from slotline.core import LLM
from slotline.registry.errors import ContractError, NegotiationError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
SCRIPT = SUPPORT / "watching_drafter.py"
WATCHER = {
    "drafter.name": "watcher",
    "drafter.tokens": 3,
    "drafter.adaptive": False,
    "plugins.inline": (f"{SCRIPT}:Watcher",),
}
LENGTHS = (5, 40, 17, 1, 30, 12)


def expected_states(path: Path, tokens: list[int]) -> torch.Tensor:
    """transformers' own: behind the last norm, then in front of each layer of LAYERS, side by side."""
    with torch.no_grad():
        out = tiny_models.known_oracle(path)(torch.tensor([tokens]), output_hidden_states=True)
    return torch.cat([out.hidden_states[-1][0], *(out.hidden_states[layer][0] for layer in LAYERS)], -1)


def check(path: Path, requests: Iterable[tuple[list[int], dict[int, Any]]], texts: list[list[int]]) -> int:
    """What was seen of each text is what transformers gives; returns the number of positions."""
    count = 0
    for prompt, states in requests:
        (text,) = (text for text in texts if text[: len(prompt)] == prompt)
        right = expected_states(path, text)
        for at in range(min(states), len(text) - 1):  # the last token of a text is not computed
            token, after, state = states[at]
            assert (token, after) == (text[at], text[at + 1])
            assert torch.allclose(state, right[at], atol=2e-4), at
            count += 1
    return count


@pytest.mark.spread(3)
@pytest.mark.behaviour(97)
@pytest.mark.parametrize("family", ["llama_deep", "qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"optimize": True}, {"max_num_batched_tokens": 16}, {"model_family.transformers_decoder.lean": False}],
    ids=["plain", "optimize", "chunks", "transformers"],
)
def test_a_drafter_sees_the_models_states_of_every_token(
    tiny: Tiny, engines: Engines, family: str, settings: dict[str, Any]
) -> None:
    path = tiny(family)
    plain, llm = engines(path), engines(path, **WATCHER, **settings)
    prompts = random_prompts(LENGTHS, seed=3)
    expected = tokens_of(plain, prompts)
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    watcher: Any = drafting.drafter
    watcher.requests.clear()
    assert tokens_of(llm, prompts) == expected
    assert drafting.counts.failures == 0
    texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    assert check(path, watcher.requests, texts) == sum(len(text) - 1 for text in texts)


def test_preemption_and_prefix_hits_show_what_is_computed(tiny: Tiny, engines: Engines) -> None:
    path = tiny("llama_deep")
    llm = engines(path, **WATCHER, memory=f"{8 * 16}KiB", max_num_batched_tokens=24)
    prompts = random_prompts((30, 25, 40, 10, 33, 28), seed=8)
    expected = tokens_of(engines(path), prompts)
    watcher: Any = llm.engine.extension("drafts").drafting.drafter
    watcher.requests.clear()
    requests = [add(llm, str(i), prompt) for i, prompt in enumerate(prompts)]
    run_all(llm)
    assert [request.output_token_ids for request in requests] == expected
    assert sum(request.metrics.num_preemptions for request in requests) > 0
    texts = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    assert check(path, watcher.requests, texts) > 0

    cached = engines(path, **WATCHER)
    watcher = cached.engine.extension("drafts").drafting.drafter
    assert tokens_of(cached, prompts) == expected
    watcher.requests.clear()
    longer = [text[: len(prompt) + 6] for text, prompt in zip(texts, prompts, strict=True)]
    again = [add(cached, str(i), prompt, GREEDY) for i, prompt in enumerate(longer)]
    run_all(cached)
    assert sum(request.metrics.num_cached_tokens for request in again) > 0
    texts = [prompt + request.output_token_ids for prompt, request in zip(longer, again, strict=True)]
    seen = check(path, watcher.requests, texts)
    assert seen == sum(len(t) - 1 - r.metrics.num_cached_tokens for t, r in zip(texts, again, strict=True))


def test_a_drafter_that_cannot_observe_costs_drafts_and_nothing_else(
    tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompts = tiny("llama_deep"), random_prompts(LENGTHS, seed=3)
    llm = engines(path, **WATCHER)
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None

    def observe(computed: Any) -> None:
        raise RuntimeError("blind")

    monkeypatch.setattr(drafting.drafter, "observe", observe)
    monkeypatch.setattr(drafting.counts, "failures", 0)
    assert tokens_of(llm, prompts) == tokens_of(engines(path), prompts)
    assert drafting.counts.failures > 0
    assert "observe raised RuntimeError: blind" in drafting.counts.last_failure or drafting.counts.failures > 1


def test_nothing_is_collected_where_no_drafter_asks(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama_deep"), **{"drafter.name": "ngram", "drafter.tokens": 4, "drafter.adaptive": False})
    assert llm.engine.extension("drafts").drafting.taps is None
    assert not llm.engine.extension("drafts").drafting.needs_computed


@pytest.mark.behaviour(128)
def test_a_layer_that_the_model_does_not_have_is_refused_at_start(tiny: Tiny) -> None:
    with pytest.raises(ContractError, match=r"layers \[99\]"):
        LLM(tiny("llama_deep"), device="cpu", memory="4MiB", **{**WATCHER, "plugins.inline": (f"{SCRIPT}:TooDeep",)})


def test_a_family_that_shows_no_layers_is_refused_with_the_reason(tmp_path: Path) -> None:
    script = f"{sound_family.__file__}:descriptor"
    path = sound_family.checkpoint(tmp_path)
    with pytest.raises(NegotiationError, match=r"hidden states of chosen layers; model family 'sound'"):
        LLM(path, device="cpu", **{**WATCHER, "plugins.inline": (f"{SCRIPT}:Watcher", script)})
