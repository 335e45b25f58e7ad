"""Models in parts: the ranks of a tensor group, as threads of one process, give the whole model's text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import families_sweep
import pytest
import tensor_sweep
import tensor_table
import tiny_models
import tiny_speech
import tiny_vision
import torch
import transformers
from family_table import FAMILIES

from slotline.core import LLM, SamplingParams
from slotline.plugins.model_families import building, checkpoint, inspection
from slotline.plugins.model_families.encoder_model import TransformersEncoder
from slotline.plugins.model_families.speech_model import TransformersSpeech
from slotline.plugins.model_families.tensor_parallel import attention, check, packed, threads
from slotline.plugins.model_families.transformers_model import TransformersDecoder
from slotline.plugins.model_families.vision_model import TransformersVision
from slotline.registry.contracts import PoolingParams
from slotline.registry.contracts.attention import AttentionLayer
from slotline.registry.contracts.communicator import Communicator
from slotline.registry.contracts.model_family import ModelContext, Shard
from slotline.registry.errors import NegotiationError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
FAST = (
    "falcon_h1",
    "falcon_rotary",
    "gemma4",
    "gpt_oss",
    "jamba",
    "llama",
    "minicpm3",
    "nemotron_h",
    "olmo2",
    "qwen3_next",
)
TOKENS = 9
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "memory": "8MiB",
    "observability.check_integrity": True,
    "observability.progress": False,
}


@pytest.mark.spread(4, slow=3)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.exhaustive) for name in FAMILIES]
)
def test_the_parts_of_a_family_give_the_whole_models_text_as_its_row_says(name: str, tiny: Tiny) -> None:
    """On two ranks, and on four, which share KV heads."""
    row = tensor_table.row(name, tiny(name))
    assert "diff" not in row
    assert row == tensor_table.shown()[name], "run `python tests/support/tensor_table.py`"


def test_the_page_has_every_family_and_no_other() -> None:
    assert list(tensor_table.shown()) == list(FAMILIES)


@pytest.mark.parametrize("settings", [{"vocab_size": 387}, {"tie_word_embeddings": True, "vocab_size": 385}], ids=str)
def test_a_vocabulary_that_does_not_divide_is_filled_up(settings: dict[str, Any], tiny: Tiny) -> None:
    path = tiny("llama", **settings)
    word, reason = tensor_sweep.verdict(path, 4)
    assert (word, tensor_sweep.say(tensor_sweep.load(path)).logits[0].shape[1]) == ("EQUAL", settings["vocab_size"]), (
        reason
    )


def test_slopes_of_mpt_are_those_of_a_ranks_heads(tiny: Tiny) -> None:
    path = tiny("mpt", d_model=64, n_heads=4)
    slopes = [TransformersDecoder().inspect(path, shard=Shard(rank=r, size=2)).layers[0].alibi_slopes for r in (0, 1)]
    assert (*slopes[0], *slopes[1]) == TransformersDecoder().inspect(path).layers[0].alibi_slopes  # type: ignore[misc]
    assert tensor_sweep.verdict(path, 2)[0] == "EQUAL"


def test_three_ranks_are_as_good_as_two(tiny: Tiny) -> None:
    path = tiny("qwen3", num_attention_heads=6, num_key_value_heads=3)
    assert tensor_sweep.verdict(path, 3)[0] == "EQUAL"


@pytest.mark.parametrize(
    ("settings", "size", "said"),
    [
        ({}, 3, "4 heads of 16 of 'model.layers.0.self_attn.q_proj' cannot be divided among 3 ranks.*1, 2, 4"),
        ({"intermediate_size": 98}, 4, "size 98 of 'model.layers.0.mlp.gate_proj' .* among 4 ranks.*1, 2, 7, 14"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "3 heads of 16 of '.*k_proj'.*1, 3"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_in_the_plan(
    settings: dict[str, int], size: int, said: str, tiny: Tiny
) -> None:
    path = tiny("qwen3", **settings)
    with pytest.raises(NegotiationError, match=f"(?s){said}"):
        LLM(str(path), tensor=size)


def test_routed_and_shared_experts_are_summed_once(tiny: Tiny) -> None:
    def calls(shard: Shard, communicator: Communicator) -> int:
        model, before = tensor_sweep.load(tiny("deepseek_v3"), shard, communicator), communicator.calls  # type: ignore[attr-defined]
        tensor_sweep.say(model)
        return communicator.calls - before  # type: ignore[attr-defined,no-any-return]

    forwards = 1 + tensor_sweep.NEW
    assert threads.run(2, calls) == [forwards * (1 + 2 * 4 + 1)] * 2  # embedding, attention and MLP of 4 layers, head


def test_attention_with_an_unknown_part_stays_whole_and_is_named(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BY_HEAD", ())
    path = tiny("gpt_oss")
    facts = TransformersDecoder().inspect(path, shard=Shard(rank=0, size=8))  # more ranks than the heads divide
    note = "whole on each rank, since its sinks is not known: model.layers.0.self_attn"
    assert facts.notes[0].startswith(note)
    assert facts.layers[0].num_heads == 4
    inspection._seen.cache_clear()
    assert tensor_sweep.verdict(path, 4)[0] == "EQUAL"
    inspection._seen.cache_clear()


def test_a_model_without_a_layer_to_divide_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotline.plugins.model_families.tensor_parallel.mixers.RECIPES", {})
    with pytest.raises(NegotiationError, match=r"no layer of MambaForCausalLM .* no rule divides its state"):
        TransformersDecoder().inspect(tiny("mamba"), shard=Shard(rank=0, size=2))


def test_a_wrong_division_of_an_unlisted_architecture_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families_sweep.build("gpt_neox", "GPTNeoXForCausalLM", tmp_path)
    found, shard = checkpoint.read(tmp_path), Shard(rank=0, size=4)
    assert "4 parts of a small copy give the whole's logits" in check.check(found, shard)
    wrong: Mapping[str, Any] = packed.PACKED | {"query_key_value": {"GPTNeoXAttention": packed._behind}}
    monkeypatch.setattr(attention, "PACKED", wrong)
    inspection._seen.cache_clear()
    with pytest.raises(NegotiationError, match=r"gives other numbers in 2 parts: layer 0 .* first at position 0"):
        check._compare(found, Shard(rank=0, size=2))
    inspection._seen.cache_clear()
    assert "kept in" in building._self_checked(tensor_sweep.load(tmp_path).hf_model, _context(tmp_path, shard))[1]


def _context(path: Path, shard: Shard | None, **given: Any) -> ModelContext:
    facts = TransformersDecoder().inspect(path, shard=shard)
    return ModelContext(contract=1, facts=facts, device="cpu", dtype="float32", shard=shard, **given)


# other tasks and families


@pytest.mark.parametrize(
    ("name", "architecture", "task"),
    [("qwen3", "Qwen3Model", "embed"), ("mixtral", "MixtralForSequenceClassification", "classify")],
)
@torch.no_grad()
def test_embedders_and_classifiers_answer_as_the_whole_model(
    name: str, architecture: str, task: str, tmp_path: Path
) -> None:
    path = tiny_models.build(
        name, tmp_path / name, architecture=architecture, **({"num_labels": 3} if task == "classify" else {})
    )

    @torch.no_grad()
    def answer(shard: Shard | None = None, communicator: Communicator | None = None) -> torch.Tensor:
        model = tensor_sweep.load(path, shard, communicator, task=task)
        states = model.forward(_tokens(), torch.arange(TOKENS), _attend)
        params = [model.pooler.adjust(PoolingParams())]
        return model.pooler.pool(model.compute_logits(states)[-1:], params)  # type: ignore[no-any-return]

    whole = answer()
    for found in threads.run(4, answer):
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["BertModel", "DistilBertModel", "XLMRobertaForSequenceClassification"])
def test_the_parts_of_an_encoder_give_its_states(architecture: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    distil = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96}
    model_class = getattr(transformers, architecture)
    settings: dict[str, Any] = distil if "Distil" in architecture else sizes
    config = model_class.config_class(**settings, vocab_size=99, max_position_embeddings=64, initializer_range=0.3)
    model_class(config).eval().save_pretrained(tmp_path)
    task = "classify" if "Classification" in architecture else "embed"

    @torch.no_grad()
    def states(shard: Shard | None = None, communicator: Communicator | None = None) -> torch.Tensor:
        family = TransformersEncoder()
        facts = family.inspect(tmp_path, shard=shard)
        given: Any = {"shard": shard, "communicator": communicator, "task": task}
        model = family.load(ModelContext(contract=1, facts=facts, device="cpu", dtype="float32", **given))
        model.reload_weights()
        return model.forward(_tokens(99), torch.arange(TOKENS), _attend)

    whole = states()
    for found in threads.run(2, states):
        torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


def test_the_parts_of_a_speech_decoder_give_its_logits(tmp_path: Path) -> None:
    path = tiny_speech.build(tmp_path / "whisper")

    @torch.no_grad()
    def logits(shard: Shard | None = None, communicator: Communicator | None = None) -> torch.Tensor:
        family = TransformersSpeech()
        facts = family.inspect(path, shard=shard)
        given: Any = {"shard": shard, "communicator": communicator}
        model = family.load(ModelContext(contract=1, facts=facts, device="cpu", dtype="float32", **given))
        item = model.process("audio", tiny_speech.recording(1))
        (heard,) = model.encode("audio", [item.inputs])
        states = model.forward(_tokens(99), torch.arange(TOKENS), _attend, encoder_states=heard)
        return model.compute_logits(states)

    whole = logits()
    for found in threads.run(2, logits):
        torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


def test_the_decoder_of_a_vision_model_is_divided_and_its_encoder_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="image processors need Pillow")
    path = tiny_vision.build("llava", tmp_path / "llava")

    @torch.no_grad()
    def logits(shard: Shard | None = None, communicator: Communicator | None = None) -> torch.Tensor:
        family = TransformersVision()
        facts = family.inspect(path, shard=shard)
        given: Any = {"shard": shard, "communicator": communicator}
        model: Any = family.load(ModelContext(contract=1, facts=facts, device="cpu", dtype="float32", **given))
        (seen,) = model.encode("image", [model.process("image", tiny_vision.image(1)).inputs])
        embeddings = torch.cat((model.embed(_tokens(99)), seen))
        places = torch.arange(len(embeddings))
        ids = torch.zeros(len(places), dtype=torch.int64)
        return model.compute_logits(model.forward(ids, places, _attend, None, embeddings))  # type: ignore[no-any-return]

    whole = logits()
    for found in threads.run(2, logits):
        torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


def _tokens(vocab: int = tiny_models.VOCAB_SIZE) -> torch.Tensor:
    return torch.randint(3, vocab, (TOKENS,), generator=torch.Generator().manual_seed(7))


def _attend(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over the tokens of one call: all of them in encoders and of what was heard, else those before."""
    states = (states.transpose(0, 1)[None] for states in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        *states,
        is_causal=layer.attention_type not in ("encoder_only", "cross"),
        scale=layer.scale,
        enable_gqa=layer.num_heads != layer.num_kv_heads,
    )
    return out[0].transpose(0, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llava", "whisper"])
def test_ranks_in_processes_of_their_own_take_images_and_sound(name: str, tmp_path: Path) -> None:
    if name == "whisper":
        path = tiny_speech.build(tmp_path / name)
        prompts = [[1], [1, 7, 9], [1, *range(10, 30)]]
        heard = [tiny_speech.recording(seed) for seed in range(3)]
        wanted = [tiny_speech.greedy_reference(path, heard[i], prompt, 12) for i, prompt in enumerate(prompts)]
        asked: list[Any] = [
            {"prompt_token_ids": prompt, "multi_modal_data": {"audio": sound}}
            for prompt, sound in zip(prompts, heard, strict=True)
        ]
    else:
        pytest.importorskip("PIL", reason="image processors need Pillow")
        path = tiny_vision.build(name, tmp_path / name)
        texts = [("def <image> main(", (0,)), ("class Row <image><image> pass", (1, 0)), ("import os", ())]
        wanted = [tiny_vision.greedy_reference(path, text, seeds, 12) for text, seeds in texts]
        asked = [
            {"prompt": text, "multi_modal_data": {"image": [tiny_vision.image(seed) for seed in seeds]}}
            for text, seeds in texts
        ]
    llm = LLM(str(path), tensor=2, **ENGINE)
    outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == wanted
