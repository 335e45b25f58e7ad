"""Encoder-only models: embeddings and class scores equal transformers', in any batch; nothing is cached or cut."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_driver import random_prompts, recorded
from tiny_models import VOCAB_SIZE
from torch.utils._python_dispatch import TorchDispatchMode

from slotline.core import LLM, PoolingParams, SamplingParams
from slotline.plugins.model_families import offload
from slotline.plugins.model_families.encoder import ARCHITECTURES, CLASSIFIERS, EMBEDDERS, TAGGERS
from slotline.plugins.model_families.passes.packed_linear import pack
from slotline.registry.errors import ConfigError, ModelError, NegotiationError, RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[[str], Path]
LENGTH = 64
PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.3,
    "num_labels": 3,
    "pad_token_id": 0,
}
MODERN = {
    "global_attn_every_n_layers": 2,
    "local_attention": 8,
    "initializer_cutoff_factor": 3.0,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DISTIL = {"dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 96}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Builds the tiny random checkpoint of an architecture, once each."""
    root, made = tmp_path_factory.mktemp("encoders"), dict[str, Path]()

    def get(architecture: str) -> Path:
        if architecture not in made:
            torch.manual_seed(0)
            cls = getattr(transformers, architecture)
            settings = {k: v for k, v in COMMON.items() if k in ("vocab_size", "max_position_embeddings", "num_labels")}
            settings = settings | DISTIL | {"initializer_range": 0.3} if "Distil" in architecture else dict(COMMON)
            settings |= MODERN if "Modern" in architecture else {}
            made[architecture] = root / architecture
            cls(cls.config_class(**settings)).eval().save_pretrained(made[architecture])
        return made[architecture]

    return get


def expected(path: Path, architecture: str) -> list[torch.Tensor]:
    """transformers' answer for each prompt alone: the first token's state, or logits."""
    model = (
        getattr(transformers, architecture)
        .from_pretrained(path, attn_implementation="eager", trust_remote_code=False)
        .eval()
    )
    with torch.no_grad():
        answers = [model(torch.tensor([prompt])) for prompt in PROMPTS]
    return [a.logits[0] if hasattr(a, "logits") else a.last_hidden_state[0, 0] for a in answers]


@pytest.mark.parametrize("architecture", [one for one in EMBEDDERS if one != "ModernBertModel"])
@pytest.mark.behaviour(13, 35)
def test_embeddings_equal_transformers_in_one_batch(architecture: str, encoder: Tiny) -> None:
    path = encoder(architecture)
    llm = LLM(path, device="cpu", max_num_batched_tokens=64)
    (group,) = llm.plan.groups
    assert (group.backend, group.layers[0].attention_type, group.kv_spec) == ("torch", "encoder_only", "")
    assert llm.plan.cache_groups == ()
    with recorded(llm) as steps:
        found = llm.embed(PROMPTS, PoolingParams(task="embed", normalize=False))
    assert max(len(step.rows) for step in steps) > 1
    assert all((step.num_computed == 0).all() for step in steps)  # no prompt came in parts
    for ours, theirs in zip(found, expected(path, architecture), strict=True):
        assert torch.allclose(torch.tensor(ours.outputs.embedding), theirs, atol=2e-5)


@pytest.mark.behaviour(13, 35)
def test_local_layers_see_a_window_in_both_directions(encoder: Tiny) -> None:
    path = encoder("ModernBertModel")
    llm = LLM(path, device="cpu", max_num_batched_tokens=64)
    assert sorted(str(group.layers[0].window) for group in llm.plan.groups) == ["5", "None"]
    with recorded(llm) as steps:
        found = llm.embed(PROMPTS, PoolingParams(normalize=False))
    assert max(len(step.rows) for step in steps) > 1
    for ours, theirs in zip(found, expected(path, "ModernBertModel"), strict=True):
        assert torch.allclose(torch.tensor(ours.outputs.embedding), theirs, atol=2e-5)


@pytest.mark.behaviour(35)
def test_a_head_over_the_mean_and_one_over_each_token(encoder: Tiny, tmp_path: Path) -> None:
    shutil.copytree(encoder("ModernBertForSequenceClassification"), path := tmp_path / "mean")
    config = json.loads((path / "config.json").read_text()) | {"classifier_pooling": "mean"}
    (path / "config.json").write_text(json.dumps(config))
    llm = LLM(path, device="cpu")
    for ours, theirs in zip(llm.classify(PROMPTS), expected(path, "ModernBertForSequenceClassification"), strict=True):
        assert torch.allclose(torch.tensor(ours.outputs.probs), theirs.softmax(-1), atol=2e-5)
    with pytest.raises(ModelError, match="reads the mean of all tokens"):
        LLM(path, device="cpu", overrides=['model_family.transformers_encoder.pooling="cls"'])
    tagger = encoder("ModernBertForTokenClassification")
    outputs = LLM(tagger, device="cpu").encode(PROMPTS, pooling_task="token_classify")
    for ours, theirs in zip(outputs, expected(tagger, "ModernBertForTokenClassification"), strict=True):
        assert torch.allclose(ours.outputs.data[0], theirs[0].softmax(-1), atol=2e-5)


