"""EAGLE and EAGLE-3 heads: what they draft, from which cache, in which folders, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import head_folders
import pytest
import torch
from attrs import evolve
from engine_driver import GREEDY, add, random_prompts, run_all, tokens_of
from head_folders import Dense, Expected, expected_of
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from slotline.core import LLM, SamplingParams
from slotline.proposers.eagle.heads import Eagle3Head, EagleHead, read_config, read_weights
from slotline.registry.errors import ContractError, ModelError
from tests.llm.test_small_model_files import HELD_OUT

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
KINDS = ("eagle", "eagle3")
LENGTHS = (5, 40, 17, 2, 30, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Callable[[str, str], Path]:
    """The folder of a head for a tiny model."""
    root, made = tmp_path_factory.mktemp("heads"), dict[tuple[str, str], Path]()

    def get(family: str, kind: str) -> Path:
        key = (family, kind)
        made[key] = made.get(key) or head_folders.build(root / f"{family}-{kind}", tiny(family), kind)
        return made[key]

    return get


def settings_of(path: Path, kind: str, tokens: int = 4) -> dict[str, Any]:
    return {
        "drafter.name": kind,
        "drafter.path": str(path),
        "drafter.tokens": tokens,
        "drafter.adaptive": False,
        "memory": "8MiB",
    }


def watch(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """Every proposal from now on: the tokens that were known, and the drafts behind them."""
    drafting, seen = llm.engine.extension("drafts").drafting, list[tuple[list[int], list[int]]]()
    assert drafting is not None
    drafting.counts.failures = 0
    original = type(drafting.drafter).propose

    def propose(batch: Any) -> Any:
        draft = original(drafting.drafter, batch)  # type: ignore[arg-type]
        for row, known, tokens in zip(
            batch.rows.tolist(), batch.num_tokens.tolist(), draft.token_ids.tolist(), strict=True
        ):
            seen.append((batch.token_table[row, :known].tolist(), tokens))
        return draft

    drafting.drafter.propose = propose  # type: ignore[method-assign]
    return seen


def agree(seen: list[tuple[list[int], list[int]]], expected: Expected, length: int = 64) -> float:
    """The share of proposals that equal those of the head without a cache; drafts past the longest text count not.

    The longest texts come first: what the model and the head compute for one holds for all that it begins with.
    """
    equal = [
        drafts[: length - len(tokens)] == expected.drafts(tokens, len(drafts))[: length - len(tokens)]
        for tokens, drafts in sorted(seen, key=lambda each: -len(each[0]))
    ]
    return sum(equal) / len(equal)


# ---- what is drafted


@pytest.mark.spread(2)
@pytest.mark.behaviour(64, 120, 160)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama_deep", "qwen3", "gemma2"])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16}], ids=["whole", "chunks"])
def test_a_head_drafts_from_its_cache_what_it_drafts_without(
    tiny: Tiny, engines: Engines, folder: Any, family: str, kind: str, settings: dict[str, Any]
) -> None:
    path, head = tiny(family), folder(family, kind)
    llm = engines(path, **{**settings_of(head, kind), **settings})
    prompts, seen = random_prompts(LENGTHS, seed=3), watch(llm)
    assert tokens_of(llm, prompts) == tokens_of(engines(path), prompts)
    assert llm.engine.extension("drafts").drafting.counts.failures == 0
    assert len(seen) > 50
    assert agree(seen, expected_of(head, path, kind)) == 1


@pytest.mark.spread(2)
@pytest.mark.behaviour(70)
@pytest.mark.parametrize("family", ["mistral", "gemma3", "mixtral", "deepseek_v3", "gpt_oss", "llama4", "bamba"])
def test_its_layers_go_beside_any_models(tiny: Tiny, engines: Engines, folder: Any, family: str) -> None:
    """Windows, chunks, latent attention and states have cache groups of their own; the head's layer is a plain one."""
    path, head = tiny(family), folder(family, "eagle")
    llm = engines(path, **settings_of(head, "eagle"), max_num_batched_tokens=24)
    prompts, seen = random_prompts(LENGTHS, seed=3), watch(llm)
    assert tokens_of(llm, prompts) == tokens_of(engines(path), prompts)
    assert llm.engine.extension("drafts").drafting.counts.failures == 0
    assert agree(seen[::2], expected_of(head, path, "eagle")) == 1


def test_a_model_whose_layers_have_several_inputs_is_refused(tiny: Tiny, folder: Any) -> None:
    with pytest.raises(ContractError, match="reads inputs of layers, and layer 1 of this model has one of shape"):
        LLM(tiny("gemma3n"), device="cpu", **settings_of(folder("gemma3n", "eagle3"), "eagle3"))


