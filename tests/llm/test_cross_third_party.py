"""Somebody else's family with cross-attention: encoders of different lengths, some longer than the model."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import listening_family
import pytest
import sound_family
import torch
from engine_driver import GREEDY, recorded
from listening_family import CROSS, MAX_ENCODER_LEN, ListeningFamily, ListeningModel
from tiny_engines import DEFAULTS, everything_returned

from slotline.core import LLM
from slotline.registry.contracts import ModelContext
from slotline.registry.errors import RequestError

LENGTHS = [1, 4, 17, MAX_ENCODER_LEN, 16, 5, 33]


def engine(path: Path, **settings: Any) -> LLM:
    own = {"plugins": [f"{listening_family.__file__}:descriptor"], "block_size": 4, "max_model_len": 32}
    return LLM(path, **{**DEFAULTS, **own, **settings})


def attend(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: None) -> torch.Tensor:
    parts = (part.transpose(0, 1)[None] for part in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=layer is not CROSS, scale=layer.scale)
    return out[0].transpose(0, 1)


def greedy(model: ListeningModel, tokens: list[int], sound: list[float], count: int) -> list[int]:
    """The model without a cache: all tokens again for each new one."""
    tokens, (states,) = list(tokens), model.encode("sound", [model.process("sound", sound).inputs])
    for _ in range(count):
        out = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attend, encoder_states=states)
        tokens.append(int(model.compute_logits(out)[-1].argmax()))
    return tokens[-count:]


@pytest.mark.parametrize("memory", ["256KiB", "24KiB"])
@pytest.mark.parametrize("max_batched_tokens", [3, 64])
@pytest.mark.behaviour(13, 69, 82)
def test_encoders_of_different_lengths_are_served_together(
    max_batched_tokens: int, memory: str, tmp_path: Path
) -> None:
    path, rng = sound_family.checkpoint(tmp_path), Random(0)
    llm = engine(path, max_num_batched_tokens=max_batched_tokens, memory=memory)
    context = ModelContext(contract=1, facts=ListeningFamily().inspect(path), device="cpu", dtype="float32")
    model = ListeningModel(context)
    prompts = [[rng.randrange(7, 64) for _ in range(1 + place)] for place in range(len(LENGTHS))]
    sounds = [[rng.uniform(-3, 3) for _ in range(length)] for length in LENGTHS]
    with recorded(llm) as steps:
        outputs = llm.generate(
            [
                {"prompt_token_ids": prompt, "multi_modal_data": {"sound": [sound]}}
                for prompt, sound in zip(prompts, sounds, strict=True)
            ],
            GREEDY,
        )
    expected = [greedy(model, prompt, sound, 20) for prompt, sound in zip(prompts, sounds, strict=True)]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert (sum(len(step.preempted) for step in steps) > 0) == (memory == "24KiB")
    everything_returned(llm)


def test_a_longer_encoder_than_the_model_reads_is_refused(tmp_path: Path) -> None:
    llm = engine(sound_family.checkpoint(tmp_path))
    with pytest.raises(RequestError, match="the sound has 41 embeddings, and cross-attention reads 40 at most"):
        llm.generate({"prompt_token_ids": [7], "multi_modal_data": {"sound": [[0.5] * (MAX_ENCODER_LEN + 1)]}}, GREEDY)
    assert not llm.engine.has_work


def test_a_request_that_the_pool_cannot_hold_counts_the_encoders_blocks(tmp_path: Path) -> None:
    llm = engine(sound_family.checkpoint(tmp_path))
    cache = llm.engine.scheduler.cache
    assert cache.blocks_for_one(32, MAX_ENCODER_LEN) == 8 + 10
    assert cache.blocks_for_one(5, 1) == 2 + 1
