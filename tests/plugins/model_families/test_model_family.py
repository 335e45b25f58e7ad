"""The transformers model family, compared with transformers itself on tiny random checkpoints of every family."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from attrs import evolve

from slotline.plugins.model_families.decoder import (
    ARCHITECTURES,
    CHUNKED,
    CLASSIFIERS,
    EMBEDDERS,
    INDEXED,
    LATENT,
    OWN_ATTENTION,
    REWARDERS,
    SHARING,
    STATE_ARCHITECTURES,
    TAGGERS,
    DecoderOptions,
    descriptor,
)
from slotline.plugins.model_families.host_copies import HostCopies
from slotline.plugins.model_families.transformers_model import DecoderModel, TransformersDecoder
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.model_family import ModelContext, ModelFacts
from slotline.registry.errors import ModelError

TOKENS = 48


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for each other on more threads: ten times as long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds each family's checkpoint once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def get(name: str) -> Path:
        return root / name if (root / name).is_dir() else tiny_models.build(name, root / name)

    return get


@pytest.fixture
def llama(checkpoints: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the Llama checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoints("llama_deep"), tmp_path / "llama_deep"))


class DenseAttention:
    """The plainest attention: keeps every key and value of one request, masks, and takes a softmax."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.seen: list[str] = []

    def __call__(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        assert query.shape[1:] == (layer.num_heads, layer.head_size)
        assert key.shape[1:] == (layer.num_kv_heads, layer.head_size)
        assert value.shape[1:] == (layer.num_kv_heads, layer.head_size_v)
        self.seen.append(layer.name)
        if layer.index in self.cache:
            key = torch.cat((self.cache[layer.index][0], key))
            value = torch.cat((self.cache[layer.index][1], value))
        self.cache[layer.index] = key, value
        return dense_attention(layer, query, key, value, sinks)


def dense_attention(
    layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention of the last len(query) positions over all keys, as the attention contract words it."""
    group = layer.num_heads // layer.num_kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)  # [num_keys, num_heads, size]
    scores = torch.einsum("qhd,khd->hqk", query, key) * layer.scale  # [num_heads, num_queries, num_keys]
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    keys = torch.arange(key.shape[0], device=key.device)
    queries = keys[-query.shape[0] :, None]
    if layer.alibi_slopes is not None:
        scores = scores + torch.tensor(layer.alibi_slopes, device=key.device)[:, None, None] * (keys - queries)
    first = queries - layer.window + 1 if layer.window is not None else torch.zeros_like(queries)
    scores = scores.masked_fill((keys > queries) | (keys < first), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, query.shape[0], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, value)


def load(
    path: Path, *, lean: bool = True, dtype: str = "float32", facts: ModelFacts | None = None, **settings: Any
) -> DecoderModel:
    family = TransformersDecoder()
    context = ModelContext(
        contract=1,
        facts=facts or family.inspect(path),
        device="cpu",
        dtype=dtype,
        optimize=False,
        options=DecoderOptions(lean=lean),
    )
    return family.load(evolve(context, **settings))


def prompt(count: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, tiny_models.VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(7))


def logits_of(model: DecoderModel, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden_states = model.forward(token_ids, torch.arange(len(token_ids)), DenseAttention())
        return model.compute_logits(hidden_states)


@pytest.mark.behaviour(126)
@pytest.mark.parametrize("name", tiny_models.FAMILIES)
def test_logits_equal_those_of_transformers(name: str, checkpoints: Callable[[str], Path]) -> None:
    path, token_ids = checkpoints(name), prompt()
    model = load(path)
    logits = logits_of(model, token_ids)
    expected = tiny_models.logits_reference(path, token_ids.tolist())
    assert logits.dtype == torch.float32
    assert logits.shape == (TOKENS, tiny_models.VOCAB_SIZE)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert any("lean loop over the layers" in note for note in model.notes)


@pytest.mark.parametrize("name", tiny_models.FAMILIES)
def test_an_optimised_model_fed_in_chunks_gives_the_logits_of_one_pass(
    name: str, checkpoints: Callable[[str], Path]
) -> None:
    path, token_ids = checkpoints(name), prompt()
    model, attend, positions, parts = load(path, optimize=True), DenseAttention(), torch.arange(TOKENS), []
    with torch.no_grad():
        for start, stop in ((0, 7), (7, 20), (20, 40), *((i, i + 1) for i in range(40, TOKENS))):
            hidden_states = model.forward(token_ids[start:stop], positions[start:stop], attend)
            parts.append(model.compute_logits(hidden_states))
    expected = tiny_models.logits_reference(path, token_ids.tolist())
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama_deep", "gemma3", "granite", "gpt_oss"])
def test_transformers_own_forward_gives_the_same_logits_and_is_noted(
    name: str, checkpoints: Callable[[str], Path]
) -> None:
    path, token_ids = checkpoints(name), prompt()
    model = load(path, lean=False)
    expected = tiny_models.logits_reference(path, token_ids.tolist())
    torch.testing.assert_close(logits_of(model, token_ids), expected, atol=1e-4, rtol=0)
    assert model.notes == ("transformers' own forward: asked for by lean = false",)


def test_a_family_that_the_lean_loop_gets_wrong_falls_back_to_transformers(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from slotline.plugins.model_families import loops

    original = loops.LeanLoop.__init__

    def without_multiplier(self: loops.LeanLoop, *arguments: Any) -> None:
        original(self, *arguments)
        self._multiplier = None

    monkeypatch.setattr(loops.LeanLoop, "__init__", without_multiplier)
    path, token_ids = checkpoints("granite"), prompt()
    model = load(path)
    assert "the lean loop's logits differ by" in model.notes[0]
    expected = tiny_models.logits_reference(path, token_ids.tolist())
    torch.testing.assert_close(logits_of(model, token_ids), expected, atol=1e-4, rtol=0)


def test_unknown_treatment_of_logits_is_refused(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from slotline.plugins.model_families import logits

    monkeypatch.setattr(logits.LogitsHead, "__call__", lambda self, hidden: self._model.lm_head(hidden).float())
    with pytest.raises(ModelError, match="treats its logits in a way"):
        load(checkpoints("gemma2"))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_window_of_w_tokens_holds_w_keys_and_neither_one_more_nor_less(
    change: int, checkpoints: Callable[[str], Path]
) -> None:
    path, token_ids = checkpoints("mistral"), prompt()
    facts = TransformersDecoder().inspect(path)
    wrong = evolve(facts, layers=tuple(evolve(layer, window=tiny_models.WINDOW + change) for layer in facts.layers))
    logits = logits_of(load(path, facts=wrong), token_ids)
    expected = tiny_models.logits_reference(path, token_ids.tolist())
    # Equal as long as the smaller of both windows holds every key, different from the next position on.
    equal = tiny_models.WINDOW + min(change, 0)
    torch.testing.assert_close(logits[:equal], expected[:equal], atol=1e-4, rtol=0)
    assert (logits[equal] - expected[equal]).abs().max() > 1e-2


@pytest.mark.parametrize(("name", "fact", "value"), [("gemma2", "soft_cap", None), ("granite", "scale", 0.25)])
def test_a_wrong_fact_about_the_scores_shows_in_the_logits(
    name: str, fact: str, value: float | None, checkpoints: Callable[[str], Path]
) -> None:
    path, token_ids = checkpoints(name), prompt()
    facts = TransformersDecoder().inspect(path)
    change: dict[str, Any] = {fact: value}
    wrong = evolve(facts, layers=tuple(evolve(layer, **change) for layer in facts.layers))
    expected = tiny_models.logits_reference(path, token_ids.tolist())
    assert (logits_of(load(path, facts=wrong), token_ids) - expected).abs().max() > 1e-2


def test_learned_sinks_reach_attention_with_one_logit_per_head(checkpoints: Callable[[str], Path]) -> None:
    model, found = load(checkpoints("gpt_oss")), []

    def attend(layer: AttentionLayer, *tensors: Any) -> torch.Tensor:
        found.append(tensors[3])
        return dense_attention(layer, *tensors)

    with torch.no_grad():
        model.forward(prompt(), torch.arange(TOKENS), attend)
    stored = [model.hf_model.get_submodule(layer.name).sinks for layer in model.facts.layers]
    assert all(torch.equal(a, b) and a.shape == (4,) for a, b in zip(found, stored, strict=True))


def test_final_soft_cap_bounds_the_logits(checkpoints: Callable[[str], Path]) -> None:
    model = load(checkpoints("gemma2"))
    logits = model.compute_logits(torch.randn(3, 64) * 100)
    assert 5.9 < logits.abs().max() <= 6.0


@pytest.mark.parametrize("name", tiny_models.FAMILIES)
def test_inspection_finds_what_the_configuration_says(name: str, checkpoints: Callable[[str], Path]) -> None:
    path, known = checkpoints(name), tiny_models.family(name)
    facts = TransformersDecoder().inspect(path)
    oracle = tiny_models.oracle(path)
    assert facts.architecture == known.architecture
    assert (facts.vocab_size, facts.hidden_size) == (tiny_models.VOCAB_SIZE, 64)
    assert (facts.max_model_len, facts.dtype) == (tiny_models.MAX_LEN, "float32")
    assert facts.num_parameters == sum(p.numel() for p in oracle.parameters())
    count, size = (2, 32) if name == "llama" else (4, 16)
    assert [layer.name for layer in facts.layers] == [f"model.layers.{i}.self_attn" for i in range(count)]
    assert [layer.index for layer in facts.layers] == list(range(count))
    assert tuple(layer.window for layer in facts.layers) == known.windows
    for layer in facts.layers:
        assert (layer.num_heads, layer.num_kv_heads, layer.head_size, layer.head_size_v) == (4, 2, size, size)
        assert layer.scale == pytest.approx(oracle.get_submodule(layer.name).scaling)
        assert layer.soft_cap == known.soft_cap
        assert layer.sinks == known.sinks
        assert layer.kv_kind == ("full" if layer.window is None else "sliding")


def test_attention_layers_are_called_in_the_order_of_the_facts(checkpoints: Callable[[str], Path]) -> None:
    model, attend = load(checkpoints("gemma3")), DenseAttention()
    with torch.no_grad():
        model.forward(prompt(), torch.arange(TOKENS), attend)
    assert attend.seen == [layer.name for layer in model.facts.layers]


def test_a_window_as_long_as_the_model_counts_as_full(tmp_path: Path) -> None:
    path = tiny_models.build("mistral", tmp_path / "m", sliding_window=tiny_models.MAX_LEN)
    assert {(layer.window, layer.kv_kind) for layer in TransformersDecoder().inspect(path).layers} == {(None, "full")}


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            512,
        ),
    ],
)
def test_longest_sequence_follows_rope_scaling(rope: dict[str, object], length: int, tmp_path: Path) -> None:
    path = tiny_models.build("llama_deep", tmp_path / "m", rope_parameters={"rope_theta": 10000.0, **rope})
    assert TransformersDecoder().inspect(path).max_model_len == length
    token_ids = prompt()
    expected = tiny_models.logits_reference(path, token_ids.tolist())
    torch.testing.assert_close(logits_of(load(path), token_ids), expected, atol=1e-4, rtol=0)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.5 + i / 4 for i in range(8)],
    "original_max_position_embeddings": 40,
}


@pytest.mark.parametrize("max_model_len", [40, 512])
def test_longrope_takes_one_set_of_factors_for_all_requests(max_model_len: int, tmp_path: Path) -> None:
    path = tiny_models.build("phi3", tmp_path / "m", rope_parameters=LONGROPE, original_max_position_embeddings=40)
    facts = evolve(TransformersDecoder().inspect(path), max_model_len=max_model_len)
    token_ids = prompt(max_model_len if max_model_len == 40 else TOKENS)
    model = load(path, facts=facts)
    assert ("long factors" if max_model_len > 40 else "short factors") in model.notes[0]
    # transformers sees the length of this one sequence, which lies on the same side of the original length.
    expected = tiny_models.logits_reference(path, token_ids.tolist())
    torch.testing.assert_close(logits_of(model, token_ids), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits_of(model, token_ids[:8]), logits_of(model, token_ids)[:8], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([5, 6], 7, (5, 6)), (5, 7, (5,)), (None, 7, (7,)), (None, [8, 9], (8, 9)), (-1, 7, ()), (None, None, ())],
)
def test_end_tokens_come_from_the_generation_config_first(
    generation: object, config: object, expected: tuple[int, ...], llama: Path
) -> None:
    _edit(llama / "generation_config.json", eos_token_id=generation)
    _edit(llama / "config.json", eos_token_id=config)
    assert TransformersDecoder().inspect(llama).eos_token_ids == expected


def test_dtype_comes_from_the_stored_weights_when_the_config_is_silent(llama: Path) -> None:
    content = json.loads((llama / "config.json").read_text())
    del content["dtype"]
    (llama / "config.json").write_text(json.dumps(content))
    assert TransformersDecoder().inspect(llama).dtype == "float32"


@pytest.mark.behaviour(126)
def test_bfloat16_loads_with_float32_rotary_frequencies(checkpoints: Callable[[str], Path]) -> None:
    model = load(checkpoints("llama_deep"), dtype="bfloat16")
    assert {p.dtype for p in model.hf_model.parameters()} == {torch.bfloat16}
    assert model.hf_model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert 2 * model.facts.num_parameters <= model.weight_bytes < 2 * model.facts.num_parameters + 1024
    exact = tiny_models.logits_reference(checkpoints("llama_deep"), prompt().tolist())
    assert (logits_of(model, prompt()) - exact).abs().mean() < 0.1


def test_a_model_that_waits_for_the_host_says_that_it_cannot_be_captured(checkpoints: Callable[[str], Path]) -> None:
    family = TransformersDecoder()
    mixture, plain = family.inspect(checkpoints("mixtral")), family.inspect(checkpoints("llama_deep"))
    assert "synchronise with the host in float32" in str(family.capture_refusal(mixture, "cuda", "float32"))
    assert family.capture_refusal(mixture, "cuda", "bfloat16") is None
    assert family.capture_refusal(mixture, "cpu", "float32") is None
    assert family.capture_refusal(plain, "cuda", "float32") is None


@pytest.mark.parametrize(("sparse", "copies"), [(0, 0), (1, 1), (3, 3)])
def test_copies_from_the_host_are_seen_by_watching_the_forward(sparse: int, copies: int, tmp_path: Path) -> None:
    """Gemma 3n makes a tensor of a number in each layer whose activations are sparse, and in no other."""
    sparsity = [0.95] * sparse + [0.0] * (6 - sparse)
    path = tiny_models.build("gemma3n", tmp_path, activation_sparsity_pattern=sparsity)
    family = TransformersDecoder()
    facts = family.inspect(path)
    assert facts.host_copies == copies
    refusal = family.capture_refusal(facts, "cuda", "bfloat16")
    assert refusal == (f"each forward copies from the host (copies: {copies})" if copies else None)
    assert family.capture_refusal(facts, "cpu", "float32") is None


def test_only_copies_from_the_host_count_as_such() -> None:
    here, there = torch.ones(2), torch.ones(2, device="meta")
    with HostCopies() as copies:
        _ = there.new_tensor([1.0]), torch.tensor([1.0], device="meta"), here.to("meta"), there.copy_(here)
    assert copies.count == 4
    with HostCopies() as copies:
        _ = there + torch.tensor(2.0), there.to(torch.float64), torch.as_tensor(there), there.copy_(there)
        _ = here.to(torch.float64), torch.zeros(3, device="meta"), there * 3
    assert copies.count == 0


@pytest.mark.behaviour(132)
@pytest.mark.parametrize("name", ["llama_deep", "llama_tied", "mixtral"])
def test_reload_brings_back_zeroed_weights_at_their_old_addresses(
    name: str, checkpoints: Callable[[str], Path]
) -> None:
    model, token_ids = load(checkpoints(name)), prompt()
    before = logits_of(model, token_ids)
    addresses = [p.data_ptr() for p in model.hf_model.parameters()]
    with torch.no_grad():
        for parameter in model.hf_model.parameters():
            parameter.zero_()
    assert not torch.equal(logits_of(model, token_ids), before)
    model.reload_weights()
    assert torch.equal(logits_of(model, token_ids), before)
    assert [p.data_ptr() for p in model.hf_model.parameters()] == addresses


@pytest.mark.behaviour(132)
@pytest.mark.parametrize("optimize", [False, True])
def test_reload_reads_what_the_folder_holds_now(optimize: bool, llama: Path, tmp_path: Path) -> None:
    model = load(llama, optimize=optimize)
    other = tiny_models.build("llama_deep", tmp_path / "other", seed=1)
    shutil.copy(other / "model.safetensors", llama / "model.safetensors")
    model.reload_weights()
    expected = tiny_models.logits_reference(other, prompt().tolist())
    torch.testing.assert_close(logits_of(model, prompt()), expected, atol=1e-4, rtol=0)


@pytest.mark.behaviour(132)
def test_reload_refuses_weights_of_another_shape(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    tiny_models.build("llama_deep", tmp_path / "other", intermediate_size=32)
    for file in ("model.safetensors", "config.json"):
        shutil.copy(tmp_path / "other" / file, llama / file)
    with pytest.raises(ModelError, match="do not fit the loaded model"):
        model.reload_weights()


@pytest.mark.parametrize("form", ["shards", "bin"])
def test_sharded_and_torch_files_load_like_one_safetensors_file(form: str, llama: Path) -> None:
    expected = logits_of(load(llama), prompt())
    oracle = tiny_models.oracle(llama)
    (llama / "model.safetensors").unlink()
    if form == "shards":
        oracle.save_pretrained(llama, max_shard_size="200KB")
        assert (llama / "model.safetensors.index.json").is_file()
    else:
        torch.save(oracle.state_dict(), llama / "pytorch_model.bin")
    assert torch.equal(logits_of(load(llama), prompt()), expected)


def test_offloading_on_a_cpu_changes_nothing_and_says_so(checkpoints: Callable[[str], Path]) -> None:
    model = load(checkpoints("llama_deep"), offload_bytes=1 << 20)
    assert "no effect on cpu" in model.notes[0]


def test_attention_outside_a_forward_is_an_error_that_names_the_layer(checkpoints: Callable[[str], Path]) -> None:
    model = load(checkpoints("llama_deep"))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.self_attn"), torch.no_grad():
        model.hf_model(input_ids=prompt()[None])


def test_two_models_keep_their_attention_apart(checkpoints: Callable[[str], Path]) -> None:
    one, two = load(checkpoints("llama_deep")), load(checkpoints("qwen3"))
    inner = DenseAttention()

    def outer(layer: AttentionLayer, *tensors: Any) -> torch.Tensor:
        if layer.index == 1:
            two.forward(prompt(), torch.arange(TOKENS), inner)
        return dense_attention(layer, *tensors)

    with torch.no_grad():
        hidden_states = one.forward(prompt(), torch.arange(TOKENS), outer)
        assert torch.equal(one.compute_logits(hidden_states), logits_of(one, prompt()))
    assert len(inner.seen) == 4


@pytest.mark.behaviour(123)
def test_the_bare_transformers_model_can_be_reached(checkpoints: Callable[[str], Path]) -> None:
    assert type(load(checkpoints("llama_deep")).hf_model).__name__ == "LlamaForCausalLM"


@pytest.mark.behaviour(124)
def test_the_descriptor_offers_every_tested_architecture_and_task() -> None:
    assert descriptor.capabilities.tasks.values == {"generate", "embed", "classify", "token_classify"}
    assert descriptor.capabilities.architectures.values == {
        *ARCHITECTURES,
        *CHUNKED,
        *INDEXED,
        *LATENT,
        *SHARING,
        *OWN_ATTENTION,
        *STATE_ARCHITECTURES,
        *EMBEDDERS,
        *CLASSIFIERS,
        *TAGGERS,
        *REWARDERS,
    }
    assert {tiny_models.family(name).architecture for name in tiny_models.FAMILIES} == set(ARCHITECTURES)


def test_the_descriptor_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, slotline.plugins.model_families.decoder; print({'torch', 'transformers'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no folder .*nowhere"):
        TransformersDecoder().inspect(tmp_path / "nowhere")


def test_a_folder_without_config_or_weights_is_refused_with_a_fix(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no weights[\s\S]*fix: download"):
        TransformersDecoder().inspect(llama)
    (llama / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        TransformersDecoder().inspect(llama)


def test_an_unknown_architecture_is_named_with_its_served_family(llama: Path) -> None:
    _edit(llama / "config.json", architectures=["Qwen4ForCausalLM"])
    with pytest.raises(
        ModelError,
        match=r"'Qwen4ForCausalLM'[\s\S]*Starcoder2For[\s\S]*of the same family are served Qwen\dForCausalLM",
    ):
        TransformersDecoder().inspect(llama)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"architectures": ["LEDForConditionalGeneration"], "is_encoder_decoder": True}, "encoder-decoder"),
        ({"architectures": None}, "none named; model_type 'llama'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized weights"),
        ({"num_attention_heads": "many"}, "no valid configuration"),
    ],
)
def test_checkpoints_that_cannot_be_served_are_refused(edit: dict[str, object], message: str, llama: Path) -> None:
    _edit(llama / "config.json", **edit)
    with pytest.raises(ModelError, match=message):
        TransformersDecoder().inspect(llama)


def test_a_broken_config_is_refused(llama: Path) -> None:
    (llama / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        TransformersDecoder().inspect(llama)


def test_broken_and_missing_weights_are_refused(llama: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(llama / "model.safetensors")
    file = llama / "model.safetensors"
    save_file({k: v for k, v in weights.items() if "layers.2.mlp.up_proj" not in k}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing weights in .*: model\.layers\.2\.mlp\.up_proj\.weight"):
        load(llama)
    file.write_bytes(b"nothing of use")
    with pytest.raises(ModelError, match="cannot be read"):
        load(llama)


def test_weights_of_another_shape_are_refused(llama: Path) -> None:
    _edit(llama / "config.json", intermediate_size=80)
    named = r"mlp\.down_proj\.weight \[64, 96\], where config.json makes it \[64, 80\].* and 8 more"
    with pytest.raises(ModelError, match=rf"mismatched weights in {llama}: .*{named}"):
        load(llama)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama_deep", {"hidden_size": -4}),
        ("llama_deep", {"head_dim": 0}),
        ("qwen3_next", {"linear_num_value_heads": 3}),
        ("nemotron_h", {"n_groups": 3}),
        ("mixtral", {"num_experts_per_tok": 9}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_sizes_that_no_model_can_have_are_refused(
    name: str, change: dict[str, int], checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / name
    shutil.copytree(checkpoints(name), path)
    _edit(path / "config.json", **change)
    with pytest.raises(
        ModelError, match=rf"{path}/config.json describes no \w+ForCausalLM that runs: \w+Error: "
    ) as caught:
        TransformersDecoder().inspect(path)
    assert caught.value.fix == "correct config.json, or download it again"


def test_an_unknown_dtype_is_refused(checkpoints: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="'int8'"):
        load(checkpoints("llama_deep"), dtype="int8")


def test_the_greedy_oracle_agrees_with_our_own_greedy_loop(checkpoints: Callable[[str], Path]) -> None:
    path, token_ids = checkpoints("qwen2_sliding"), prompt(12).tolist()
    model, attend = load(path), DenseAttention()
    fresh, start, produced = token_ids, 0, []
    with torch.no_grad():
        for _ in range(24):
            positions = torch.arange(start, start + len(fresh))
            hidden_states = model.forward(torch.tensor(fresh), positions, attend)
            start, fresh = start + len(fresh), model.compute_logits(hidden_states[-1:]).argmax(-1).tolist()
            produced += fresh
    assert produced == tiny_models.greedy_reference(path, token_ids, 24)


def _edit(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(content))
