"""Prompts of embeddings: those of some tokens give these tokens' own text, whatever the engine does meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import head_folders
import mtp_checkpoints
import numpy as np
import pytest
import sound_family
import torch
from engine_driver import GREEDY, mixes_decode_and_prefill, random_prompts, recorded, run_all
from family_table import FAMILIES
from replica_threads import replicas_as_threads
from repository import ROOT
from thread_ranks import ThreadRanks
from tiny_models import SHARING_FAMILIES
from tiny_vision import image

from slotline.core import LLM, LoRARequest, SamplingParams
from slotline.planner.plan import SMALL_MODEL
from slotline.ranks.replicas.front_requests import sent_request
from slotline.registry.errors import ConfigError, NegotiationError, RequestError
from tests.proposers.test_medusa import heads_of, written

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(5, 54, 84)]

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
ON: dict[str, Any] = {"prompt_embeds": True}
PROMPTS = random_prompts([33, 5, 1, 40, 17, 16], seed=2)
REFUSED = (*SHARING_FAMILIES, "zamba2")
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)


def embedded(llm: LLM, token_ids: Sequence[int], **more: Any) -> dict[str, Any]:
    """The prompt of the tokens' own embeddings."""
    model = llm.engine.runner.model
    return {"prompt_embeds": model.embed(torch.tensor(list(token_ids))).detach(), **more}