@pytest.mark.parametrize("kind", KINDS)
def test_preemption_fills_the_cache_again(tiny: Tiny, engines: Engines, folder: Any, kind: str) -> None:
    path, head = tiny("llama_deep"), folder("llama_deep", kind)
    # a token takes 1 KiB in the model's four layers of the same shape and a quarter of that in the head's
    llm = engines(path, **{**settings_of(head, kind), "memory": f"{10 * 20}KiB", "max_num_batched_tokens": 24})
    prompts, seen = random_prompts((30, 25, 40, 10, 33, 28), seed=8), watch(llm)
    requests = [add(llm, str(i), prompt) for i, prompt in enumerate(prompts)]
    run_all(llm)
    assert [r.output_token_ids for r in requests] == tokens_of(engines(path), prompts)
    assert sum(r.metrics.num_preemptions for r in requests) > 0
    assert agree(seen, expected_of(head, path, kind)) > 0.9  # where blocks are short, the last drafts see a hole


@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_prefix_has_the_heads_entries_too(tiny: Tiny, engines: Engines, folder: Any, kind: str) -> None:
    path, head = tiny("llama_deep"), folder("llama_deep", kind)
    llm, plain = engines(path, **settings_of(head, kind)), engines(path)
    prompts = random_prompts((20, 21, 35), seed=4)
    expected = tokens_of(plain, prompts)
    assert tokens_of(llm, prompts) == expected
    # the same texts go on, and others turn off behind a token that no block ends with
    longer = [p + t[:14] for p, t in zip(prompts, expected, strict=True)]
    longer += [[*prompts[0][:19], 7, 8, 9], [*prompts[2][:34], 5]]
    seen = watch(llm)
    requests = [add(llm, str(i), prompt) for i, prompt in enumerate(longer)]
    run_all(llm)
    assert [r.output_token_ids for r in requests] == tokens_of(plain, longer)
    assert all(r.metrics.num_cached_tokens >= 16 for r in requests)
    assert agree(seen, expected_of(head, path, kind)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_ends_with_its_prompt_leaves_its_entries(
    tiny: Tiny, engines: Engines, folder: Any, kind: str
) -> None:
    path, head = tiny("llama_deep"), folder("llama_deep", kind)
    llm = engines(path, **settings_of(head, kind))
    prompt = random_prompts((40,), seed=5)[0]
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
    seen = watch(llm)
    request = add(llm, "a", prompt, GREEDY)
    run_all(llm)
    assert request.metrics.num_cached_tokens == 32
    assert agree(seen, expected_of(head, path, kind)) == 1


def test_requests_get_blocks_for_the_guesses_where_there_are_any(tiny: Tiny, engines: Engines, folder: Any) -> None:
    path, prompts = tiny("llama_deep"), random_prompts((14, 15), seed=2)
    wide = engines(path, **settings_of(folder("llama_deep", "eagle"), "eagle"))
    tight = engines(
        path, **{**settings_of(folder("llama_deep", "eagle"), "eagle"), "memory": "60KiB", "max_model_len": 32}
    )
    plain, held = engines(path), {}
    for llm in (wide, tight, plain):
        requests = [add(llm, str(i), prompt) for i, prompt in enumerate(prompts)]
        llm.engine.step()
        (group,) = llm.engine.scheduler.cache.groups
        held[id(llm)] = [len(group.blocks[request.row]) for request in requests]
        run_all(llm)
    assert list(held.values()) == [[2, 2], [2, 1], [1, 1]]  # of three blocks, nobody waits for a guess


@pytest.mark.spread(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_texts_up_to_the_longest_are_the_same_for_any_number_of_drafts(
    tiny: Tiny, engines: Engines, folder: Any, kind: str, tokens: int
) -> None:
    path = tiny("llama_deep")
    llm = engines(path, **settings_of(folder("llama_deep", kind), kind, tokens))
    prompts, params = random_prompts((50, 60, 63, 9), seed=6), SamplingParams(temperature=0, ignore_eos=True)
    assert tokens_of(llm, prompts, params) == tokens_of(engines(path), prompts, params)
    assert llm.engine.extension("drafts").drafting.counts.failures == 0


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_texts_are_the_same(tiny: Tiny, engines: Engines, folder: Any, kind: str) -> None:
    path = tiny("llama_deep")
    llm, prompts = engines(path, **settings_of(folder("llama_deep", kind), kind)), random_prompts(LENGTHS, seed=9)
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=20, ignore_eos=True)
    assert tokens_of(llm, prompts, params) == tokens_of(engines(path), prompts, params)


# ---- the heads that ship


@pytest.mark.spread(1)
@pytest.mark.parametrize(("kind", "least"), [("eagle", 2.2), ("eagle3", 2.6), ("medusa", 1.8)])
def test_the_shipped_heads_need_no_path_and_draft_well(kind: str, least: float) -> None:
    """On code that no training saw; the figures of training/README.md are those of 256 held-out places."""
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "memory": "16MiB", "max_model_len": 512}
    lines = HELD_OUT.splitlines(keepends=True)
    prompts = ["".join(lines[:count]) for count in (6, 12, 18, 24)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    plain, llm = (
        LLM(**settings),
        LLM(**settings, **{"drafter.name": kind, "drafter.tokens": 4, "drafter.adaptive": False}),
    )
    texts = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == texts
    assert llm.engine.extension("drafts") is not None
    assert llm.engine.extension("drafts").drafting.counts.acceptance_length >= least


# ---- the network


def test_the_eagle_layer_is_a_llamas_without_its_first_norm(tiny: Tiny, folder: Any) -> None:
    config = read_config(folder("llama_deep", "eagle"))
    head = EagleHead(config, bias=True)
    llama = LlamaConfig(**{**config.llama.to_dict(), "attn_implementation": "eager"})
    llama._attn_implementation = "eager"
    layer = LlamaDecoderLayer(llama, 0)
    layer.load_state_dict(head.layers[0].state_dict(), strict=False)
    layer.input_layernorm = torch.nn.Identity()
    n, size = 9, llama.hidden_size
    embeddings, hidden = torch.randn(2, n, size)
    positions = torch.arange(n)
    with torch.no_grad():
        x = head.fc(torch.cat([embeddings, hidden], -1))[None]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        rotary = LlamaRotaryEmbedding(llama)(x, positions[None])
        expected = layer(x, attention_mask=mask, position_embeddings=rotary)
        expected = expected[0] if isinstance(expected, tuple) else expected
        found, again = head(embeddings, hidden, positions, Dense())
    assert torch.allclose(found, expected.view_as(found), atol=1e-5)
    assert found is again


@pytest.mark.parametrize("first", [False, True])
def test_attention_is_added_to_the_hidden_state_with_or_without_its_norm(tiny: Tiny, folder: Any, first: bool) -> None:
    config = evolve(read_config(folder("llama_deep", "eagle3")), norm_before_residual=first)
    head = Eagle3Head(config)
    embeddings, hidden = torch.randn(2, 5, 64).unbind()
    positions = torch.arange(5)
    layer, rotary = head.midlayer, head.positions(positions, embeddings)
    with torch.no_grad():
        for norm in (layer.hidden_norm, layer.input_layernorm):
            norm.weight.uniform_(0.5, 2)
        out, again = head(embeddings, hidden, positions, Dense())
        states = layer.hidden_norm(hidden)
        attention = layer.self_attn(torch.cat([layer.input_layernorm(embeddings), states], -1), rotary, Dense())
        x = attention + (states if first else hidden)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    assert torch.allclose(again, x, atol=1e-5)
    assert torch.allclose(out, head.norm(x), atol=1e-5)


# ---- the forms of folders


def published(head: Path, folder: Path, form: str) -> Path:
    """A head's folder in another form."""
    folder.mkdir()
    config, weights = json.loads((head / "config.json").read_text()), read_weights(head)
    if form == "bin":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
        save_file(renamed, folder / "model.safetensors")
    if form.startswith("speculators"):
        layer = {key: config.pop(key) for key in list(config) if key not in ("eagle_config", "draft_vocab_size")}
        config |= {"speculators_model_type": "eagle3", "transformer_layer_config": layer, "target_hidden_size": None}
        config |= {"eagle_aux_hidden_state_layer_ids": config.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]}
        config |= {} if form.endswith("default") else {"norm_before_residual": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("kind", "form"),
    [("eagle", "bin"), ("eagle3", "bin"), ("eagle3", "layers.0"), ("eagle3", "speculators")],
)
def test_a_head_drafts_the_same_from_every_published_form(
    tiny: Tiny, folder: Any, tmp_path: Path, kind: str, form: str
) -> None:
    head, drafts = folder("llama_deep", kind), []
    for path in (head, published(head, tmp_path / "other", form)):
        llm = LLM(tiny("llama_deep"), device="cpu", max_model_len=64, **settings_of(path, kind))
        seen = watch(llm)
        tokens_of(llm, random_prompts(LENGTHS, seed=3))
        drafts.append(seen)
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) > 10


