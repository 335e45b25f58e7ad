"""Edges of attention that a backend takes over from the model: the same texts, and what the plan says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import plain_torch
import pytest
import single_token_edges
import unrounded_cpu
from engine_driver import GREEDY, random_prompts

from slotline.backends.linear.vnni_kernels import lanes
from slotline.core import LLM
from slotline.registry.contracts.attention_edges import AttentionEdges
from slotline.registry.negotiation.explain import explain_plan

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
SMALL: dict[str, Any] = {"block_size": 4, "scheduler.max_batched_tokens": 24, "optimize": True}
PLAIN: dict[str, Any] = {"backend": "plain_torch", "plugins": [f"{plain_torch.__file__}:descriptor"]}
UNROUNDED: dict[str, Any] = {"backend": "unrounded_cpu", "plugins": [f"{unrounded_cpu.__file__}:descriptor"]}
FAMILIES = {
    "llama": ("rotary",),
    "qwen3": ("norm", "rotary"),
    "gemma3": ("norm", "rotary"),
    "qwen3_next": ("norm", "rotary", "gate"),
    "deepseek_v3": ("expansion",),
}

CPU = ("llama", "gemma3", "qwen3_next")


@contextmanager
def calls_of(llm: LLM) -> Iterator[list[tuple[int, AttentionEdges | None]]]:
    """Record the layer and the edges of each call of a backend's `forward`."""
    router, seen = llm.engine.runner.router, list[tuple[int, AttentionEdges | None]]()
    before = dict(router.routes)

    def recording(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            seen.append((args[0].index, more.get("edges")))
            return forward(*args, **more)

        return call

    for index, (write, forward, cache, position) in before.items():
        router.routes[index] = write, recording(forward), cache, position
    try:
        yield seen
    finally:
        router.routes.update(before)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize(("backend", "family"), [*(("torch", name) for name in FAMILIES), *(("cpu", n) for n in CPU)])
def test_a_backend_that_takes_edges_gives_the_texts_of_one_that_does_not(
    backend: str, family: str, tiny: Callable[..., Path], engines: Callable[..., LLM], greedy: Callable[..., list[int]]
) -> None:
    path, names = tiny(family), FAMILIES[family]
    fused, plain = engines(path, **{**SMALL, "backend": backend}), engines(path, **{**SMALL, **PLAIN})
    with calls_of(fused) as taken, calls_of(plain) as kept:
        texts = tokens(fused)
        assert texts == tokens(plain) == [greedy(path, prompt, 20) for prompt in PROMPTS]
    assert {edges for _, edges in kept} == {None}
    last = max(index for index, _ in taken)
    assert all(edges is not None for index, edges in taken if index != last)
    for _, edges in taken:
        if edges is None:  # the last layer, for wanted tokens alone
            continue
        given = {
            "norm": edges.query_norm is not None and edges.key_norm is not None,
            "rotary": edges.cos is not None,
            "expansion": edges.expansion is not None,
            "gate": edges.gate is not None,
        }
        assert tuple(name for name, is_given in given.items() if is_given) == names
    assert {group.edges for group in fused.plan.groups} == {names}
    assert f"{', '.join(names)}: left to the backend" in explain_plan(fused.plan, 300)
    assert "N186" not in explain_plan(fused.plan, 300)
    assert {group.edges for group in plain.plan.groups} == {()}
    kept_text = f"N186 {', '.join(names)}: computed by the model, since plain_torch does not take"
    assert kept_text in explain_plan(plain.plan, 300)


def test_a_plan_leaves_the_edges_of_its_step_to_the_model(
    tiny: Callable[..., Path], engines: Callable[..., LLM], greedy: Callable[..., list[int]]
) -> None:
    path, plugins = tiny("qwen3"), [f"{single_token_edges.__file__}:descriptor"]
    llm = engines(path, **{**SMALL, "backend": "single_token_edges", "plugins": plugins})
    with calls_of(llm) as calls:
        assert tokens(llm) == [greedy(path, prompt, 20) for prompt in PROMPTS]
    taken = sum(edges is not None for _, edges in calls)
    assert 0 < taken < len(calls)  # the backend itself fails in a step that it has not taken


def test_a_rounded_output_is_multiplied_by_quantized_weights_as_one_that_the_product_rounds(
    tiny: Callable[..., Path], engines: Callable[..., LLM]
) -> None:
    if not lanes():
        pytest.skip("this processor has no dot product of bytes")
    path = tiny("qwen3")
    quantized = {**SMALL, "weights.quantize": "int8", "weights.activation": "int8", "weights.linear": "vnni"}
    rounding, plain = (engines(path, **{**quantized, **way}) for way in ({"backend": "cpu"}, UNROUNDED))
    with calls_of(rounding) as calls:
        texts = tokens(rounding)
    assert texts == tokens(plain)
    last = max(index for index, _ in calls)
    given = [edges for index, edges in calls if index != last]
    assert given
    for edges in given:
        assert edges is not None
        assert edges.scales is not None
        assert edges.scales.shape[1] == edges.scales.numel() // len(edges.scales) > 0
    assert all("rounded" in group.edges for group in rounding.plan.groups)
    assert not any("rounded" in group.edges for group in plain.plan.groups)
