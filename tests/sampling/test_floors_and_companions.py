"""What processors declare beside `apply`: floors, which the sampler applies, and companions, computed with requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import random_prompts, tokens_of
from repository import SUPPORT
from tiny_engines import everything_returned

from slotline.core import LLM, SamplingParams
from slotline.registry.errors import RequestError
from slotline.testing.reference import logits_processor as reference

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.behaviour(19, 108)]

Tiny = Callable[..., Path]
Engines = Callable[..., LLM]
REFERENCE = SUPPORT / "declaring_processors.py"
PROMPTS = random_prompts([5, 9, 3, 12], seed=11)
MODES: dict[str, dict[str, Any]] = {"one by one": {"scheduler.async": False}, "overlapped": {"scheduler.async": True}}


def with_reference(engines: Engines, path: Path, *attributes: str, **settings: Any) -> LLM:
    """An engine with some of the suite's processors."""
    inline = tuple(f"{REFERENCE}:{attribute}" for attribute in attributes)
    named = {getattr(reference, attribute).name: {} for attribute in attributes}
    return engines(path, logits_processors=named, **{"plugins.inline": inline, **settings})


def params(**more: Any) -> SamplingParams:
    known = SamplingParams.__attrs_attrs__  # type: ignore[attr-defined]
    own = {name: value for name, value in more.items() if name in {field.name for field in known}}
    extra = {name: value for name, value in more.items() if name not in own}
    settings = {"temperature": 0.9, "seed": 3, "max_tokens": 12, "ignore_eos": True, **own}
    return SamplingParams(**settings, extra_args=extra or None)


@pytest.mark.parametrize("mode", [*MODES, "drafted"])
def test_the_sampler_applies_the_highest_floor_and_apply_is_not_called(
    mode: str, tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third party's floor gives the text that min-p gives, if both say the same."""

    def fails(self: object, *_: object) -> None:
        raise AssertionError("the sampler does this")

    monkeypatch.setattr(reference.SampledFloor, "apply", fails)
    settings = MODES.get(mode, {"drafter.name": "ngram", "drafter.tokens": 4})
    llm = with_reference(engines, tiny("llama"), "sampled", **settings)
    share = 0.3
    theirs, ours, both, free = (
        tokens_of(llm, PROMPTS, params(temperature=1.5, **more))
        for more in (
            {"sampled_floor": -float(np.log(share))},
            {"min_p": share},
            {"min_p": share / 10, "sampled_floor": -float(np.log(share))},
            {},
        )
    )
    assert theirs == ours == both != free
    everything_returned(llm)


def test_floors_stand_beside_requests_without_and_leave_with_their_row(tiny: Tiny, engines: Engines) -> None:
    llm = engines(tiny("llama"), max_num_seqs=2)
    plain, cut = params(temperature=1.5), params(temperature=1.5, min_p=0.9)
    alone = [tokens_of(llm, PROMPTS[:2], one) for one in (plain, cut)]
    mixed = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:2], [plain, cut])]
    assert mixed == [alone[0][0], alone[1][1]]
    assert tokens_of(llm, PROMPTS[:2], plain) == alone[0]


@pytest.mark.parametrize("floor", [0.5, float("nan")])
def test_a_floor_that_is_none_ends_its_request_alone(
    floor: float, tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = reference.SampledFloor.floor
    monkeypatch.setattr(
        reference.SampledFloor, "floor", lambda self, p: floor if "sampled_floor" in p else wrong(self, p)
    )
    llm = with_reference(engines, tiny("llama"), "sampled")
    good = llm.generate(PROMPTS[1], params())[0].outputs[0]
    bad, found = (o.outputs[0] for o in llm.generate(PROMPTS[:2], [params(sampled_floor=1.0), params()]))
    assert (found.token_ids, found.finish_reason) == (good.token_ids, "length")
    assert bad.finish_reason == "error"
    assert f"'reference_sampled_floor' has the floor {floor}" in str(bad.stop_reason)
    everything_returned(llm)


@pytest.mark.parametrize("mode", MODES)
def test_a_third_partys_processor_reads_the_logits_of_companions(mode: str, tiny: Tiny, engines: Engines) -> None:
    """Its rule over log-probabilities is that of guidance with ``scale = 1 + contrast``, so their texts are equal."""
    llm = with_reference(engines, tiny("llama"), "paired", **MODES[mode])
    theirs, ours, free = (
        [
            o.outputs[0].token_ids
            for o in llm.generate(PROMPTS, [params(temperature=0, **more(prompt)) for prompt in PROMPTS])
        ]
        for more in (
            lambda prompt: {"contrast": 1.5, "contrast_tokens": 2},
            lambda prompt: {"guidance_scale": 2.5, "negative_prompt_token_ids": prompt[-2:]},
            lambda prompt: {},
        )
    )
    assert theirs == ours != free
    everything_returned(llm)


def test_a_request_has_one_companion_at_most(tiny: Tiny, engines: Engines) -> None:
    llm = with_reference(engines, tiny("llama"), "paired")
    with pytest.raises(RequestError, match=r"guidance_scale=2\.0 and contrast=1\.5 need a companion each"):
        llm.generate(PROMPTS[0], params(contrast=1.5, guidance_scale=2.0))
    everything_returned(llm)


def test_a_companion_of_tokens_that_there_are_not_is_refused_by_the_name_of_its_parameter(
    tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slotline.registry.contracts import Companion

    monkeypatch.setattr(
        reference.Contrast,
        "companion",
        lambda self, p, prompt: Companion(prompt=(10**6,), name="contrast_tokens", asked="contrast=1"),
    )
    llm = with_reference(engines, tiny("llama"), "paired")
    with pytest.raises(RequestError, match="contrast_tokens: token id 1000000"):
        llm.generate(PROMPTS[0], params(contrast=1.0))
    everything_returned(llm)


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_processor_that_goes_wrong_with_a_pair_ends_that_pair_alone(
    how: str, tiny: Tiny, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reference.Contrast.apply

    def wrong(self: reference.Contrast, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        bad = [place for place, row in enumerate(batch.rows.tolist()) if self.factors[row] == 2]
        if how == "raise" and bad:
            raise ValueError("no such number")
        logits = right(self, logits, batch)
        logits[bad] = torch.nan
        return logits

    monkeypatch.setattr(reference.Contrast, "apply", wrong)
    llm = with_reference(engines, tiny("llama"), "paired")
    kept = params(contrast=0.5)
    want = llm.generate(PROMPTS[1], kept)[0].outputs[0].token_ids
    bad, good, plain = (
        o.outputs[0] for o in llm.generate([PROMPTS[0], PROMPTS[1], PROMPTS[2]], [params(contrast=2.0), kept, params()])
    )
    assert (good.token_ids, good.finish_reason, plain.finish_reason) == (want, "length", "length")
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert ("no such number" if how == "raise" else "made NaN or infinity") in str(bad.stop_reason)
    everything_returned(llm)
