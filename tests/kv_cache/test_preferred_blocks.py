"""A model with a backend that prefers large blocks: `auto` gives it these, and prefixes are found in steps of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slotline.core import LLM, SamplingParams

PLUGIN = """
from attrs import evolve

from slotline.backends.torch_sdpa import descriptor as plain
from slotline.registry.capability import Align

offer = evolve(plain.capabilities, preferred_block_sizes=Align(multiple_of=32))
descriptor = evolve(plain, name="large_blocks", capabilities=offer, probe=None)
"""
PROMPT = list(range(5, 60))


@pytest.mark.parametrize(("asked", "size"), [("auto", 32), (16, 16)])
def test_auto_gives_the_preferred_blocks_and_prefixes_are_found_in_steps_of_them(
    asked: Any, size: int, tiny: Callable[..., Path], greedy: Any, tmp_path: Path
) -> None:
    (tmp_path / "large_blocks.py").write_text(PLUGIN)
    path, settings = tiny("llama"), {"plugins.inline": (f"{tmp_path}/large_blocks.py:descriptor",)}
    settings |= {"cache.block_size": asked, "observability.check_integrity": True, "observability.progress": False}
    llm = LLM(model=str(path), backend="large_blocks", dtype="float32", max_model_len=64, memory="4MiB", **settings)
    (group,) = llm.plan.groups
    assert (group.backend, llm.plan.block_size, group.kernel_block_size) == ("large_blocks", size, size)
    assert "N305" in llm.plan.explain()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for cached in (0, len(PROMPT) // size * size):
        (found,) = llm.generate([PROMPT], params)
        assert found.outputs[0].token_ids == greedy(path, PROMPT, 8)
        assert found.metrics.num_cached_tokens == cached
