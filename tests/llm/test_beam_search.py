"""`LLM.beam_search` finds the sequences that transformers' beam search finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from engine_driver import random_prompts
from tiny_engines import DEFAULTS, everything_returned
from transformers import AutoModelForCausalLM

from slotline.core import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from slotline.planner.plan import SMALL_MODEL
from slotline.registry.errors import RequestError

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]


@pytest.fixture(scope="module")
def oracle(tiny: Tiny) -> Callable[..., Any]:
    """transformers' model of a checkpoint, loaded once."""
    models: dict[Path, Any] = {}

    def get(path: Path) -> Any:
        if path not in models:
            models[path] = tiny_models.oracle(path)
        return models[path]

    return get


def by_transformers(model: Any, prompt: list[int], params: BeamSearchParams, eos: Any) -> list[tuple[list[int], float]]:
    """Sequences without padding, and their scores."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=None if params.ignore_eos else eos,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    result = []
    for sequence, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        output = sequence[len(prompt) :]
        ends = [i for i, token in enumerate(output) if token in eos] if not params.ignore_eos else []
        result.append((prompt + output[: ends[0] + 1 if ends else None], score))
    return result


EOS = list(range(23, 384, 3))


@pytest.mark.spread(3)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "settings",
    [
        {"beam_width": 2, "max_tokens": 8},
        {"beam_width": 4, "max_tokens": 10, "ignore_eos": True},
        {"beam_width": 4, "max_tokens": 10},
        {"beam_width": 3, "max_tokens": 12, "early_stopping": True},
        {"beam_width": 3, "max_tokens": 12, "early_stopping": "never"},
        {"beam_width": 3, "max_tokens": 12, "length_penalty": 0.0},
        {"beam_width": 3, "max_tokens": 12, "length_penalty": -1.5},
        {"beam_width": 5, "max_tokens": 9, "length_penalty": 2.0, "early_stopping": "never"},
    ],
    ids=str,
)
def test_the_sequences_and_scores_are_transformers(
    family: str, settings: dict[str, Any], tiny: Tiny, engines: Engines, oracle: Callable[..., Any]
) -> None:
    params = BeamSearchParams(**settings)
    path = tiny(family, eos_token_id=EOS)
    llm = engines(path, **{"sampling.max_logprobs": 384})
    prompts = random_prompts([5, 11, 3], seed=21, vocab_size=20)
    found = llm.beam_search(prompts, params)
    ends = 0
    for prompt, output in zip(prompts, found, strict=True):
        want = by_transformers(oracle(path), prompt, params, EOS)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in want]
        assert [beam.score for beam in output.sequences] == pytest.approx([score for _, score in want], rel=1e-5)
        ends += sum(beam.finish_reason == "stop" for beam in output.sequences)
    if family == "llama" and not params.ignore_eos and params.length_penalty <= 1:
        assert ends  # the case is worth something: sequences do end early


def test_one_beam_is_greedy(tiny: Tiny, engines: Engines, greedy: Callable[..., list[int]]) -> None:
    path, prompts = tiny("llama"), random_prompts([5, 11])
    found = engines(path).beam_search(prompts, BeamSearchParams(beam_width=1, max_tokens=8))
    assert [output.sequences[0].tokens for output in found] == [p + greedy(path, p, 8) for p in prompts]


def test_a_sequence_carries_text_log_probabilities_and_why_it_ended(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"))
    (output,) = llm.beam_search("def main(", BeamSearchParams(beam_width=2, max_tokens=4))
    best = output.sequences[0]
    prompt = llm.tokenizer.encode("def main(")
    assert best.tokens[: len(prompt)] == prompt
    assert best.text == llm.tokenizer.decode(best.tokens)
    own = [entry[token].logprob for entry, token in zip(best.logprobs, best.tokens[len(prompt) :], strict=True)]
    assert best.cum_logprob == pytest.approx(sum(own))
    assert (best.finish_reason, best.stop_reason) == ("length", None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam_width": 0},
        {"max_tokens": 1.5},
        {"length_penalty": "long"},
        {"length_penalty": 1e6},
        {"early_stopping": "soon"},
    ],
    ids=str,
)
def test_a_wrong_parameter_is_refused_by_name(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(RequestError, match=f"{name}={value!r}") as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **wrong})
    assert caught.value.fix


def test_what_the_engine_cannot_do_is_refused_and_leaves_nothing(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"))
    with pytest.raises(RequestError, match="is no BeamSearchParams"):
        llm.beam_search([[5]], SamplingParams(max_tokens=3))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"beam_width=11 needs 22[\s\S]*sampling.max_logprobs = 22"):
        llm.beam_search([[5]], BeamSearchParams(beam_width=11, max_tokens=3))
    with pytest.raises(RequestError, match=r"max_tokens=60 are 65 tokens[\s\S]*max_model_len=64"):
        llm.beam_search([[5] * 5], BeamSearchParams(beam_width=2, max_tokens=60))
    with pytest.raises(RequestError, match="request_id"):
        llm.beam_search([{"prompt_token_ids": [5], "request_id": "x"}], BeamSearchParams(beam_width=2, max_tokens=3))
    logits = LLM(tiny("llama"), **DEFAULTS, **{"sampling.logprobs_mode": "raw_logits"})
    with pytest.raises(RequestError, match="raw_logits"):
        logits.beam_search([[5]], BeamSearchParams(beam_width=2, max_tokens=3))
    everything_returned(llm)


# ---- under a constraint

CHOICES = ["def f(", "def main(", "class A:", "classes", "x = 1", "return", "return x"]


@pytest.mark.spread(2)
@pytest.mark.parametrize("plugin", ["xgrammar", "llguidance"])
@pytest.mark.parametrize("settings", [{"beam_width": 3}, {"beam_width": 4, "length_penalty": 0.0}], ids=str)
def test_sequences_of_a_choice_are_those_of_transformers(plugin: str, settings: dict[str, Any]) -> None:
    pytest.importorskip(plugin)
    llm = LLM(dtype="float32", max_model_len=64, **{"structured_output.backend": plugin})
    tokenizer, eos = llm.tokenizer, list(llm.engine.eos_token_ids)
    texts = [tokenizer.decode([token]) for token in range(llm.engine.limits.vocab_size)]
    prompt = tokenizer.encode("import os\n")

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        so_far = "".join(texts[token] for token in ids.tolist()[len(prompt) :])
        follows = [t for t, text in enumerate(texts) if text and any(c.startswith(so_far + text) for c in CHOICES)]
        special = set(tokenizer.transformers.all_special_ids)
        follows = [t for t in follows if t not in special] + (eos if so_far in CHOICES else [])
        return follows or eos  # behind a token that was banned: transformers keeps such beams, worse than all others

    model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32, trust_remote_code=False)
    ids, width = torch.tensor([prompt]), settings["beam_width"]
    want = model.generate(
        ids,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=12,
        length_penalty=settings.get("length_penalty", 1.0),
        prefix_allowed_tokens_fn=allowed,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=eos[0],
        return_dict_in_generate=True,
        output_scores=True,
    )
    params = BeamSearchParams(max_tokens=12, structured_outputs=StructuredOutputsParams(choice=CHOICES), **settings)
    (found,) = llm.beam_search([prompt], params)
    assert [beam.score for beam in found.sequences] == pytest.approx(want.sequences_scores.tolist(), rel=1e-4)
    for beam, sequence in zip(found.sequences, want.sequences.tolist(), strict=True):
        assert beam.tokens == sequence[: len(beam.tokens)]
        assert beam.tokens[-1] in eos
        assert tokenizer.decode(beam.tokens[len(prompt) : -1]) in CHOICES
        assert beam.finish_reason == "stop"


def test_constraints_that_beams_cannot_have_are_refused(tiny: Tiny, engines: Engines) -> None:
    wanted = StructuredOutputsParams(choice=["a", "b"])
    with pytest.raises(RequestError, match="ignore_eos beside"):
        BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True, structured_outputs=wanted)
    with pytest.raises(RequestError, match="structured_outputs='a'"):
        BeamSearchParams(beam_width=2, max_tokens=3, structured_outputs="a")
    llm = LLM(max_model_len=64, **{"structured_output.backend": "none"})
    with pytest.raises(RequestError, match="structured_outputs cannot be had"):
        llm.beam_search("def", BeamSearchParams(beam_width=2, max_tokens=3, structured_outputs=wanted))
