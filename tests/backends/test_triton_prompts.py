"""The Triton kernel for prompts that begin in this step, under the interpreter: right, chosen where it pays, left alone
where keys are in the cache alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attrs import evolve

pytest.importorskip("triton")

from slotline.backends.triton import TritonOptions
from slotline.backends.triton.backend import TritonBackend
from slotline.backends.triton.prompts import PromptAttention
from slotline.testing.environments.attention import Case, World

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled for the GPU here")

SHAPES = {
    "whole prompts": ((300, 300), (0, 0), (17, 17), (130, 130)),
    "behind decodes and a chunk": ((1, 33), (1, 300), (40, 90), (300, 300), (128, 128)),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": True},
    "heads first": {"layout": "HND"},
    "seven to one": {"num_heads": 28, "num_kv_heads": 4},
    "large scores": {"amplitude": 300.0},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The requests that the kernel serves, call by call."""
    seen: list[tuple[int, int]] = []
    original = PromptAttention.forward

    def forward(self: PromptAttention, *arguments: Any) -> None:
        launch = arguments[5]
        seen.append((launch.first, launch.end))
        original(self, *arguments)

    monkeypatch.setattr(PromptAttention, "forward", forward)
    return seen


def world_of(requests: Any, **changes: Any) -> World:
    options = {"requests": requests, "num_heads": 8, "num_kv_heads": 4, "head_size": 64, "dtype": torch.float16}
    return World(Case(**(options | changes)))


@pytest.mark.spread(2)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompts_attention_is_the_oracles(shape: str, features: str, served: list[tuple[int, int]]) -> None:
    world = world_of(SHAPES[shape], **FEATURES[features])
    world.check(*world.run(TritonBackend(world.case.context())))
    first = world.batch.num_decodes + (shape != "whole prompts")
    assert served == [(first, len(SHAPES[shape]))]


def test_another_prompts_bad_numbers_stay_its_own(served: list[tuple[int, int]]) -> None:
    world = world_of(((150, 150), (300, 300)))
    backend = TritonBackend(world.case.context())
    query, key, value = world.new_tokens()
    for states in (key, value):
        states[150:] = torch.nan
    plan, out = backend.plan(world.batch), torch.empty_like(query)
    backend.write(world.layer, key, value, world.cache, plan)
    backend.forward(world.layer, query, key, value, world.cache, plan, out)
    assert served
    assert torch.isfinite(out[:150]).all()
    assert out[150:].isnan().any()


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "changes",
    [{"window": 17}, {"soft_cap": 5.0}, {"head_size": 48}, {"kv_dtype": torch.float8_e4m3fn}, {"dtype": torch.float32}],
)
def test_what_the_kernel_does_not_know_is_read_from_the_cache(
    changes: dict[str, Any], served: list[tuple[int, int]]
) -> None:
    world = world_of(((300, 300),), **changes)
    world.check(*world.run(TritonBackend(world.case.context())))
    assert not served


@pytest.mark.parametrize("requests", [((1, 1), (60, 60)), ((300, 301),), ((1, 1),) * 3])
def test_few_tokens_and_requests_with_a_past_are_read_from_the_cache(
    requests: Any, served: list[tuple[int, int]]
) -> None:
    world = world_of(requests)
    world.check(*world.run(TritonBackend(world.case.context())))
    assert not served


def test_states_that_are_no_boxes_are_read_from_the_cache(served: list[tuple[int, int]]) -> None:
    world = world_of(((300, 300),))
    backend = TritonBackend(world.case.context())
    query, key, value = world.new_tokens()
    plan, out = backend.plan(world.batch), torch.empty_like(query)
    backend.write(world.layer, key, value, world.cache, plan)
    apart = torch.stack([key, key], dim=2)[:, :, 0]  # heads two sizes from one another
    lse = backend.forward(world.layer, query, apart, value, world.cache, plan, out)
    world.check(out, lse)
    assert not served


def test_the_option_leaves_all_keys_to_the_cache(served: list[tuple[int, int]]) -> None:
    world = world_of(((300, 300),))
    context = evolve(world.case.context(), options=TritonOptions(prompts="pages"))
    world.check(*world.run(TritonBackend(context)))
    assert not served
