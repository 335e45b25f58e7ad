"""Encoder outputs are handed over by the hashes of their items: the engine that decodes runs no encoder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_vision
from handoff_engines import FIRST, PREFILL, SHORT, SMALL, connector_of, decode_settings, settled

from slotline.core import LLM

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(38, 89, 96)]

SIZES: dict[str, Any] = {**SMALL, "block_size": 16, "max_num_batched_tokens": 48}
"""Of blocks that have room for an image, so that it lies in the last one, which is not handed over."""
IMAGES = [[0], [1], [0, 2], [1, 0]]
"""Some images come twice."""


def prompts(answer: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    more = {} if answer is None else {"kv_transfer_params": answer}
    texts = [f"look {tiny_vision.IMAGE_TOKEN * len(seeds)} and say" for seeds in IMAGES]
    images = [[tiny_vision.image(seed) for seed in seeds] for seeds in IMAGES]
    return [{"prompt": t, "multi_modal_data": {"image": i}, **more} for t, i in zip(texts, images, strict=True)]


def tokens_of(llm: LLM, answer: dict[str, Any] | None = None) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts(answer), SHORT)]


@pytest.fixture(scope="module")
def trio(tiny_vision_model: Callable[[str], Path]) -> tuple[LLM, LLM, list[list[int]]]:
    path = tiny_vision_model("llava")
    prefill = LLM(path, **SIZES, **PREFILL)
    decode = LLM(path, **SIZES, **decode_settings(connector_of(prefill)._server.address))
    return prefill, decode, tokens_of(LLM(path, **SIZES))


@pytest.mark.parametrize("fault", ["none", "lost", "corrupt", "wrong form", "gone"])
def test_the_decoder_runs_no_encoder_unless_an_output_is_lost(
    trio: tuple[LLM, LLM, list[list[int]]], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode, want = trio
    for llm in (prefill, decode):
        llm.engine.forget_prefixes()
        llm.engine.extension("multimodal").reset()
    (peer,) = connector_of(decode)._peers.values()
    peer._failed_at = None
    asked = {"do_remote_decode": True}
    prefill.generate([{**one, "kv_transfer_params": asked} for one in prompts()], FIRST)
    answer = dict(prefill.engine.extension("kv_transfer").answer(asked))
    items = connector_of(prefill)._items
    assert len(items.find([], 5.0)) == 0
    latest = time.monotonic() + 20
    while len(items._outputs) < 3 and time.monotonic() < latest:
        time.sleep(0.01)
    assert len(items._outputs) == 3  # each image is encoded once
    if fault == "lost":
        items.clear()
    elif fault == "corrupt":
        for one, output in list(items._outputs.items()):
            items._outputs[one] = output._replace(data=output.data[::-1])
        monkeypatch.setattr(type(output), "described", lambda one: [list(one.shape), one.dtype, len(one.data), 7])
    elif fault == "wrong form":
        for one, output in list(items._outputs.items()):
            items._outputs[one] = output._replace(shape=(output.shape[1], output.shape[0]))
    elif fault == "gone":
        peer._disconnect()
        monkeypatch.setattr(peer, "_address", ("127.0.0.1", 1))
    encoder, encoded = decode.engine.extension("multimodal").encoder, list[int]()
    encode = encoder.model.encode

    def counted(modality: str, inputs: Any) -> Any:
        encoded.append(len(inputs))
        return encode(modality, inputs)

    monkeypatch.setattr(encoder.model, "encode", counted)
    taken = encoder.share.loaded
    assert tokens_of(decode, answer) == want
    assert (sum(encoded) == 0, encoder.share.loaded > taken) == (fault == "none", fault in ("none", "wrong form"))
    settled(decode)
    settled(prefill)
