"""Engines with stores of blocks, and what tests of these stores ask of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_driver import random_prompts
from tiny_engines import DEFAULTS, everything_returned

from slotline.core import LLM, SamplingParams

PROMPTS = random_prompts([33, 40, 37, 26], seed=5)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {
    **DEFAULTS,
    "block_size": 4,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 3,
    "scheduler.async": False,
    "kv_connector.leave_out_slow": False,
}


def on_disk(folder: Path, *, name: str = "disk", **options: Any) -> dict[str, Any]:
    """Settings of an engine whose blocks are files in a folder, with the connector of this name."""
    given = {"folder": str(folder), "staging": "1MiB", "size": "1GiB", **options}
    return {"kv_connector.name": name, **{f"kv_connector.{name}.{key}": value for key, value in given.items()}}


def connector_of(llm: LLM) -> Any:
    """The connector of an engine."""
    return llm.engine.extension("kv_transfer").transfers.connector


def events_of(llm: LLM) -> dict[str, float]:
    """The events that metrics show."""
    return dict(llm.engine.extension("kv_transfer").counts.events[0])


def texts(llm: LLM, prompts: list[list[int]] = PROMPTS) -> tuple[list[list[int]], int]:
    """The tokens of prompts after the pool has forgotten all, and how many of their tokens were loaded."""
    llm.engine.scheduler.cache.pool.reset()
    outputs = llm.generate(prompts, SHORT)
    connector = connector_of(llm)
    if hasattr(connector, "flush"):
        assert connector.flush(20.0)
    return [list(one.outputs[0].token_ids) for one in outputs], sum(o.metrics.num_loaded_tokens for o in outputs)


def settled(llm: LLM) -> None:
    """Nothing is left over, once all loads have ended."""
    llm.engine.extension("kv_transfer").transfers.finish()
    llm.engine.step()
    everything_returned(llm)


def in_shared_memory(folder: Path, **options: Any) -> dict[str, Any]:
    """Settings of an engine whose blocks lie in memory that engines share."""
    given = {"folder": str(folder), "staging": "1MiB", "memory": "1MiB", **options}
    return {"kv_connector.name": "shared", **{f"kv_connector.shared.{key}": value for key, value in given.items()}}


def in_tiers(*names: str, **options: Any) -> dict[str, Any]:
    """Settings of an engine with tiers. The options are those of tiers, as `NAME.KEY`."""
    return {
        "kv_connector.name": "tiers",
        "kv_connector.tiers.tiers": names,
        **{f"kv_connector.{key}": value for key, value in options.items()},
    }
