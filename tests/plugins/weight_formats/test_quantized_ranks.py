"""Quantized weights over several ranks: each has its part of codes and scales, and answers are the whole model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as forms
import tiny_models
from quantized_engines import PROMPT, answer, engine, expected, same
from thread_ranks import ThreadRanks
from tiny_engines import DEFAULTS

from slotline.core import LLM, LoRARequest, SamplingParams
from slotline.registry.errors import ModelError, NegotiationError

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 383}  # tokens that two ranks do not divide


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("plain") / "model", **SIZES)


def over_ranks(path: Path, **settings: Any) -> ThreadRanks:
    return ThreadRanks(path, **{**DEFAULTS, "weights.activation": "none", "optimize": True, **settings})


def answered(path: Path, **settings: Any) -> tuple[list[int], list[float]]:
    ranks = over_ranks(path, **settings)
    found = ranks.same(answer)
    ranks.close()
    return found


@pytest.mark.parametrize(
    "form",
    [
        "compressed-tensors FP8 block",
        "compressed-tensors W4A16 with zero points",
        "AWQ",
        pytest.param("compressed-tensors W8A16", marks=pytest.mark.slow),
        pytest.param("compressed-tensors FP8 tensor", marks=pytest.mark.slow),
        pytest.param("GPTQ", marks=pytest.mark.slow),
        pytest.param("bitsandbytes NF4", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_answers_over_ranks_like_the_dequantized_model(form: str, plain: Path, tmp_path: Path) -> None:
    forms.write(forms.FORMS[form], plain, tmp_path / "quantized", tmp_path / "meant")
    same(answered(tmp_path / "quantized"), expected(tmp_path / "meant"))


def test_act_order_keeps_all_groups_of_a_part(plain: Path, tmp_path: Path) -> None:
    forms.write(forms.FORMS["GPTQ with act order"], plain, tmp_path / "quantized", tmp_path / "meant")
    same(answered(tmp_path / "quantized"), expected(tmp_path / "meant"))
    with pytest.raises(NegotiationError, match="groups have equal numbers of inputs"):
        over_ranks(tmp_path / "quantized", **{"weights.linear": "numba"})


@pytest.mark.parametrize("method", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_plain_weights_are_quantized_whole_and_then_cut(method: str, plain: Path) -> None:
    settings = {"weights.quantize": method}
    same(answered(plain, **settings), answer(engine(plain, optimize=True, **settings)))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_experts_of_one_file_each_are_divided(family: str, tmp_path: Path) -> None:
    plain = forms.two_layers(tmp_path / "plain", family)
    form = forms.Form(
        config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4], "activation_scheme": "dynamic"},
        write=forms.fp8((4, 4), "weight_scale_inv"),
    )
    forms.write(form, plain, tmp_path / "quantized", tmp_path / "meant")
    same(answered(tmp_path / "quantized"), expected(tmp_path / "meant"))


def test_experts_that_are_stored_together_are_divided_with_their_biases(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "intermediate_size": 128}
    plain = tiny_models.build("gpt_oss", tmp_path / "plain", **sizes)
    forms.gpt_oss(plain, tmp_path / "quantized", tmp_path / "meant")
    same(answered(tmp_path / "quantized"), expected(tmp_path / "meant"))


def test_weights_are_reloaded_and_adapters_join(plain: Path, tmp_path: Path) -> None:
    forms.write(forms.FORMS["compressed-tensors W8A16"], plain, tmp_path / "quantized", tmp_path / "meant")
    adapter = LoRARequest("one", 1, str(forms.adapter(tmp_path / "adapter", plain, ("q_proj", "v_proj", "down_proj"))))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    settings = {"lora.name": "torch", "lora.max_rank": 4}

    def tokens(llm: LLM) -> list[list[int]]:
        prompts = [{"prompt_token_ids": PROMPT}] * 2
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, lora_request=[adapter, None])]

    ranks = over_ranks(tmp_path / "quantized", **settings)
    found = ranks.same(tokens)
    assert found == tokens(engine(tmp_path / "meant", **settings))
    assert found[0] != found[1]

    def wiped(llm: LLM) -> None:
        for name, tensor in llm.engine.runner.model.hf_model.named_buffers():  # type: ignore[attr-defined]
            if name.endswith("codes"):
                tensor.zero_()

    ranks.each(wiped)
    ranks.each(lambda llm: llm.reload_weights())
    assert ranks.same(tokens) == found
    ranks.close()


def test_a_cut_inside_a_group_is_refused_by_name(plain: Path, tmp_path: Path) -> None:
    forms.write(forms.FORMS["DeepSeek FP8 blocks"], plain, tmp_path / "quantized", tmp_path / "meant")
    with pytest.raises(NegotiationError, match=r"k_proj, fp8 in blocks of 64x40, .* 32 outputs, and 64 share a scale"):
        over_ranks(tmp_path / "quantized")
    odd = tiny_models.build("llama", tmp_path / "odd", num_hidden_layers=2)  # 96 intermediate numbers
    with pytest.raises(NegotiationError, match=r"down_proj, int4 in groups of 32, .* 48 inputs, and 32 share a scale"):
        over_ranks(odd, **{"weights.quantize": "int4"})


def test_weights_of_ranks_are_neither_saved_nor_read_as_saved(plain: Path, tmp_path: Path) -> None:
    ranks = over_ranks(plain)
    with pytest.raises(ModelError, match="divided among 2 ranks, and each has a part"):
        ranks.llms[0].save_weights(tmp_path / "part")
    ranks.close()
    engine(plain, optimize=True).save_weights(tmp_path / "saved")
    with pytest.raises(NegotiationError, match="saved after the passes of one rank"):
        over_ranks(tmp_path / "saved")
