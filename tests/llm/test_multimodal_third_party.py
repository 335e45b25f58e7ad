"""Somebody else's model family with a modality of its own, and how a prompt's items are put in their places."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import sound_family
import torch
from engine_driver import GREEDY, recorded_items
from sound_family import EDGE, SOUND, SoundFamily, SoundModel
from tiny_engines import DEFAULTS

from slotline.core import LLM
from slotline.plugins.multimodal.prompt_reader import PromptReader
from slotline.registry.config.schema import MultimodalConfig
from slotline.registry.contracts import ModelContext, ProcessedItem
from slotline.registry.errors import ModelError, RequestError


def model_of(path: Path) -> SoundModel:
    return SoundModel(
        ModelContext(contract=1, facts=SoundFamily().inspect(path), device="cpu", dtype="float32", optimize=False)
    )


def greedy(model: SoundModel, tokens: list[int], sounds: Sequence[Sequence[float]], count: int) -> list[int]:
    """The model without a cache: all tokens again for each new one."""
    tokens = list(tokens)
    heard = torch.cat([torch.zeros(0, 1), *(torch.tensor(sound)[:, None] for sound in sounds)]) @ model.ear
    hears = torch.tensor([token == SOUND for token in tokens])
    for _ in range(count):
        hidden = model.embed(torch.tensor(tokens))
        hidden[: len(hears)][hears] = heard
        out = model.forward(torch.zeros(0), torch.zeros(0), _causal, None, hidden)
        tokens.append(int(model.compute_logits(out)[-1].argmax()))
    return tokens[-count:]


def _causal(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: None) -> torch.Tensor:
    query, key, value = (one.transpose(0, 1)[None] for one in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=layer.scale)
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("max_batched_tokens", [3, 64])
def test_a_strangers_family_hears_sounds_between_edge_tokens(max_batched_tokens: int, tmp_path: Path) -> None:
    path, rng = sound_family.checkpoint(tmp_path), Random(0)
    llm = LLM(
        path,
        **{
            **DEFAULTS,
            "plugins": [f"{sound_family.__file__}:descriptor"],
            "scheduler.max_batched_tokens": max_batched_tokens,
            "multimodal.cache_tokens": 8,
            "block_size": 4,
        },
    )
    model, prompts, expected = model_of(path), [], []
    for _ in range(6):
        sounds = [[rng.uniform(-1, 1) for _ in range(rng.randint(1, 7))] for _ in range(rng.randint(0, 2))]
        ids, whole = [rng.randrange(10, 60)], list[int]()
        whole += ids
        for sound in sounds:
            word = rng.randrange(10, 60)
            ids += [SOUND, word]
            whole += [EDGE, *[SOUND] * len(sound), EDGE, word]
        prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"sound": sounds}})
        expected.append((whole, greedy(model, whole, sounds, 20)))
    with recorded_items(llm) as steps:
        outputs = llm.generate(prompts, GREEDY)
    assert [(o.prompt_token_ids, o.outputs[0].token_ids) for o in outputs] == expected
    assert any(step.features for step in steps)
    with pytest.raises(RequestError, match=r"sound=\[\] is no list of numbers"):
        llm.generate({"prompt_token_ids": [SOUND], "multi_modal_data": {"sound": [[]]}})


class TwoKinds:
    """Processes two modalities: `a` to [10, 1, 1], `b` to [2]."""

    def process(self, modality: str, item: Any) -> ProcessedItem:
        tokens = {"a": [10, 1, 1], "b": [2]}[modality]
        return ProcessedItem(modality=modality, token_ids=tokens, inputs={"x": torch.tensor([item])})


def reader(path: Path, *, embedded: int = 1) -> PromptReader:
    from attrs import evolve

    from slotline.registry.contracts import Modality

    modalities = (Modality(name="a", placeholder_token_id=embedded), Modality(name="b", placeholder_token_id=2))
    facts = evolve(SoundFamily().inspect(path), modalities=modalities)
    return PromptReader(TwoKinds(), facts, MultimodalConfig())  # type: ignore[arg-type]


def test_items_of_two_modalities_move_each_other_and_come_in_the_prompts_order(tmp_path: Path) -> None:
    tokens, features = reader(tmp_path).read([9, 2, 1, 8, 1, 2], {"b": [5, 6], "a": [3, 4]})
    assert tokens == [9, 2, 10, 1, 1, 8, 10, 1, 1, 2]
    assert [(one.modality, one.positions.tolist()) for one in features] == [
        ("b", [1]),
        ("a", [3, 4]),
        ("a", [7, 8]),
        ("b", [9]),
    ]
    assert [one.inputs["x"].item() for one in features] == [5, 3, 4, 6]


def test_a_prompt_that_is_expanded_already_is_left_as_it_is(tmp_path: Path) -> None:
    expanded = [9, 10, 1, 1, 10, 1, 1, 8]
    tokens, features = reader(tmp_path).read(expanded, {"a": [3, 4]})
    assert tokens == expanded
    assert [one.positions.tolist() for one in features] == [[2, 3], [5, 6]]


@pytest.mark.parametrize("tokens", [[9, 10, 1, 1, 1, 1], [10, 1, 1], [1, 1, 1], []])
def test_a_prompt_that_is_neither_is_refused(tokens: list[int], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"the prompt has {tokens.count(1)} a placeholder"):
        reader(tmp_path).read(tokens, {"a": [3, 4, 5, 6, 7][: 2 if tokens.count(1) != 2 else 3]})


def test_an_item_without_a_placeholder_token_is_the_familys_fault(tmp_path: Path) -> None:
    strange = reader(tmp_path, embedded=7)
    with pytest.raises(ModelError, match="a processed item of modality 'a' has no placeholder token 7"):
        strange.read([7], {"a": 3})


def test_hashes_are_of_bytes_dtype_shape_and_modality(tmp_path: Path) -> None:
    def hashes(data: dict[str, Any], tokens: list[int]) -> list[str]:
        return [one.mm_hash for one in reader(tmp_path).read(tokens, data)[1]]

    same = hashes({"a": [3, 3, 4]}, [1, 1, 1])
    assert same[0] == same[1] != same[2]
    assert len({same[0], *hashes({"a": [3.0, [3]]}, [1, 1]), *hashes({"b": [3]}, [2])}) == 4
