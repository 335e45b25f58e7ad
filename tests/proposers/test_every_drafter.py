"""Every drafter that ships, on every attention backend that runs here: the text is the one without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import dflash_folders
import head_folders
import mtp_checkpoints
import pytest
from engine_driver import add, random_prompts, run_all
from tiny_models import VOCAB_SIZE

from slotline.core import LLM, SamplingParams
from tests.proposers.test_medusa import heads_of, written

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
SMALLER = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
POOLS = {"eagle": "160KiB", "dflash": "220KiB", "eagle3": "160KiB", "draft_model": "160KiB", "mtp": "160KiB"}
"""Memory for the longest request and little more, where a drafter has layers of its own; 128 KiB elsewhere."""


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Callable[[str], tuple[Path, Path | None]]:
    """The checkpoint that a drafter drafts for, and the drafter's own folder."""
    root, made = tmp_path_factory.mktemp("drafters"), dict[str, tuple[Path, Path | None]]()

    def build(name: str) -> tuple[Path, Path | None]:
        model = tiny("llama_deep" if name in ("eagle3", "dflash") else "llama")
        if name in ("eagle", "eagle3"):
            return model, head_folders.build(root / name, model, name)
        if name == "dflash":
            return model, dflash_folders.build(root / name, model)
        if name.startswith("medusa"):
            return model, written(root / name, heads_of(64, VOCAB_SIZE), "shared")
        if name == "draft_model":
            return model, tiny("llama", **SMALLER)
        if name == "mtp":
            return mtp_checkpoints.build(root / name, tiny("qwen2"), "qwen2"), None
        return model, None

    def get(name: str) -> tuple[Path, Path | None]:
        made[name] = made.get(name) or build(name)
        return made[name]

    return get


@pytest.mark.spread(10)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(
    "name", ["ngram", "suffix", "eagle", "eagle3", "dflash", "medusa", "medusa_tree", "draft_model", "mtp", "grammar"]
)
def test_greedy_texts_are_those_without_a_drafter(
    name: str, backend: str, heads: Callable[[str], tuple[Path, Path | None]], engines: Engines
) -> None:
    """40 requests of any length, in chunks, through a pool that is too small; half go on from a shared prefix."""
    path, folder = heads(name)
    rng = Random(f"{name} {backend}")
    beginnings = random_prompts((16, 32), seed=5)
    prompts = random_prompts([rng.randint(1, 30) for _ in range(40)], seed=rng.randint(0, 10**6))
    prompts = [rng.choice(beginnings) + p[:8] if rng.random() < 0.5 else p for p in prompts]
    params = [SamplingParams(temperature=0, max_tokens=rng.randint(1, 14), ignore_eos=True) for _ in prompts]
    expected = [o.outputs[0].token_ids for o in engines(path).generate(prompts, params)]
    settings: dict[str, Any] = {"drafter.name": name, "drafter.tokens": rng.choice((1, 2, 3, 4))}
    if folder is not None:
        settings["drafter.path"] = str(folder)
    llm = engines(
        path, **settings, backend=backend, memory=POOLS.get(name, "128KiB"), max_num_batched_tokens=24, max_num_seqs=6
    )
    requests = [add(llm, str(i), p, each) for i, (p, each) in enumerate(zip(prompts, params, strict=True))]
    run_all(llm)
    assert [r.output_token_ids for r in requests] == expected
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    assert drafting.counts.failures == 0
    assert drafting.counts.proposed > 0 or name == "grammar"  # which drafts where a grammar forces tokens
    assert sum(r.metrics.num_preemptions for r in requests) > 0
    assert sum(r.metrics.num_cached_tokens > 0 for r in requests) > 5
