"""Blocks of an adapter in each store: they are found by who has that adapter, and by nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kv_tier_engines import PROMPTS, SHORT, SMALL, connector_of, in_shared_memory, in_tiers, on_disk, settled
from lora_cases import PeftOracle

from slotline.core import LLM, LoRARequest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89)]

Tiny = Callable[..., Path]
Tokens = list[list[int]]
TIGHT: dict[str, Any] = {**SMALL, "max_model_len": 64, "memory": "80KiB", "lora.name": "torch"}


def said(llm: LLM, adapter: LoRARequest | None) -> tuple[Tokens, int]:
    """The tokens of prompts that come one by one, and how many of theirs were loaded."""
    tokens, loaded = Tokens(), 0
    for prompt in PROMPTS:
        (output,) = llm.generate([prompt], SHORT, lora_request=adapter)
        tokens.append(list(output.outputs[0].token_ids))
        loaded += output.metrics.num_loaded_tokens
    connector = connector_of(llm)
    if hasattr(connector, "flush"):
        assert connector.flush(20.0)
    return tokens, loaded


@pytest.fixture(scope="module")
def adapter(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    folder = tmp_path_factory.mktemp("adapters")
    PeftOracle(tiny("llama"), folder, {"mine": {}})
    return LoRARequest("mine", 1, str(folder / "mine"))


@pytest.fixture(scope="module")
def want(tiny: Tiny, adapter: LoRARequest) -> tuple[Tokens, Tokens]:
    """The tokens with the adapter and without it."""
    llm = LLM(tiny("llama"), **{**TIGHT, "memory": "4MiB"})
    found = [llm.generate(PROMPTS, SHORT, lora_request=one) for one in (adapter, None)]
    with_it, without = ([list(output.outputs[0].token_ids) for output in outputs] for outputs in found)
    assert with_it != without
    return with_it, without


@pytest.mark.parametrize("name", ["host_memory", "disk", "shared", "tiers"])
def test_blocks_of_an_adapter_are_nobody_elses(
    name: str, tiny: Tiny, adapter: LoRARequest, want: tuple[Tokens, Tokens], tmp_path: Path
) -> None:
    settings: dict[str, dict[str, Any]] = {
        "host_memory": {"kv_connector.name": "host_memory", "kv_connector.host_memory.memory": "1MiB"},
        "disk": on_disk(tmp_path),
        "shared": in_shared_memory(tmp_path),
        "tiers": in_tiers("host_memory", "disk", **{"host_memory.memory": "24KiB", "disk.folder": str(tmp_path)}),
    }
    llm = LLM(tiny("llama"), **TIGHT, **settings[name])
    assert said(llm, adapter) == (want[0], 0)
    assert said(llm, None) == (want[1], 0)
    for one, tokens in ((adapter, want[0]), (None, want[1])):
        llm.engine.scheduler.cache.pool.reset()
        again, loaded = said(llm, one)
        assert again == tokens
        assert loaded > 0
    settled(llm) if name != "host_memory" else None
