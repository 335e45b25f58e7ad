"""Features over stages of ranks: what one rank has of a step reaches the others, and answers are one process's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import head_folders
import mtp_checkpoints
import pytest
import quantized_checkpoints as forms
import tiny_models
import torch
from engine_driver import random_prompts
from lora_cases import PeftOracle
from quantized_engines import answer, engine, expected, same
from thread_ranks import ThreadRanks
from tiny_engines import DEFAULTS, everything_returned
from tiny_vision import image

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import ConfigError
from tests.proposers.test_medusa import heads_of, written
from tests.ranks.test_pipeline_ranks import TEXTS, compare

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
PROMPTS = random_prompts([5, 30, 17, 1, 9, 12])
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)

# --- adapters

LORA = {
    "lora.name": "torch",
    "lora.max_adapters": 2,
    "lora.max_rank": 8,
    "lora.target_modules": (
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("embed_tokens", "lm_head"),
    ),
}


@pytest.fixture(scope="module")
def oracle(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> PeftOracle:
    adapters = {
        "plain": {},
        "stabilised": {"r": 8, "use_rslora": True, "rank_pattern": {"q_proj": 3}},
        "ends": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
        "head": {"target_modules": ["lm_head"]},
    }
    return PeftOracle(tiny("llama"), tmp_path_factory.mktemp("adapters"), adapters)


def adapted(oracle: PeftOracle, names: list[str | None]) -> Callable[[LLM], list[list[int]]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[: len(names)]]
    adapters = [oracle.request(name) for name in names]
    return lambda llm: [list(one.outputs[0].token_ids) for one in llm.generate(prompts, GREEDY, lora_request=adapters)]


@pytest.mark.parametrize(
    "ranks",
    [
        {"pipeline": 2, "tensor": 1, "scheduler.async": True},
        {"pipeline": 2, "tensor": 1, "optimize": False, "max_num_batched_tokens": 16},
        pytest.param({"pipeline": 2, "tensor": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=["async", "chunks", "with tensor"],
)
def test_adapters_of_a_batch_are_those_of_peft(tiny: Tiny, oracle: PeftOracle, ranks: dict[str, Any]) -> None:
    """Three adapters in two slots, one of them of the output projection alone, which one stage has."""
    engines = ThreadRanks(tiny("llama"), **LORA, **ranks)
    for names in (["plain", None, "ends", "stabilised", "plain", "head"], ["head", None]):
        found = engines.same(adapted(oracle, names))
        assert found == [oracle.greedy(name, ids, 6) for name, ids in zip(names, PROMPTS, strict=False)]
    one = oracle.request("plain")
    assert one is not None
    assert engines.same(lambda llm: (llm.remove_lora(1), llm.add_lora(one), llm.pin_lora(1)))
    engines.close()


def test_a_merged_adapter_is_part_of_each_stages_weights(tiny: Tiny, oracle: PeftOracle) -> None:
    settings = {**LORA, "lora.max_adapters": 1, "lora.merge": True}
    engines = ThreadRanks(tiny("llama"), tensor=1, pipeline=2, **settings)
    for name in ("ends", "plain"):
        assert engines.same(adapted(oracle, [name])) == [oracle.greedy(name, PROMPTS[0], 6)]
        number = oracle.names.index(name) + 1
        assert engines.same(lambda llm, number=number: llm.remove_lora(number))  # type: ignore[misc]
    assert engines.same(adapted(oracle, [None])) == [oracle.greedy(None, PROMPTS[0], 6)]
    engines.close()


def test_a_layer_that_no_stage_has_is_named(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"the model has no w9 to adapt"):
        ThreadRanks(tiny("llama"), tensor=1, pipeline=2, **{**LORA, "lora.target_modules": ("w9", "lm_head")})


# --- quantized weights


def over_stages(path: Path, **settings: Any) -> tuple[list[int], list[float]]:
    given = {**DEFAULTS, "weights.activation": "none", "optimize": True, "tensor": 1, "pipeline": 2, **settings}
    ranks = ThreadRanks(path, **given)
    found = ranks.same(answer)
    ranks.close()
    return found


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> Path:
    return tiny("llama", num_hidden_layers=2, intermediate_size=128)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("AWQ", marks=pytest.mark.slow),
        pytest.param("compressed-tensors FP8 block", marks=pytest.mark.slow),
        pytest.param("GPTQ with act order", marks=pytest.mark.slow),
    ],
)
def test_a_stage_packs_its_own_quantized_weights(form: str, plain: Path, tmp_path: Path) -> None:
    forms.write(forms.FORMS[form], plain, tmp_path / "quantized", tmp_path / "meant")
    same(over_stages(tmp_path / "quantized"), expected(tmp_path / "meant"))


@pytest.mark.parametrize(
    "ranks", [{}, pytest.param({"tensor": 2}, marks=pytest.mark.exhaustive)], ids=["stages", "with tensor"]
)
def test_plain_weights_are_quantized_by_their_stage(ranks: dict[str, Any], plain: Path) -> None:
    settings = {"weights.quantize": "int8"}
    same(over_stages(plain, **settings, **ranks), answer(engine(plain, optimize=True, **settings)))


@pytest.mark.slow
def test_quantized_experts_are_those_of_a_stage(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "intermediate_size": 128}
    plain = tiny_models.build("gpt_oss", tmp_path / "plain", **sizes)
    forms.gpt_oss(plain, tmp_path / "quantized", tmp_path / "meant")
    same(over_stages(tmp_path / "quantized"), expected(tmp_path / "meant"))


# --- drafters of the last rank

SMALLER = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}


def drafts_for(name: str, root: Path, tiny: Tiny) -> tuple[Path, Path | None]:
    """The checkpoint that a drafter drafts for, and the drafter's own folder."""
    model = tiny("llama_deep" if name == "eagle3" else "llama")
    if name in ("eagle", "eagle3"):
        return model, head_folders.build(root / name, model, name)
    if name.startswith("medusa"):
        return model, written(root / name, heads_of(64, tiny_models.VOCAB_SIZE), "shared")
    if name == "draft_model":
        return model, tiny("llama", **SMALLER)
    return mtp_checkpoints.build(root / name, tiny("qwen2"), "qwen2"), None