@pytest.mark.behaviour(128)
@pytest.mark.parametrize("named", [None, (0, 3), (3, 1, 2, 0)])
def test_the_layers_that_a_folder_names_are_read_in_its_order_and_else_the_usual_three(
    named: tuple[int, ...] | None, tiny: Tiny, tmp_path: Path
) -> None:
    path = tiny("llama_deep", num_hidden_layers=6)
    read = (2, 3, 3) if named is None else named  # 2, n // 2 and n - 3 of six
    changes = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(read)}}
    head = head_folders.build(tmp_path / "head", path, "eagle3", **changes)
    if named is None:
        config = json.loads((head / "config.json").read_text())
        del config["eagle_config"]
        (head / "config.json").write_text(json.dumps(config))
    llm = LLM(path, device="cpu", max_model_len=64, **settings_of(head, "eagle3"))
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    assert drafting.taps is not None
    assert drafting.drafter.layer_ids == tuple(read)  # type: ignore[attr-defined]
    taken: list[tuple[int, ...]] = []
    original = drafting.drafter.observe  # type: ignore[attr-defined]

    def observe(computed: Any) -> Any:
        taken.append(tuple(computed.layer_hidden_states.shape))
        return original(computed)

    drafting.drafter.observe = observe  # type: ignore[attr-defined]
    assert tokens_of(llm, [[5, 6, 7]])
    assert {size for _, size in taken} == {64 * len(read)}
    assert drafting.counts.failures == 0


