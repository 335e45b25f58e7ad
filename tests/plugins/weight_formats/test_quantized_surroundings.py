"""Quantized weights among other features: files in parts, tied heads, cache scales, pooling, invariance, a library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import quantized_checkpoints as forms
import tiny_models
import torch
from quantized_engines import answer, engine, expected, same
from safetensors.torch import load_file, save_file

from slotline.backends.linear.vnni_kernels import lanes
from slotline.core import SamplingParams
from slotline.plugins.weight_formats.online import quantize
from slotline.registry.contracts.weights import WeightScheme
from slotline.registry.errors import NegotiationError

W8 = "compressed-tensors W8A16"
INVARIANT = {"backend": "cpu", "optimize": True, "batch_invariant": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forms.two_layers(tmp_path_factory.mktemp("plain"))


def written(plain: Path, tmp_path: Path, form: str = W8) -> tuple[Path, Path]:
    folders = tmp_path / "quantized", tmp_path / "meant"
    forms.write(forms.FORMS[form], plain, *folders)
    return folders


def rename(path: Path, old: str, new: str) -> None:
    tensors = load_file(path / "model.safetensors")
    changed = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}
    save_file(changed, path / "model.safetensors", {"format": "pt"})


def test_tensors_in_several_files_are_read_through_the_index(plain: Path, tmp_path: Path) -> None:
    quantized, meant = written(plain, tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    (quantized / "model.safetensors").unlink()
    table = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        own = {key: t for place, (key, t) in enumerate(sorted(tensors.items())) if place % 2 == number - 1}
        save_file(own, quantized / name, {"format": "pt"})
        table |= dict.fromkeys(own, name)
    (quantized / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    same(answer(engine(quantized)), expected(meant))


def test_names_without_the_bodys_prefix_are_found(plain: Path, tmp_path: Path) -> None:
    quantized, meant = written(plain, tmp_path)
    rename(quantized, "model.", "")
    same(answer(engine(quantized)), expected(meant))


def test_a_tied_head_is_quantized_beside_the_embedding(tmp_path: Path) -> None:
    plain = tiny_models.build("llama", tmp_path / "plain", 0, num_hidden_layers=2, tie_word_embeddings=True)
    tensors = load_file(plain / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for name, tensor in tensors.items():
        if name == "lm_head.weight" or forms.is_linear(name):
            tensors[name] = quantize(name, WeightScheme(name="int8"), tensor).dequantize()
    config = json.loads((plain / "config.json").read_text())
    forms.save(tmp_path / "meant", tensors, {**config, "tie_word_embeddings": False})
    same(answer(engine(plain, optimize=True, **{"weights.quantize": "int8"})), expected(tmp_path / "meant"))


def test_scales_of_the_cache_are_read_beside_quantized_weights(plain: Path, tmp_path: Path) -> None:
    quantized, _ = written(plain, tmp_path, "compressed-tensors FP8 tensor")
    tensors = load_file(quantized / "model.safetensors")
    for layer in (0, 1):
        for what in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{what}"] = torch.tensor(0.5)
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    llm = engine(quantized, **{"cache.dtype": "fp8"})
    assert {group.kv_scales for group in llm.plan.groups} == {"checkpoint"}
    assert len(answer(llm)[0]) == 8


def test_an_embedding_task_runs_on_quantized_weights(plain: Path, tmp_path: Path) -> None:
    quantized, meant = written(plain, tmp_path)
    found, wanted = (
        engine(path, task="embed").embed([{"prompt_token_ids": [5, 9, 60]}])[0].outputs.embedding
        for path in (quantized, meant)
    )
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-4, rtol=1e-4)


def test_independence_of_the_batch_is_refused_where_no_plugin_promises_it(plain: Path, tmp_path: Path) -> None:
    quantized, _ = written(plain, tmp_path)
    with pytest.raises(NegotiationError) as refused:
        engine(quantized, **INVARIANT, **{"plugins.block": ("linear:dequantized",)})
    assert "no linear plugin multiplies by" in refused.value.message
    assert "numba: N175 batch invariance: needs it" in refused.value.message


@pytest.mark.parametrize(
    ("quantize", "activation"), [("", "none"), ("int8", "none"), ("int4", "none"), ("int4", "int8"), ("int8", "auto")]
)
def test_a_requests_numbers_are_bitwise_the_same_alone_and_in_a_batch(
    quantize: str, activation: str, plain: Path, tmp_path: Path
) -> None:
    path = plain if quantize else written(plain, tmp_path)[0]
    plugin = "vnni" if activation != "none" and lanes() else "dequantized"
    settings = {"weights.quantize": quantize, "weights.activation": activation, "weights.linear": plugin}
    llm = engine(path, **INVARIANT, **settings)
    assert {group.plugin for group in llm.plan.weight_groups} == {plugin}
    against = {(r.name, reason.code) for g in llm.plan.weight_groups for r in g.rejected for reason in r.reasons}
    assert ("numba", "N175") in against
    assert activation != "none" or not lanes() or ("vnni", "N118") in against
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, detokenize=False)
    prompts = [{"prompt_token_ids": [5, 9, 60, 7 * i + 1][: i + 1]} for i in range(4)]
    alone = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    together = [output.outputs[0] for output in llm.generate(prompts, params)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.logprobs for one in together] == [one.logprobs for one in alone]


@pytest.mark.skipif(not lanes(), reason="this processor has no dot product of bytes")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounded_activations_change_a_text_little_and_the_plan_says_so(dtype: str, plain: Path) -> None:
    settings = {"weights.quantize": "int8", "weights.linear": "vnni", "dtype": dtype}
    rounded = engine(plain, **settings, **{"weights.activation": "auto"})
    exact = engine(plain, **{**settings, "weights.linear": "dequantized"})
    prompt = [{"prompt_token_ids": [5, 9, 60, 7, 81, 3]}]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found, wanted = (
        [next(iter(step.values())).logprob for step in llm.generate(prompt, params)[0].prompt_logprobs[1:]]
        for llm in (rounded, exact)
    )
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=0.2, rtol=0)
    assert found != wanted
    assert "int8 per channel, activations int8" in rounded.plan.explain()
    with pytest.raises(NegotiationError) as refused:
        engine(plain, **settings)
    assert "vnni: N118 rounded activations: it rounds them to int8, the scheme permits none" in refused.value.message


def test_the_library_packs_as_our_writer_does() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(-8, 8, (6, 48), dtype=torch.int8)
    for dim in (0, 1):
        packed = helpers.pack_to_int32(codes, 4, dim)
        assert torch.equal(packed, forms.pack(codes + 8, 4, dim))