def either(llm: LLM, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Every second prompt as tokens, the others as embeddings."""
    return [embedded(llm, p) if i % 2 == 0 else {"prompt_token_ids": p} for i, p in enumerate(prompts)]


def tokens(llm: LLM, prompts: Sequence[Any], params: Any = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, progress=False)]


def own(llm: LLM, prompts: Sequence[list[int]], params: Any = GREEDY) -> list[list[int]]:
    return tokens(llm, [{"prompt_token_ids": p} for p in prompts], params)


@pytest.fixture
def llm(tiny: Tiny, engines: Engines) -> LLM:
    return engines(tiny("llama"), **ON)


def test_embeddings_of_tokens_give_their_text_beside_prompts_of_tokens(llm: LLM, tiny: Tiny, engines: Engines) -> None:
    expected = own(engines(tiny("llama")), PROMPTS)
    assert tokens(llm, [embedded(llm, p) for p in PROMPTS]) == expected
    assert tokens(llm, either(llm, PROMPTS)) == expected
    assert tokens(llm, [embedded(llm, p) for p in PROMPTS], SEEDED) == own(llm, PROMPTS, SEEDED)
    (output,) = llm.generate(embedded(llm, PROMPTS[0]), SamplingParams(max_tokens=3, n=3, logprobs=2), progress=False)
    assert [len(one.token_ids) for one in output.outputs] == [3, 3, 3]
    assert output.prompt is None
    assert output.prompt_token_ids == [0] * len(PROMPTS[0])
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("overlapped", [False, True])
def test_chunks_hits_and_preemption_change_nothing(overlapped: bool, tiny: Tiny, engines: Engines) -> None:
    rng = Random(7)
    beginnings = random_prompts((16, 32), seed=5)
    prompts = [rng.choice(beginnings) + p for p in random_prompts([rng.randint(1, 9) for _ in range(14)], seed=6)]
    expected = own(engines(tiny("llama")), prompts)
    settings = {"block_size": 4, "max_num_batched_tokens": 10, "memory": "128KiB", "scheduler.async": overlapped}
    llm = engines(tiny("llama"), **settings, **ON)
    with recorded(llm) as steps:
        outputs = llm.generate(either(llm, prompts), GREEDY, progress=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert sum(output.metrics.num_cached_tokens > 0 for output in outputs[::2]) > 3
    assert any((step.num_scheduled[step.num_computed > 0] > 1).any() for step in steps)
    assert any(mixes_decode_and_prefill(step) for step in steps)


def test_hits_are_by_content_and_apart_from_placeholders(llm: LLM) -> None:
    first, other = embedded(llm, PROMPTS[3]), embedded(llm, PROMPTS[3])
    other["prompt_embeds"] = torch.cat([other["prompt_embeds"][:32], other["prompt_embeds"][32:] + 1])

    def cached(prompt: Mapping[str, Any]) -> int:
        (output,) = llm.generate(prompt, GREEDY, progress=False)
        return output.metrics.num_cached_tokens

    zeros = {"prompt_token_ids": [0] * 40}
    assert [cached(p) for p in (first, first, other, zeros, zeros)] == [0, 32, 32, 0, 32]
    changed = embedded(llm, PROMPTS[3])
    changed["prompt_embeds"][0, 0] += 1
    assert cached(changed) == 0
    assert cached({**first, "cache_salt": "of another"}) == 0
    llm.engine.scheduler.cache.reset()


def test_later_changes_of_the_callers_tensor_are_not_seen(llm: LLM) -> None:
    prompt = embedded(llm, PROMPTS[0])
    (request,) = llm.submitter.submit_all([prompt], [GREEDY], [None])[0]
    prompt["prompt_embeds"].zero_()
    run_all(llm)
    assert request.output_token_ids == own(llm, PROMPTS[:1])[0]


@pytest.mark.parametrize(
    "form", [lambda t: t.numpy(), lambda t: t.double().float().T.contiguous().T, torch.nn.Parameter]
)
def test_arrays_and_any_strides_are_taken(form: Callable[[torch.Tensor], Any], llm: LLM) -> None:
    given = form(embedded(llm, PROMPTS[1])["prompt_embeds"].clone())
    assert tokens(llm, [{"prompt_embeds": given}]) == own(llm, PROMPTS[1:2])


def test_after_an_exception_out_of_a_step_the_prompts_are_computed_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [one for (one,) in llm.submitter.submit_all(either(llm, PROMPTS), [GREEDY] * 6, [None] * 6)]
    llm.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.model, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.engine.step()
    run_all(llm)
    assert [request.output_token_ids for request in requests] == own(llm, PROMPTS)


# Drafters


@pytest.fixture(scope="module")
def heads(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path | None]]:
    root, model = tmp_path_factory.mktemp("heads"), tiny("llama")
    return lambda name: {
        "eagle": lambda: (model, head_folders.build(root / name, model, name)),
        "eagle3": lambda: (tiny("llama_deep"), head_folders.build(root / name, tiny("llama_deep"), name)),
        "medusa": lambda: (model, written(root / name, heads_of(64, 384), "shared")),
        "mtp": lambda: (mtp_checkpoints.build(root / name, tiny("qwen2"), "qwen2"), None),
        "draft_model": lambda: (model, model),
    }.get(name, lambda: (model, None))()


@pytest.mark.parametrize(
    ("name", "overlapped"),
    [
        *(("ngram", False), ("eagle", True)),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("eagle3", "medusa", "mtp", "draft_model")),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("suffix", "eagle")),
    ],
)
def test_drafts_change_no_text(
    name: str, overlapped: bool, heads: Callable[[str], tuple[Path, Path | None]], engines: Engines
) -> None:
    model, folder = heads(name)
    settings: dict[str, Any] = {"drafter.name": name, "drafter.tokens": 3, "drafter.adaptive": False, **ON}
    settings |= {"scheduler.async": overlapped} | ({} if folder is None else {"drafter.path": str(folder)})
    llm = engines(model, **settings, max_num_batched_tokens=10)
    drafting = llm.engine.extension("drafts").drafting
    expected = own(engines(model), PROMPTS)
    assert own(llm, PROMPTS) == expected
    before = drafting.counts.proposed, drafting.counts.accepted
    assert tokens(llm, [embedded(llm, p) for p in PROMPTS]) == expected
    after = drafting.counts.proposed - before[0], drafting.counts.accepted - before[1]
    assert drafting.counts.failures == 0
    if name in ("eagle", "eagle3", "mtp", "medusa"):
        assert after == before  # the head sees the embeddings one token ahead, or reads no token of a prompt
    if name == "draft_model":
        assert after == (0, 0)  # it would have to know the tokens
        (setting,) = (one for one in llm.plan.settings if one.key == "prompt_embeds")
        assert "drafter 'draft_model' proposes nothing for them" in setting.origin
    assert tokens(llm, either(llm, PROMPTS)) == expected


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_drafters_that_look_tokens_up_see_no_placeholder(
    name: str, tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines(tiny("llama"), **ON, **{"drafter.name": name, "drafter.tokens": 3, "drafter.adaptive": False})
    drafter, shown, admitted = llm.engine.extension("drafts").drafting.drafter, [], list[list[int]]()
    propose, admit = drafter.propose, drafter.admit

    def watched(batch: Any) -> Any:
        table = zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True)
        shown.extend(batch.token_table[row, :end].tolist() for row, end in table)
        return propose(batch)

    monkeypatch.setattr(drafter, "propose", watched)
    monkeypatch.setattr(drafter, "admit", lambda row, prompt: (admitted.append(prompt), admit(row, prompt))[1])
    (found,) = tokens(llm, [embedded(llm, PROMPTS[3])])
    assert admitted == [[]]
    assert shown
    assert all(seen == found[: len(seen)] for seen in shown)
    (found,) = tokens(llm, [{"prompt_token_ids": PROMPTS[3]}])  # the same row begins with its prompt again
    assert (PROMPTS[3] + found)[: len(shown[-1])] == shown[-1]


# Several ranks, stages and replicas


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2},
        {"tensor": 1, "pipeline": 2, "optimize": True},
        pytest.param({"tensor": 1, "pipeline": 2, "optimize": False}, marks=pytest.mark.slow),
    ],
)
def test_ranks_give_the_text_of_one(sizes: dict[str, Any], tiny: Tiny, engines: Engines) -> None:
    settings = {"dtype": "float32", "backend": "torch", "cache.memory": "4MiB", "scheduler.max_batched_tokens": 10}
    model = tiny("llama")
    ranks, alone = ThreadRanks(model, **settings, **sizes, **ON), engines(model, **ON)
    prompts = either(alone, PROMPTS)
    assert ranks.same(lambda llm: tokens(llm, prompts)) == own(alone, PROMPTS)
    ranks.close()


@pytest.mark.slow
def test_a_head_on_the_last_rank_sees_the_next_embeddings(
    heads: Callable[[str], tuple[Path, Path | None]], engines: Engines
) -> None:
    model, folder = heads("eagle")
    settings = {"drafter.name": "eagle", "drafter.path": str(folder), "drafter.tokens": 3, "drafter.adaptive": False}
    ranks = ThreadRanks(model, dtype="float32", backend="torch", memory="4MiB", tensor=1, pipeline=2, **settings, **ON)
    alone = engines(model, **ON)
    prompts = [embedded(alone, p) for p in PROMPTS]

    def accepted(llm: LLM) -> int:
        return int(llm.engine.extension("drafts").counts.accepted)

    assert ranks.same(lambda llm: own(llm, PROMPTS)) == own(alone, PROMPTS)
    of_tokens = accepted(ranks.llms[-1])
    assert ranks.same(lambda llm: tokens(llm, prompts)) == own(alone, PROMPTS)
    assert accepted(ranks.llms[-1]) == 2 * of_tokens
    ranks.close()


def test_stages_of_one_process_give_the_text_of_one(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), **ON, **{"parallel.pipeline": ("cpu", "cpu"), "scheduler.async": True})
    assert tokens(llm, either(llm, PROMPTS)) == own(engines(tiny("llama")), PROMPTS)
    pieces = {"scheduler.microbatches": 2, "scheduler.microbatch_tokens": 4}
    cut = engines(tiny("llama"), **ON, **pieces)
    assert tokens(cut, either(cut, PROMPTS)) == own(engines(tiny("llama")), PROMPTS)


def test_replicas_give_the_text_of_one(tiny: Tiny, engines: Engines) -> None:
    alone = engines(tiny("llama"), **ON)
    prompts = either(alone, PROMPTS)
    with replicas_as_threads():
        llm = LLM(tiny("llama"), dtype="float32", memory="4MiB", **ON, **{"parallel.data": 2})
        assert tokens(llm, prompts) == own(alone, PROMPTS)
        bad = {"prompt_embeds": torch.zeros(3, 5)}
        with pytest.raises(RequestError, match="prompt 1: prompt_embeds has rows of 5 numbers"):
            llm.generate([prompts[0], bad], GREEDY)
        assert tokens(llm, prompts) == own(alone, PROMPTS)
        llm.front.close()


def test_replicas_are_chosen_by_the_embeddings_of_a_prefix() -> None:
    def routed(embeds: torch.Tensor) -> np.ndarray[Any, Any]:
        given: dict[str, Any] = {"inputs": {"prompt_embeds": embeds}}
        zeros = np.zeros(len(embeds), np.int64)
        request = sent_request(1, "r", zeros, GREEDY, samples=True, tokenizer=None, **given)
        return request.routed_tokens()

    embeds = torch.randn(9, 4)
    other = torch.cat([embeds[:5], -embeds[5:]])
    assert (routed(embeds) == routed(other)).tolist() == [True] * 5 + [False] * 4
    assert len(set(routed(embeds).tolist())) == 9


# Other models and tasks


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
def test_every_other_family_takes_embeddings(name: str, optimize: bool, tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny(name), optimize=optimize, max_num_batched_tokens=24, **ON)
    assert tokens(llm, either(llm, PROMPTS)) == own(llm, PROMPTS)


@pytest.mark.parametrize("name", [*SHARING_FAMILIES, pytest.param("zamba2", marks=pytest.mark.slow)])
def test_models_whose_layers_read_more_than_hidden_states_are_refused(name: str, tiny: Tiny) -> None:
    with pytest.raises(NegotiationError, match="read more than the hidden states of the layers before"):
        LLM(tiny(name), **ON)


@pytest.mark.slow
def test_images_and_embeddings_share_a_batch(tiny_vision_model: Tiny, engines: Engines) -> None:
    path = tiny_vision_model()
    llm, alone = engines(path, **ON, max_num_batched_tokens=12), engines(path)
    pictured = {"prompt": "class Row <image><image> pass", "multi_modal_data": {"image": [image(0), image(1)]}}
    expected = [*tokens(alone, [pictured]), *own(alone, PROMPTS[:2])]
    prompts = [pictured, *(embedded(llm, p) for p in PROMPTS[:2])]
    assert tokens(llm, prompts) == expected


@pytest.mark.slow
def test_adapters_and_guidance_work_on_embeddings(engines: Engines) -> None:
    settings = {"lora.name": "torch", "max_model_len": 128, **ON}
    llm, text = engines(None, **settings), "def total(values):\n    return"
    ids = llm.submitter.tokenizer.encode(text)
    typed = LoRARequest("typed", 1, SMALL_MODEL / "adapters" / "typed")
    params = SamplingParams(temperature=0, max_tokens=12, guidance_scale=2.0, negative_prompt="class")

    def texts(prompt: Any) -> list[str]:
        outputs = llm.generate([prompt] * 2, params, lora_request=[typed, None], progress=False)
        return [output.outputs[0].text for output in outputs]

    assert texts(embedded(llm, ids)) == texts({"prompt_token_ids": ids})
    with pytest.raises(ConfigError, match="names the input embedding 'embed_tokens' beside prompt_embeds"):
        LLM(**{"lora.name": "torch", "lora.target_modules": ("embed_tokens",)}, **ON)


def test_a_text_model_embeds_embeddings(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), task="embed", **ON)
    found, wanted = llm.embed([embedded(llm, PROMPTS[0]), {"prompt_token_ids": PROMPTS[0]}], progress=False)
    assert found.outputs.embedding == pytest.approx(wanted.outputs.embedding, abs=1e-5)


def test_the_program_on_the_page_finds_equal_texts(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "prompt-embeddings.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(# soft_prompt\.py\n.*?)```", page, re.DOTALL)
    exec(block, {})
    assert capsys.readouterr().out.endswith("True\n")


# What is refused


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (torch.zeros(3, 5), "prompt_embeds has rows of 5 numbers, and the model's hidden size is 64"),
        (torch.zeros(3, 64, dtype=torch.int64), "dtype torch.int64"),
        (torch.zeros(3, 64, dtype=torch.float64), "dtype torch.float64"),
        (torch.zeros(3, 64).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(3, 64, device="meta"), "layout meta"),
        (torch.zeros(64), r"has the shape \[64\]"),
        (torch.zeros(1, 3, 64), r"has the shape \[1, 3, 64\]"),
        (torch.zeros(0, 64), r"is empty: its shape is \[0, 64\]"),
        (torch.full((3, 64), torch.nan), "NaN or infinity in row 0"),
        (torch.cat([torch.zeros(2, 64), torch.full((1, 64), -torch.inf)]), "NaN or infinity in row 2"),
        (torch.zeros(65, 64), "the prompt has 65 tokens; at most 63 fit"),
        (np.array(["a"]), "array of <U1"),
        ([[0.0] * 64], "is no tensor"),
        ("AAAA", "is no tensor"),
    ],
)
def test_bad_embeddings_end_no_other_request(given: Any, says: str, llm: LLM) -> None:
    short = SamplingParams(temperature=0, max_tokens=3)
    (other,) = llm.submitter.submit_all([embedded(llm, PROMPTS[2])], [short], [None])[0]
    llm.engine.step()
    with pytest.raises(RequestError, match=says):
        llm.submitter.submit_all([{"prompt_embeds": given}], [GREEDY], [None])
    run_all(llm)
    assert len(other.output_token_ids) == 3


def test_numbers_that_the_models_dtype_cannot_hold_are_refused(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), dtype="float16", **ON)
    with pytest.raises(RequestError, match="NaN or infinity in row 1, as float16"):
        llm.generate({"prompt_embeds": torch.tensor([0.0, 1e6])[:, None].repeat(1, 64)}, GREEDY)
    assert len(tokens(llm, [embedded(llm, PROMPTS[0])])[0]) == 20


@pytest.mark.parametrize("name", ["prompt", "prompt_token_ids", "multi_modal_data"])
def test_a_prompt_is_either_embeddings_or_something_else(name: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=f"prompt_embeds beside {name}"):
        llm.generate(embedded(llm, PROMPTS[0]) | {name: "x"}, GREEDY)
    with pytest.raises(RequestError, match="prompt_embeds has 3 rows for 2 tokens"):
        llm.engine.add("r", [0, 0], GREEDY, prompt_embeds=torch.zeros(3, 64))
    with pytest.raises(RequestError, match=r"with the keys \[\] cannot be read"):
        llm.generate({"prompt_embeds": None}, GREEDY)


@pytest.mark.parametrize(
    "params",
    [
        {"prompt_logprobs": 0},
        {"repetition_penalty": 1.2},
        {"bad_words_token_ids": [[3, 4]]},
        {"bad_words": ["a"]},
        {"logits_processors": [lambda _, logits: logits]},
        {"guidance_scale": 2.0},
        {"extra_args": {"no_repeat_ngram_size": 2}},
        {"extra_args": {"dry_multiplier": 0.8}},
    ],
)
def test_what_needs_the_prompts_tokens_is_refused_by_name(params: dict[str, Any], engines: Engines) -> None:
    settings = {"logits_processors.no_repeat_ngram": {}, "logits_processors.dry": {}, **ON}
    llm = engines(None, **settings)
    name = next(iter(params.get("extra_args", params)))
    with pytest.raises(RequestError, match=f"{name}=.* beside prompt_embeds"):
        llm.generate(embedded(llm, [5, 6, 7]), SamplingParams(**params))


def test_penalties_over_the_output_alone_work(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, presence_penalty=1.5, frequency_penalty=0.5)
    assert tokens(llm, [embedded(llm, PROMPTS[0])], params) == own(llm, PROMPTS[:1], params)
    assert own(llm, PROMPTS[:1], params) != own(llm, PROMPTS[:1])


def test_engines_that_take_none_say_how_to(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"))
    with pytest.raises(RequestError, match="embeddings in an engine that takes none") as refused:
        llm.generate(embedded(llm, PROMPTS[0]), GREEDY)
    assert refused.value.fix == "set prompt_embeds = true"


def test_families_that_declare_nothing_are_refused(tmp_path: Path) -> None:
    folder, said = sound_family.checkpoint(tmp_path), "model family 'sound': prompt_embeds"
    with pytest.raises(NegotiationError, match=said):  # written by a third party before there was the flag
        LLM(folder, **ON, **{"plugins.inline": (f"{sound_family.__file__}:descriptor",)})
