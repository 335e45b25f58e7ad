"""The optimising passes: same results as the untouched model, for every family, dtype and number of tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slotline.plugins.model_families.passes import optimize, pipeline
from slotline.plugins.model_families.passes import packed_linear as packing
from slotline.plugins.model_families.passes.cpu_kernels import CpuKernels
from slotline.plugins.model_families.passes.equality import equal, relative_difference
from slotline.plugins.model_families.passes.gated_mlp import FusedGatedMLP
from slotline.plugins.model_families.passes.lean_attention import LeanForward
from slotline.plugins.model_families.passes.lean_layer import LeanLayer
from slotline.plugins.model_families.passes.merged_projections import MergedProjection
from slotline.plugins.model_families.passes.packed_linear import PackedLinear
from slotline.plugins.model_families.passes.rms_norm import KernelRMSNorm, TorchRMSNorm
from slotline.plugins.model_families.passes.target import Target, target_of
from slotline.registry.errors import ModelError

ATTENTION = "test_passes_causal"
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 8, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2}),
    "phi3": ("Phi3Config", {}),
    "phi3_partial": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2Config", {}),
    "mixtral": ("MixtralConfig", EXPERTS),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "gpt_oss": ("GptOssConfig", EXPERTS),
}
ROUNDINGS = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
MOE = ("mixtral", "qwen3_moe", "gpt_oss")


@pytest.fixture(autouse=True)
def causal_attention() -> Iterator[None]:
    """An attention without masks, as the model family registers one: transformers then passes no mask."""
    ALL_ATTENTION_FUNCTIONS[ATTENTION] = _causal
    yield
    del ALL_ATTENTION_FUNCTIONS[ATTENTION]


def _causal(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[torch.Tensor, None]:
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=options["scaling"], enable_gqa=True
    )
    return out.transpose(1, 2), None


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny random model; every parameter is random, norms too, so that no variant hides behind ones and zeros."""
    name, extra = CONFIGS[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SIZES | extra)
    config._attn_implementation = ATTENTION
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


def logits(model: Any, num_tokens: int) -> torch.Tensor:
    input_ids = (torch.arange(num_tokens)[None] * 7 + 3) % SIZES["vocab_size"]  # [1, num_tokens]
    with torch.inference_mode():
        return model(input_ids=input_ids, use_cache=False).logits  # type: ignore[no-any-return]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_an_optimised_model_gives_the_logits_of_the_untouched_one(family: str, dtype: torch.dtype) -> None:
    if family in MOE and dtype == torch.bfloat16:
        pytest.skip("a rounding may choose another expert; the parts are tested alone")
    model = build(family, dtype)
    expected = {n: logits(model, n) for n in (1, 3, 17, 300)}
    notes = optimize(model, device="cpu", dtype=dtype)
    assert any(note.startswith("packed") for note in notes) == target_of("cpu", dtype).packs, notes
    for num_tokens, whole in expected.items():
        assert difference(logits(model, num_tokens), whole) <= ROUNDINGS[dtype], num_tokens


@pytest.mark.parametrize("family", CONFIGS)
def test_every_layer_of_every_family_gets_the_passes_made_for_it(family: str) -> None:
    model = build(family)
    optimize(model, device="cpu", dtype="float32")
    kinds = [type(module) for module in model.modules()]
    merged = 0 if family.startswith("phi3") else 3 * 2
    assert kinds.count(MergedProjection) == merged
    assert kinds.count(FusedGatedMLP) == (0 if family in MOE or family.startswith("phi3") else 2)
    assert not any("RMSNorm" in kind.__name__ and not issubclass(kind, TorchRMSNorm) for kind in kinds)
    assert sum(type(m.__dict__.get("forward")) is LeanForward for m in model.modules()) == 2
    straight = 2 if family.startswith(("llama", "mistral", "qwen2")) or family == "qwen3" else 0
    assert sum(type(m.__dict__.get("forward")) is LeanLayer for m in model.modules()) == straight
    assert type(model.lm_head) is PackedLinear
    assert nn.Linear not in kinds