def accepted(llm: LLM) -> int:
    return int(llm.engine.extension("drafts").counts.accepted)


@pytest.mark.behaviour(15, 37)
@pytest.mark.parametrize(
    "ranks",
    [
        {"pipeline": 2},
        pytest.param({"pipeline": 3, "model_family.transformers_decoder.lean": False}, marks=pytest.mark.slow),
    ],
    ids=["two", "three"],
)
def test_a_head_reads_the_layers_of_all_stages(ranks: dict[str, Any], engines: Callable[..., LLM]) -> None:
    """A trained head guesses as well as in one process, so it has read the same hidden states."""
    settings = {"drafter.name": "eagle3", "drafter.tokens": 3, "drafter.adaptive": False, "max_model_len": 128}
    whole, over = engines(None, **settings), ThreadRanks(None, tensor=1, **{**DEFAULTS, **settings, **ranks})
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    before, expected = accepted(whole), whole.generate(TEXTS[:3], params)
    for found in over.each(lambda llm: llm.generate(TEXTS[:3], params)):
        compare(found, expected)
    assert over.same(accepted) == accepted(whole) - before > 5
    model = over.llms[-1].engine.runner.model
    assert model.weight_bytes < whole.engine.runner.model.weight_bytes  # type: ignore[attr-defined]
    over.close()


