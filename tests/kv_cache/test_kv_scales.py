"""Eight-bit caches: their names, where their scales come from, and what they cost in the logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from attrs import evolve
from engine_driver import GREEDY, random_prompts, tokens_of
from safetensors.torch import load_file, save_file

from slotline.core import LLM
from slotline.plugins.kv_scales.table import HEADROOM, KVScaleTable
from slotline.registry.contracts import AttentionLayer, KVScales, PoolingParams
from slotline.registry.errors import ModelError, NegotiationError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
PROMPTS = random_prompts([33, 17, 40, 1, 25])
E4M3 = torch.float8_e4m3fn
SCALES = {0: (0.02, 0.5), 1: (0.04, 0.06), 2: (0.03, 0.05), 3: (1.0, 0.05)}


def engine(path: Path, **settings: Any) -> LLM:
    options = {"device": "cpu", "dtype": "float32", "backend": "torch", "max_model_len": 96, "memory": "1MiB"}
    return LLM(model=str(path), **{**options, **settings})


def scales_of(llm: LLM) -> dict[int, tuple[float, float]]:
    """What the backend was built with."""
    found: dict[int, KVScales] = llm.engine.runner.router.groups[0].backend._scales  # type: ignore[attr-defined]
    return {index: (float(pair.key), float(pair.value)) for index, pair in found.items()}


def with_scales(path: Path, scales: dict[str, torch.Tensor]) -> Path:
    """Put more tensors beside a checkpoint's weights."""
    file = path / "model.safetensors"
    save_file({**load_file(file), **scales}, file, metadata={"format": "pt"})
    return path


def published(style: str = "k_scale v_scale") -> dict[str, torch.Tensor]:
    names = style.split()
    return {
        f"model.layers.{index}.self_attn.{name}": torch.tensor(scale)
        for index, pair in SCALES.items()
        for name, scale in zip(names, pair, strict=True)
    }