@pytest.mark.parametrize("family", CONFIGS)
def test_batches_caches_and_masks_take_the_original_ways(family: str) -> None:
    model = build(family)
    model.config._attn_implementation = "eager"
    prompt = torch.tensor([[0, 5, 9, 2], [7, 1, 4, 3]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    expected = model.generate(prompt, **options)
    optimize(model, device="cpu", dtype="float32")
    assert model.generate(prompt, **options).tolist() == expected.tolist()


def test_the_short_forwards_are_left_when_an_adapter_replaces_a_projection() -> None:
    class Doubled(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) * 2  # type: ignore[no-any-return]

    model, optimised = build("qwen2"), build("qwen2")
    optimize(optimised, device="cpu", dtype="float32")
    for each in (model, optimised):
        layer = each.model.layers[1]
        layer.self_attn.k_proj = Doubled(layer.self_attn.k_proj)
        layer.mlp.up_proj = Doubled(layer.mlp.up_proj)
        layer.mlp.down_proj = Doubled(layer.mlp.down_proj)
        first = each.model.layers[0]
        first.self_attn.o_proj = Doubled(first.self_attn.o_proj)
    assert difference(logits(optimised, 17), logits(model, 17)) <= 1e-5
    assert difference(logits(optimised, 17), logits(build("qwen2"), 17)) > 1e-2


@pytest.mark.parametrize("inference", [False, True])
def test_merged_projections_are_right_for_any_inputs_in_any_order(inference: bool) -> None:
    attention = build("qwen2").model.layers[0].self_attn
    plain = copy.deepcopy(attention)
    holder = nn.ModuleDict({"attention": attention})
    from slotline.plugins.model_families.passes import merged_projections

    assert merged_projections.apply(holder, target_of("cpu", "float32")) == ("merged q, k, v projections in 1 layers",)
    with torch.inference_mode(inference):
        a, b = torch.randn(1, 5, 64), torch.randn(1, 3, 64)
        order = [("q", a), ("k", b), ("v", a), ("k", a), ("k", a), ("q", b), ("v", b), ("q", a), ("k", a), ("v", a)]
        for name, x in order:
            found, expected = getattr(attention, f"{name}_proj")(x), getattr(plain, f"{name}_proj")(x)
            assert torch.allclose(found, expected, atol=1e-5), (name, x.shape)


def test_merged_projections_notice_a_write_to_their_input() -> None:
    attention = build("llama").model.layers[0].self_attn
    plain = copy.deepcopy(attention)
    model = nn.ModuleDict({"attention": attention})
    from slotline.plugins.model_families.passes import merged_projections

    merged_projections.apply(model, target_of("cpu", "float32"))
    x = torch.randn(1, 2, 64)
    attention.q_proj(x)
    x.add_(1.0)
    assert torch.allclose(attention.k_proj(x), plain.k_proj(x), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 17, 300])
def test_a_packed_linear_layer_is_linear(num_tokens: int, bias: bool, dtype: torch.dtype) -> None:
    if not target_of("cpu", dtype).packs:
        pytest.skip(f"this processor has no packed kernels for {dtype}")
    torch.manual_seed(1)
    linear = nn.Linear(72, 40, bias=bias).to(dtype).requires_grad_(False)
    packed = PackedLinear(linear.weight, linear.bias)
    residual = torch.randn(num_tokens, 40).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    strided = torch.randn(1, 2 * num_tokens, 72).to(dtype)[:, ::2]
    for x in (torch.randn(num_tokens, 72).to(dtype), torch.randn(2, num_tokens, 72).to(dtype), strided):
        assert relative_difference(packed(x), linear(x)) <= tolerance
    x = torch.randn(num_tokens, 72).to(dtype)
    assert relative_difference(packed.plus(x, residual), linear(x) + residual) <= tolerance
    assert torch.equal(packed.weight, linear.weight)


def test_weights_reload_by_copying_from_a_freshly_optimised_model() -> None:
    first, second = build("qwen2"), build("qwen2")
    for parameter in second.parameters():
        parameter.mul_(1.5)
    expected = logits(second, 5)
    for model in (first, second):
        optimize(model, device="cpu", dtype="float32")
    old, new = (dict(m.named_parameters()) | dict(m.named_buffers()) for m in (first, second))
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        tensor.copy_(new[name])
    assert difference(logits(first, 5), expected) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 17, 64), (1, 300, 64), (2, 3, 4, 64)])