@pytest.mark.behaviour(15, 37)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param("eagle", {"tensor": 1}, marks=pytest.mark.slow),
        pytest.param("mtp", {"tensor": 1}, marks=pytest.mark.slow),
        pytest.param("draft_model", {"tensor": 1}, marks=pytest.mark.slow),
        pytest.param("medusa_tree", {"tensor": 1}, marks=pytest.mark.slow),
        pytest.param("medusa", {"tensor": 1}, marks=pytest.mark.exhaustive),
        pytest.param("eagle3", {"tensor": 1, "pipeline": 4}, marks=pytest.mark.exhaustive),
        pytest.param("eagle3", {"tensor": 2}, marks=pytest.mark.exhaustive),
        pytest.param("draft_model", {"tensor": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_last_rank_proposes_and_all_ranks_verify(
    name: str, ranks: dict[str, Any], tiny: Tiny, tmp_path: Path, engines: Callable[..., LLM]
) -> None:
    """Prompts in chunks and behind cached prefixes, and few blocks, so that requests lose theirs."""
    path, folder = drafts_for(name, tmp_path, tiny)
    small = {"max_num_batched_tokens": 24, "max_num_seqs": 6, "memory": "160KiB", "drafter.tokens": 3}
    drafting = {"drafter.name": name} | ({} if folder is None else {"drafter.path": str(folder)})
    whole = engines(path, **small, **drafting)
    given = {**DEFAULTS, **small, **drafting, "pipeline": 2, **ranks}
    over = ThreadRanks(path, **given)
    beginning = random_prompts([32], seed=5)[0]
    prompts = [*random_prompts([3, 28, 17, 9, 1, 22]), [*beginning, 5, 6], [*beginning, 7], [7, 8, 9] * 7]
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, seed=2, max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    for params in (greedy, drawn):
        expected = whole.generate(prompts, params)
        for found in over.each(lambda llm, params=params: llm.generate(prompts, params)):  # type: ignore[misc]
            compare(found, expected)
    counts = over.each(lambda llm: llm.engine.extension("drafts").drafting.counts)
    assert all(one.accepted == counts[0].accepted and one.failures == 0 for one in counts)
    assert counts[0].proposed > 0
    over.each(everything_returned)
    over.close()


# --- pooling

ARCHITECTURES = {"auto": "LlamaForSequenceClassification", "mean": "LlamaModel"}


@pytest.mark.parametrize(
    ("task", "pooling", "ranks"),
    [
        pytest.param("embed", "mean", {"pipeline": 2}, marks=pytest.mark.slow),
        ("embed", "last", {"pipeline": 3, "scheduler.async": True}),
        pytest.param("classify", "auto", {"pipeline": 2, "scheduler.async": True}, marks=pytest.mark.slow),
        pytest.param("embed", "cls", {"pipeline": 2, "tensor": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_every_rank_has_the_answers_of_the_last(
    task: str, pooling: str, ranks: dict[str, Any], tiny: Tiny, engines: Callable[..., LLM]
) -> None:
    """Prompts in chunks, behind cached prefixes and with too few blocks."""
    sizes = {"num_labels": 3} if task == "classify" else {}
    path = tiny("llama", architecture=ARCHITECTURES.get(pooling, "LlamaForCausalLM"), num_hidden_layers=3, **sizes)
    settings = {"task": task, "model_family.transformers_decoder.pooling": pooling, "max_num_batched_tokens": 24}
    whole = engines(path, **settings)
    over = ThreadRanks(path, **{**DEFAULTS, "tensor": 1, **settings, **ranks, "memory": "160KiB"})
    beginning = random_prompts([32], seed=5)[0]
    prompts = [*random_prompts([3, 40, 17, 9, 1, 33]), [*beginning, 5, 6], [*beginning, 7]]
    for _ in range(2):
        expected = [one.outputs.data for one in getattr(whole, task)(prompts)]
        for found in over.each(lambda llm: getattr(llm, task)(prompts)):
            torch.testing.assert_close([one.outputs.data for one in found], expected, atol=1e-5, rtol=0)
    over.each(everything_returned)
    over.close()


# --- images


@pytest.mark.parametrize(
    "ranks",
    [{"tensor": 1}, pytest.param({"tensor": 2}, marks=pytest.mark.exhaustive)],
    ids=["stages", "with tensor"],
)
def test_the_first_rank_encodes_images(
    ranks: dict[str, Any], tiny_vision_model: Callable[[str], Path], engines: Callable[..., LLM]
) -> None:
    """Prompts in chunks that end within images, with adapters' place, preemption and images that are cached."""
    path = tiny_vision_model("llava")
    small = {"max_num_batched_tokens": 16, "max_model_len": 128, "max_num_seqs": 4, "scheduler.async": True}
    whole, over = engines(path, **small), ThreadRanks(path, **{**DEFAULTS, **small, "pipeline": 2, **ranks})
    texts = [("def <image> main(", [0]), ("import os, sys", []), ("The <image> jumps over the <image>", [2, 1])]
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": [image(seed) for seed in seeds]}} if seeds else text
        for text, seeds in texts
    ]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    expected = whole.generate(prompts, params)
    for _ in range(2):
        for found in over.each(lambda llm: llm.generate(prompts, params)):
            compare(found, expected)
    assert not hasattr(over.llms[-1].engine.runner.model.hf_model, "encoder")  # type: ignore[attr-defined]
    over.each(everything_returned)
    over.close()


def test_an_image_that_the_first_rank_cannot_encode_fails_on_all_ranks(
    tiny_vision_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_vision_model("llava")
    over = ThreadRanks(path, tensor=1, **{**DEFAULTS, "pipeline": 2, "max_model_len": 128})

    def fail(modality: str, items: Any) -> Any:
        raise ValueError("the encoder is broken")

    monkeypatch.setattr(over.llms[0].engine.runner.model, "encode", fail)
    prompts = [{"prompt": "def <image> main(", "multi_modal_data": {"image": [image(0)]}}, "import os"]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for bad, good in over.each(lambda llm: llm.generate(prompts, params)):
        assert bad.outputs[0].finish_reason == "error"
        assert "the encoder is broken" in str(bad.outputs[0].stop_reason)
        assert len(good.outputs[0].token_ids) == 4
    over.each(everything_returned)
    over.close()


# --- other forms of parallelism in each stage


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "sizes", "settings"),
    [
        ("llama", {"num_key_value_heads": 1}, {"parallel.decode_context": 2}),
        ("deepseek_v2", {}, {"parallel.decode_context": 2}),
        ("mixtral", {}, {"parallel.expert": 2, "batch_invariant": False}),
    ],
)
def test_ranks_of_a_stage_share_keys_or_experts(
    family: str, sizes: dict[str, Any], settings: dict[str, Any], tiny: Tiny, engines: Callable[..., LLM]
) -> None:
    path, small = tiny(family, num_hidden_layers=3, **sizes), {"max_num_batched_tokens": 24, "max_model_len": 128}
    batch = {name: value for name, value in settings.items() if name == "batch_invariant"}
    given = {**DEFAULTS, **small, **settings, "scheduler.async": True}
    over = ThreadRanks(path, tensor=2, pipeline=2, **given)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    expected = engines(path, **small, **batch).generate(PROMPTS, params)
    for found in over.each(lambda llm: llm.generate(PROMPTS, params)):
        compare(found, expected)
    over.close()
