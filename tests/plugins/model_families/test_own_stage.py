"""One stage of a model alone: the stages in a row give the whole model's numbers, and none keeps another's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from slotline.plugins.model_families.decoder import DecoderOptions
from slotline.plugins.model_families.loops import plain_advance, plain_attend
from slotline.plugins.model_families.transformers_model import DecoderModel, TransformersDecoder
from slotline.registry.contracts.model_family import ModelContext, ModelFacts, Stage

Tiny = Callable[..., Path]
TOKENS = 12
QUICK = ("llama_deep", "gemma3", "granite", "bamba", "qwen3_next")
SLOW = (
    *("llama_tied", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "gpt_oss", "mixtral", "olmo2", "deepseek_v3"),
    *("minicpm3", "bloom", "falcon_rotary", "mamba", "jamba", "falcon_h1", "granite_moe_hybrid", "nemotron_h", "lfm2"),
    "recurrent_gemma",
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stages_of(facts: ModelFacts, first: int) -> tuple[Stage, Stage]:
    """Two stages, the second from layer `first` on."""
    assert facts.parts is not None
    total = len(facts.parts.layers)
    return tuple(  # type: ignore[return-value]
        Stage(device="cpu", first_layer=start, end_layer=end, num_parameters=0)
        for start, end in ((0, first), (first, total))
    )


def load(facts: ModelFacts, stage: Stage | None, *, optimize: bool = False, lean: bool = True) -> DecoderModel:
    return TransformersDecoder().load(
        ModelContext(
            contract=1,
            facts=facts,
            device="cpu",
            dtype="float32",
            optimize=optimize,
            options=DecoderOptions(lean=lean),
            own_stage=stage,
        )
    )


@torch.no_grad()
def run(model: DecoderModel, received: torch.Tensor | None = None, wanted: torch.Tensor | None = None) -> torch.Tensor:
    tokens = torch.arange(TOKENS) * 3 % 100 + 2
    advance = plain_advance if model.facts.state_layers else None
    return model.forward(tokens, torch.arange(TOKENS), plain_attend, wanted, advance=advance, received=received)


@pytest.mark.behaviour(90, 98)
@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SLOW)])
def test_stages_in_a_row_give_the_numbers_of_the_whole_model(family: str, tiny: Tiny) -> None:
    facts = TransformersDecoder().inspect(tiny(family))
    whole, wanted = load(facts, None, lean=False), torch.tensor([2, TOKENS - 1])
    expected = whole.compute_logits(run(whole, wanted=wanted))
    for lean, optimize in ((False, False), (True, True)):
        first, last = (load(facts, stage, lean=lean, optimize=optimize) for stage in stages_of(facts, 1))
        sent = run(first)
        assert sent.shape == (TOKENS, facts.hidden_size)
        found = last.compute_logits(run(last, sent, wanted))
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["zamba2", "gemma3n"])
def test_layers_that_read_more_than_hidden_states_are_known(family: str, tiny: Tiny) -> None:
    parts = TransformersDecoder().inspect(tiny(family)).parts
    assert parts is not None
    assert not parts.chained


def test_a_stage_keeps_no_weights_of_other_stages(tiny: Tiny) -> None:
    facts = TransformersDecoder().inspect(tiny("llama_tied"))
    whole = load(facts, None)
    first, last = (load(facts, stage) for stage in stages_of(facts, 1))
    names = [dict(model.hf_model.named_parameters()) for model in (first, last)]
    assert {name.split(".")[2] for name in names[0] if ".layers." in name} == {"0"}
    assert "0" not in {name.split(".")[2] for name in names[1] if ".layers." in name}
    assert "model.embed_tokens.weight" in names[0]
    assert "model.embed_tokens.weight" not in names[1]
    assert "lm_head.weight" in names[1]
    assert "model.norm.weight" in names[1]
    assert "lm_head.weight" not in names[0]
    tied = whole.hf_model.lm_head.weight.numel()
    held = [sum(one.numel() for one in own.values()) for own in names]
    assert sum(held) == sum(one.numel() for one in whole.hf_model.parameters()) + tied


def test_a_stages_weights_are_read_again_in_place(tiny: Tiny) -> None:
    facts = TransformersDecoder().inspect(tiny("llama_deep"))
    for optimize in (False, True):
        last = load(facts, stages_of(facts, 2)[1], optimize=optimize)
        received = torch.randn(TOKENS, facts.hidden_size)
        before, places = run(last, received), [one.data_ptr() for one in last.hf_model.parameters()]
        for parameter in last.hf_model.parameters():
            parameter.zero_()
        last.reload_weights()
        torch.testing.assert_close(run(last, received), before)
        assert [one.data_ptr() for one in last.hf_model.parameters()] == places