def test_the_norm_kernel_is_the_families_norm(shape: tuple[int, ...], family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype)
    original = copy.deepcopy(model.model.norm)
    optimize(model, device="cpu", dtype=dtype)
    assert type(model.model.norm) is KernelRMSNorm
    x = torch.randn(shape).to(dtype) * 3
    tolerance = 1e-6 if dtype == torch.float32 else 1.6e-2
    assert torch.allclose(model.model.norm(x), original(x), rtol=tolerance, atol=1e-6)
    turned = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(model.model.norm(turned), model.model.norm(x))


def test_not_a_number_passes_through_the_norm_kernel() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        norm = KernelRMSNorm(
            nn.Parameter(torch.ones(64, dtype=dtype), requires_grad=False), 1e-6, 0.0, CpuKernels(dtype)
        )
        x = torch.randn(2, 64).to(dtype)
        x[1, 7] = float("nan")
        out = norm(x)
        assert bool(out[1].isnan().all())
        assert not bool(out[0].isnan().any())


def test_a_norm_of_another_formula_is_kept() -> None:
    class MeanNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / x.abs().mean(-1, keepdim=True).clamp_min(self.eps) * self.weight

    model = build("llama")
    model.model.norm = MeanNorm()
    expected = logits(model, 5)
    optimize(model, device="cpu", dtype="float32")
    assert type(model.model.norm) is MeanNorm
    assert difference(logits(model, 5), expected) <= 1e-5


def test_an_unknown_activation_keeps_the_mlp_and_still_packs_its_layers() -> None:
    class Cube(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x**3

    model = build("llama")
    model.model.layers[0].mlp.act_fn = Cube()
    expected = logits(model, 5)
    optimize(model, device="cpu", dtype="float32")
    mlp = model.model.layers[0].mlp
    assert type(mlp) is not FusedGatedMLP
    assert type(mlp.up_proj) is PackedLinear
    assert difference(logits(model, 5), expected) <= 1e-5


def test_modules_with_hooks_are_left_alone() -> None:
    model = build("llama")
    seen: list[str] = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: seen.append("q"))
    optimize(model, device="cpu", dtype="float32")
    logits(model, 3)
    assert seen == ["q"]


@pytest.mark.parametrize(
    "name", ["", "self_attn", "mlp", "input_layernorm", "self_attn.o_proj", "mlp.down_proj", "mlp.up_proj"]
)
def test_hooks_put_on_an_optimised_model_are_called(name: str) -> None:
    model = build("llama")
    expected = logits(model, 3)
    optimize(model, device="cpu", dtype="float32")
    seen: list[str] = []
    module = model.model.layers[1].get_submodule(name)
    handle = module.register_forward_hook(lambda *_: seen.append(name))
    assert difference(logits(model, 3), expected) <= 1e-5
    assert seen == [name]
    handle.remove()
    logits(model, 3)
    assert seen == [name]


def test_a_tied_head_is_packed_at_the_price_of_a_copy_unless_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = optimize(build("llama_tied"), device="cpu", dtype="float32")
    assert any("tied: packing costs a second copy" in note for note in notes), notes
    monkeypatch.setattr(packing, "TIED_COPY_LIMIT", 1)
    model = build("llama_tied")
    notes = optimize(model, device="cpu", dtype="float32")
    assert any("not packed: it is tied" in note for note in notes), notes
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("family", CONFIGS)
def test_without_packed_kernels_only_plain_torch_passes_run(family: str) -> None:
    # What a model gets whose weights are not on its CUDA device yet, so that no kernel can be tried on them.
    model = build(family)
    expected = logits(model, 17)
    notes = optimize(model, device="cuda", dtype="float32")
    kinds = {type(module) for module in model.modules()}
    assert not kinds & {PackedLinear, FusedGatedMLP, KernelRMSNorm}
    assert TorchRMSNorm in kinds
    assert any("not packed" in note for note in notes)
    assert difference(logits(model, 17), expected) <= 1e-5