@pytest.mark.parametrize("architecture", CLASSIFIERS)
@pytest.mark.behaviour(35)
def test_class_scores_equal_transformers(architecture: str, encoder: Tiny) -> None:
    path = encoder(architecture)
    found = LLM(path, device="cpu").classify(PROMPTS)
    for ours, theirs in zip(found, expected(path, architecture), strict=True):
        assert torch.allclose(torch.tensor(ours.outputs.probs), theirs.softmax(-1), atol=2e-5)


def test_mean_pooling_by_option(encoder: Tiny) -> None:
    path = encoder("BertModel")
    llm = LLM(path, device="cpu", overrides=['model_family.transformers_encoder.pooling="mean"'])
    model = transformers.BertModel.from_pretrained(path, attn_implementation="eager", trust_remote_code=False).eval()
    with torch.no_grad():
        theirs = [model(torch.tensor([prompt])).last_hidden_state[0].mean(0) for prompt in PROMPTS]
    for ours, mean in zip(llm.embed(PROMPTS), theirs, strict=True):
        assert torch.allclose(torch.tensor(ours.outputs.embedding), mean / mean.norm(), atol=2e-5)


class Calls(TorchDispatchMode):
    """Counts the operations of torch by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("architecture", "products"), [("BertModel", 4), ("DistilBertModel", 4)])
def test_a_step_on_a_cpu_is_packed_products_and_attention_over_texts_of_equal_length_at_once(
    architecture: str, products: int, encoder: Tiny
) -> None:
    llm = LLM(encoder(architecture), device="cpu")
    for each in ("fused the activation into 3 linear layers", "merged q, k, v projections in 3 layers"):
        assert each in llm.engine.runner.model.notes
    with Calls() as calls:
        llm.embed([[5] * 7, [6] * 7, [7] * 9])
    counts = calls.counts
    assert counts["mkldnn::_linear_pointwise"] >= 3 * products
    assert counts["aten::_scaled_dot_product_flash_attention_for_cpu"] == 3 * 2  # two lengths
    assert counts["aten::gelu"] == counts["aten::logsumexp"] == 0
    plain = LLM(encoder(architecture), device="cpu", optimize=False)
    assert not plain.engine.runner.model.notes[:-1]


def test_weights_are_read_again_in_place(encoder: Tiny) -> None:
    path = encoder("BertModel")
    llm = LLM(path, device="cpu")
    before = llm.embed(PROMPTS)
    dense = llm.engine.runner.model.hf_model.encoder.layer[0].output.dense
    dense.packed.copy_(pack(torch.zeros_like(dense.weight)))
    assert llm.embed(PROMPTS)[1].outputs.embedding != before[1].outputs.embedding
    llm.engine.reload_weights()
    assert [o.outputs.embedding for o in llm.embed(PROMPTS)] == [o.outputs.embedding for o in before]
    with pytest.raises(ModelError, match="do not fit the loaded model"):
        llm.engine.reload_weights(encoder("DistilBertModel"))


def test_what_a_model_of_whole_prompts_cannot_do_is_refused(encoder: Tiny) -> None:
    path = encoder("BertModel")
    with pytest.raises(NegotiationError, match=r"max_model_len = 64 .* more than scheduler.max_batched_tokens = 32"):
        LLM(path, device="cpu", max_num_batched_tokens=32, max_model_len=64)
    with pytest.raises(NegotiationError, match=r"prefix_caching = true .* keep nothing between steps"):
        LLM(path, device="cpu", enable_prefix_caching=True)
    with pytest.raises(NegotiationError, match=r"cache.dtype = 'fp8' .* has nothing to hold"):
        LLM(path, device="cpu", overrides=["cache.dtype=fp8"])
    with pytest.raises(NegotiationError, match="attention type: needs encoder_only, offers decoder"):
        LLM(path, device="cpu", backend="cpu")
    llm = LLM(path, device="cpu", max_num_batched_tokens=32)
    assert llm.engine.limits.max_model_len == 32
    with pytest.raises(RequestError, match="33"):
        llm.embed(random_prompts([33]))
    with pytest.raises((ConfigError, RequestError)):
        llm.generate([[1, 2]], SamplingParams(max_tokens=1))


def test_weights_that_cannot_stay_in_host_memory_are_refused_there(encoder: Tiny) -> None:
    llm = LLM(encoder("BertModel"), device="cpu", offload_gib=1.0)
    assert any("has no effect on cpu" in note for note in llm.engine.notes)
    with pytest.raises(ModelError, match=r"offload_gib = 0.5: the layers of Linear cannot stay in host memory"):
        offload.place_whole(torch.nn.Linear(1, 1), torch.device("meta"), 2**29)


def test_explain_shows_layers_without_a_cache(encoder: Tiny) -> None:
    text = LLM(encoder("BertModel"), device="cpu").plan.explain()
    assert "encoder_only" in text
    assert "keep nothing between steps" in text
    assert set(ARCHITECTURES) == {*EMBEDDERS, *CLASSIFIERS, *TAGGERS}


@pytest.mark.parametrize("change", [{"num_attention_heads": 5}, {"hidden_size": -4}, {"intermediate_size": "many"}])
def test_sizes_that_no_encoder_can_have_are_refused(change: dict[str, Any], encoder: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "bert"
    shutil.copytree(encoder("BertModel"), path)
    config = json.loads((path / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"{path}/config.json "):
        LLM(path, dtype="float32")
