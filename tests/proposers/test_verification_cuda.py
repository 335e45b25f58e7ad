"""Verification on a GPU: nothing waits for the device, and text is what it is on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_driver import random_prompts

from slotline.core import LLM, SamplingParams
from slotline.registry.contracts import Draft, DraftBatch
from tests.proposers.test_drafting import drafted_by
from tests.proposers.test_verification import VOCAB, Bigram, K

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class OnDevice(Bigram):
    """The same proposals, on the engine's device."""

    def propose(self, batch: DraftBatch) -> Draft:
        device = batch.last_token_ids.device
        batch.last_token_ids = batch.last_token_ids.cpu()
        draft = super().propose(batch)
        probabilities = None if draft.probabilities is None else draft.probabilities.to(device)
        return Draft(token_ids=draft.token_ids.to(device), probabilities=probabilities)


@pytest.mark.parametrize("how", ["probabilities", "one-point"])
def test_verification_waits_for_nothing_and_its_text_is_the_cpus(how: str, tmp_path: Path) -> None:
    torch.set_float32_matmul_precision("highest")
    path = tiny_models.build("llama_deep", tmp_path, 0, vocab_size=VOCAB, initializer_range=0.2)
    prompts = random_prompts((4, 9, 2, 7, 12), seed=1, vocab_size=VOCAB)
    params = [SamplingParams(temperature=float(i > 0), seed=i, max_tokens=20, ignore_eos=True) for i in range(5)]
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "memory": "16MiB", "drafter.name": "ngram"}
    texts = {}
    for device in ("cpu", "cuda"):
        llm = LLM(path, device=device, **options, **{"drafter.tokens": K, "drafter.adaptive": False})
        if device == "cuda":
            llm.engine.runner.head.start = _strict(llm.engine.runner.head.start)  # type: ignore[method-assign]
        with drafted_by(llm, OnDevice(how)):
            texts[device] = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
            assert llm.engine.extension("drafts").drafting.counts.accepted > 10
            assert llm.engine.extension("drafts").drafting.counts.failures == 0
    assert texts["cuda"] == texts["cpu"]


def test_ragged_drafts_replay_the_graph_of_whole_ones(tmp_path: Path) -> None:
    path = tiny_models.build("llama_deep", tmp_path, 0, vocab_size=VOCAB, initializer_range=0.2)
    options: dict[str, Any] = {
        "max_model_len": 64,
        "memory": "16MiB",
        "drafter.name": "ngram",
        "drafter.tokens": K,
        "drafter.adaptive": False,
    }
    llm = LLM(path, device="cuda", backend="triton", **options)
    shapes, inner = [], llm.engine._graph_shape
    llm.engine._graph_shape = lambda *given, **more: shapes.append(inner(*given, **more)) or shapes[-1]  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with drafted_by(llm, OnDevice("ends early")):
        llm.generate(random_prompts((4, 9, 2, 7), seed=1, vocab_size=VOCAB), params)
    assert sum(shape is not None and shape.query_len == 1 + K for shape in shapes) > len(shapes) / 2


def _strict(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The call, with every wait for the device an error."""

    def strictly(argument: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(argument)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return strictly