def test_float16_on_a_cpu_is_not_packed() -> None:
    model = build("llama", torch.float16)
    notes = optimize(model, device="cpu", dtype="float16")
    assert "linear layers not packed: no oneDNN kernels for torch.float16 on cpu" in notes
    assert type(model.lm_head) is nn.Linear


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="float13"):
        optimize(build("llama"), device="cpu", dtype="float13")


def test_equality_rejects_what_differs_in_value_shape_or_fails() -> None:
    like = torch.zeros(1)
    assert equal(lambda x: x * 2, lambda x: x + x, 8, like)
    assert not equal(lambda x: x * 2, lambda x: x * 2.001, 8, like)
    assert not equal(lambda x: x, lambda x: x[0], 8, like)
    assert not equal(lambda x: x, lambda x: x @ x, 8, like)
    assert not Target("cpu", torch.float64).packs


UNKNOWN = [
    "Apertus",
    "Beam",
    "Cohere2",
    "DiffLlama",
    "Exaone4",
    "GPT2",
    "GPTNeoX",
    "LaraMini",
    "Laguna",
    "Lfm2",
    "Mellum",
    "NanoChat",
    "Olmo3",
    "Phi",
    "Phimoe",
    "SmolLM3",
    "StableLm",
    "XGLM",
]
"""Architectures that no pass was made for, some with attention that takes or gives other things than a Llama's."""


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", UNKNOWN)
def test_no_pass_takes_a_model_down_that_it_does_not_know(name: str) -> None:
    none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | none)
    config._attn_implementation = ATTENTION
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    expected = {n: logits(model, n) for n in (1, 17)}
    optimize(model, device="cpu", dtype="float32")
    for num_tokens, whole in expected.items():
        assert difference(logits(model, num_tokens), whole) <= ROUNDINGS[torch.float32], num_tokens


def test_an_attention_module_that_cannot_be_tried_keeps_its_forward_and_the_notes_say_why() -> None:
    model = build("llama")
    first = model.model.layers[0].self_attn

    class Picky(type(first)):  # type: ignore[misc]
        def forward(self, hidden_states: Any, *args: Any, **more: Any) -> Any:
            if hidden_states.shape[1] == 3:  # as many tokens as the pass tries it with
                raise AttributeError("no part of it")
            return super().forward(hidden_states, *args, **more)

    first.__class__ = Picky
    expected = logits(model, 17)
    notes = optimize(model, device="cpu", dtype="float32")
    assert "1 attention modules keep their own forward: AttributeError: no part of it" in notes
    assert "short forward with rotary embedding in place in 1 attention modules" in notes
    assert difference(logits(model, 17), expected) <= ROUNDINGS[torch.float32]


@pytest.mark.parametrize(
    "error", [AttributeError, KeyError, TypeError, IndexError, NotImplementedError, AssertionError]
)
def test_a_pass_that_fails_steps_aside_and_says_so(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(model: Any, target: Target) -> tuple[str, ...]:
        raise error("what it met")

    failing.__module__ = "slotline.plugins.model_families.passes.rotary"
    monkeypatch.setattr(pipeline, "PASSES", (failing, *pipeline.PASSES))
    model = build("llama")
    expected = logits(model, 17)
    notes = optimize(model, device="cpu", dtype="float32")
    assert notes[0].startswith(f"pass rotary stepped aside for LlamaForCausalLM: {error.__name__}: ")
    assert len(notes) > 3
    assert difference(logits(model, 17), expected) <= ROUNDINGS[torch.float32]
    monkeypatch.setattr(pipeline, "INVARIANT_PASSES", (failing,))
    with pytest.raises(ModelError, match="LlamaForCausalLM has parts that cannot be made independent of the batch"):
        optimize(model, device="cpu", dtype="float32", batch_invariant=True)


def test_a_pass_that_runs_out_of_memory_does_not_step_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(model: Any, target: Target) -> tuple[str, ...]:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(pipeline, "PASSES", (greedy,))
    with pytest.raises(torch.OutOfMemoryError):
        optimize(build("llama"), device="cpu", dtype="float32")