def test_a_head_of_speculators_normalises_first_unless_it_says_otherwise(folder: Any, tmp_path: Path) -> None:
    head = folder("llama_deep", "eagle3")
    assert not read_config(head).norm_before_residual
    assert not read_config(published(head, tmp_path / "says", "speculators")).norm_before_residual
    found = read_config(published(head, tmp_path / "default", "speculators, default"))
    assert found.norm_before_residual
    assert (found.draft_vocab_size, found.layer_ids) == (100, head_folders.AUX)
    assert found.llama.intermediate_size == 48


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculators_model_type": "mlp"}, "speculators_model_type is 'mlp'"),
        ({"transformer_layer_config": {"num_hidden_layers": 2}}, "num_hidden_layers is 2"),
    ],
)
def test_other_heads_of_speculators_are_refused(
    folder: Any, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    made = published(folder("llama_deep", "eagle3"), tmp_path / "made", "speculators")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=words):
        read_config(made)


# ---- folders that do not fit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 500}, "vocab_size 500, LlamaForCausalLM .* has 384"),
        ({"hidden_size": 32}, "hidden_size 32, LlamaForCausalLM .* has 64"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_a_head_of_another_model_is_refused(
    tiny: Tiny, tmp_path: Path, kind: str, changes: dict[str, Any], words: str
) -> None:
    head = head_folders.build(tmp_path / "head", tiny("llama_deep"), kind)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=words):
        LLM(tiny("llama_deep"), device="cpu", **settings_of(head, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_another_shape_are_named(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    head = head_folders.build(tmp_path / "head", tiny("llama_deep"), kind)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"intermediate_size": 50}))
    with pytest.raises(ModelError, match=r"mlp.gate_proj.weight is \[48, 64\], its config.json asks for \[50, 64\]"):
        LLM(tiny("llama_deep"), device="cpu", **settings_of(head, kind))


def test_one_kind_of_head_is_not_taken_for_the_other(tiny: Tiny, tmp_path: Path) -> None:
    head = head_folders.build(tmp_path / "head", tiny("llama_deep"), "eagle")
    with pytest.raises(ModelError, match=r"midlayer|fc\.weight"):
        LLM(tiny("llama_deep"), device="cpu", **settings_of(head, "eagle3"))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_folder_the_fix_is_named(tiny: Tiny, kind: str) -> None:
    with pytest.raises(ModelError, match=r"no head is named(.|\n)*drafter.path"):
        LLM(tiny("llama_deep"), device="cpu", **{"drafter.name": kind})
    with pytest.raises(ModelError, match="does not describe an EAGLE head"):
        LLM(tiny("llama_deep"), device="cpu", **{"drafter.name": kind, "drafter.path": "/nowhere"})


def test_a_folder_beside_the_models_weights_needs_no_path(tiny: Tiny, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny("llama_deep").iterdir():
        (model / file.name).symlink_to(file)
    head_folders.build(model / "eagle3", model, "eagle3")
    llm = LLM(
        model,
        device="cpu",
        memory="4MiB",
        max_model_len=64,
        **{"drafter.name": "eagle3", "drafter.tokens": 2, "drafter.adaptive": False},
    )
    assert len(llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids) == 20
    assert llm.engine.extension("drafts").drafting.counts.proposed > 0