@pytest.mark.parametrize(
    ("asked", "resolved"),
    [
        ("auto", "float32"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("float8_e5m2", "float8_e5m2"),
        ("bfloat16", "bfloat16"),
    ],
)
@pytest.mark.behaviour(3)
def test_a_cache_dtype_goes_by_vllms_names_and_torchs(asked: str, resolved: str, tmp_path: Path) -> None:
    llm = engine(tiny_models.build("llama_deep", tmp_path, 0), **{"cache.dtype": asked})
    assert llm.plan.kv_dtype == resolved
    assert {cache.key.dtype for cache in llm.engine.runner.router.caches()} == {getattr(torch, resolved)}
    setting = next(each for each in llm.plan.settings if each.key == "cache.dtype")
    assert (setting.asked, setting.resolved) == (asked, resolved)
    assert len(tokens_of(llm, PROMPTS)) == len(PROMPTS)


@pytest.mark.parametrize("style", ["k_scale v_scale", "attn.k_scale attn.v_scale", "k_proj.k_scale v_proj.v_scale"])
@pytest.mark.behaviour(3)
def test_scales_of_the_checkpoint_reach_the_backend(style: str, tmp_path: Path) -> None:
    path = with_scales(tiny_models.build("llama_deep", tmp_path, 0), published(style))
    llm = engine(path, **{"cache.dtype": "fp8"})
    assert scales_of(llm) == pytest.approx({i: pytest.approx(pair) for i, pair in SCALES.items()})
    assert "of the cache: the checkpoint's" in llm.plan.explain()
    assert not scales_of(engine(path)), "a cache of the model's own dtype has no scales"
    anything = engine(path, **{"cache.dtype": "fp8", "backend": "auto"}).plan.groups[0]
    assert {"cpu": {"N121"}}.items() <= {
        item.name: {reason.code for reason in item.reasons} for item in anything.rejected
    }.items()


def test_one_scale_may_stand_for_both_and_what_is_not_positive_counts_as_1(tmp_path: Path) -> None:
    extra = {f"model.layers.{i}.self_attn.kv_scale": torch.tensor([0.25]) for i in range(3)}
    extra["model.layers.3.self_attn.k_scale"] = torch.tensor(-1.0)
    llm = engine(with_scales(tiny_models.build("llama_deep", tmp_path, 0), extra), **{"cache.dtype": "fp8"})
    assert scales_of(llm) == {0: (0.25, 0.25), 1: (0.25, 0.25), 2: (0.25, 0.25), 3: (1.0, 1.0)}


def test_scales_of_single_heads_are_refused(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.k_scale": torch.ones(2)}
    with pytest.raises(ModelError, match=r"model.layers.0.self_attn.k_scale in .* has shape \[2\]"):
        engine(with_scales(tiny_models.build("llama_deep", tmp_path, 0), extra))


def test_a_checkpoint_that_quantizes_its_cache_alone_is_served(tmp_path: Path) -> None:
    path = with_scales(tiny_models.build("llama_deep", tmp_path, 0), published())
    expected = tokens_of(engine(path), PROMPTS)
    config = json.loads((path / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    quantization: dict[str, Any] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    assert tokens_of(engine(path), PROMPTS) == expected
    quantization["config_groups"] = {"group_0": {"targets": ["Linear"]}}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(ModelError, match="quantized weights"):
        engine(path)


@pytest.mark.behaviour(93)
def test_scales_are_calculated_from_the_first_step_and_stay(tmp_path: Path) -> None:
    path = with_scales(tiny_models.build("llama_deep", tmp_path, 0), published())
    llm = engine(path, **{"cache.dtype": "fp8", "cache.calculate_kv_scales": True})
    assert set(scales_of(llm).values()) == {(1.0, 1.0)}, "neither the checkpoint's nor those of the profiled dummies"
    assert "calculated from the first step" in llm.plan.explain()
    largest: dict[int, tuple[float, float]] = {}
    backend = llm.engine.runner.router.groups[0].backend
    original = backend.write

    def write(layer: AttentionLayer, key: Any, value: Any, *rest: Any) -> Any:
        largest.setdefault(layer.index, (float(key.abs().max()), float(value.abs().max())))
        return original(layer, key, value, *rest)

    llm.engine.runner.router.routes = {
        index: (write, forward, cache, place)
        for index, (_, forward, cache, place) in llm.engine.runner.router.routes.items()
    }
    tokens_of(llm, PROMPTS)
    most = torch.finfo(E4M3).max / HEADROOM
    first = scales_of(llm)
    assert first == {i: pytest.approx((key / most, value / most)) for i, (key, value) in largest.items()}
    tokens_of(llm, random_prompts([50, 60], seed=1))
    assert scales_of(llm) == first


@pytest.mark.behaviour(93)
def test_the_step_that_calculates_scales_has_no_captured_shape(tmp_path: Path) -> None:
    llm = engine(
        tiny_models.build("llama_deep", tmp_path, 0), **{"cache.dtype": "fp8", "cache.calculate_kv_scales": True}
    )
    asked: list[bool] = []

    class Shapes:
        shapes = None

        def shape_for(self, schedule: Any, *, cascade: bool, variant: int) -> None:
            asked.append(not llm.engine.extension("kv_scales").pending)

    llm.engine.graphs = graphs = Shapes()  # type: ignore[assignment]
    graphs.shapes = graphs  # type: ignore[union-attr, assignment]
    llm.engine.add("a", PROMPTS[0], GREEDY)
    llm.engine.step()
    assert asked == []
    llm.engine.step()
    assert asked == [True]


def test_scales_for_a_cache_that_has_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NegotiationError, match="a cache of dtype 'auto' has no scales") as caught:
        engine(tiny_models.build("llama_deep", tmp_path, 0), **{"cache.calculate_kv_scales": True})
    assert 'cache.dtype = "fp8"' in str(caught.value)


def test_layers_that_share_a_cache_share_its_scales_and_zeros_give_1() -> None:
    facts: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_size": 4, "head_size_v": 4, "scale": 0.5}
    own = AttentionLayer(name="a", index=0, **facts)
    reader = AttentionLayer(name="b", index=1, shares_kv_with=0, **facts)
    table = KVScaleTable((own, reader), {}, device_of=lambda _: "cpu", dtype=E4M3, calculate=True)
    before = table.by_layer[0]
    table.calculate(own, torch.full((3, 1, 4), -56.0), torch.zeros(3, 1, 4))
    table.calculate(reader, torch.full((3, 1, 4), 9.0), torch.ones(3, 1, 4))
    assert table.by_layer[1] is before
    assert [float(scale) for scale in before] == [0.5, 1.0]


def rounded(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return (tensor / scale).clamp(-448, 448).to(E4M3).to(tensor.dtype) * scale


def logits_with(llm: LLM, tokens: list[int], scales: dict[int, tuple[float, float]] | None) -> torch.Tensor:
    """The model under the textbook formula, keys and values rounded to eight bits where scales are given."""
    model = llm.engine.runner.model

    def attend(layer: AttentionLayer, query: Any, key: Any, value: Any, sinks: Any) -> torch.Tensor:
        if scales is not None:
            key, value = (rounded(new, scale) for new, scale in zip((key, value), scales[layer.index], strict=True))
        group = layer.num_heads // layer.num_kv_heads
        key, value = (new.repeat_interleave(group, 1).transpose(0, 1) for new in (key, value))
        scores = query.transpose(0, 1) @ key.transpose(1, 2) * layer.scale
        mask = torch.ones(len(query), len(query), dtype=torch.bool).tril()
        return (scores.masked_fill(~mask, -torch.inf).softmax(2) @ value).transpose(0, 1)

    with torch.inference_mode():
        return model.compute_logits(model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attend))


@pytest.mark.parametrize("calculate", [False, True])
@pytest.mark.behaviour(3)
def test_logits_over_an_eight_bit_cache_are_as_far_off_as_its_rounding(calculate: bool, tmp_path: Path) -> None:
    """The ratio rule of docs/decisions/tolerance.md: the baseline is the same rounding in the textbook formula."""
    path = with_scales(tiny_models.build("llama_deep", tmp_path, 0), published())
    settings = {"cache.dtype": "fp8", "sampling.max_logprobs": 384, "sampling.logprobs_mode": "raw_logits"}
    llm = engine(path, **settings, **({"cache.calculate_kv_scales": True} if calculate else {}))
    outputs = llm.generate(PROMPTS, evolve(GREEDY, logprobs=384))
    scales = scales_of(llm)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        done = output.outputs[0]
        assert done.logprobs is not None
        got = torch.zeros(len(done.token_ids), 384)
        for position, entries in enumerate(done.logprobs):
            for token, entry in entries.items():
                got[position, token] = entry.logprob
        tokens = [*prompt, *done.token_ids[:-1]]
        exact, baseline = (logits_with(llm, tokens, each)[len(prompt) - 1 :] for each in (None, scales))
        error, allowed = float((got - exact).abs().max()), 3 * float((baseline - exact).abs().max()) + 1e-5
        assert 0 < error <= allowed
        torch.testing.assert_close(got, baseline, rtol=0, atol=float((baseline - exact).abs().max()))


def test_a_prompt_that_is_pooled_gives_the_scales_once_too(tmp_path: Path) -> None:
    llm = engine(
        tiny_models.build("llama_deep", tmp_path, 0),
        **{"task": "embed", "cache.dtype": "fp8", "cache.calculate_kv_scales": True, "max_num_batched_tokens": 8},
    )
    scales = llm.engine.extension("kv_scales")
    assert scales.pending
    llm.engine.add("one", list(range(3, 35)), PoolingParams(task="embed"))
    llm.engine.step()
    assert not scales.pending
    llm.engine.abort("one")
