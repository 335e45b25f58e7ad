"""Drafters with weights on a GPU: the text is the one without, inside captured graphs too, and the heads draft well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtp_checkpoints
import pytest
import torch
from engine_driver import random_prompts, tokens_of

from slotline.core import LLM, SamplingParams
from tests.llm.test_small_model_files import FOLDER, HELD_OUT
from tests.proposers.test_eagle import agree, watch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SETTINGS: dict[str, Any] = {"device": "cuda", "memory": "2GiB", "max_model_len": 512, "max_num_seqs": 16}
PARAMS = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
LEAST = {"eagle": 2.2, "eagle3": 2.6, "draft_model": 4.9}


def prompts() -> list[str]:
    """Beginnings of code that no training saw, and a part of them again, which a prefix serves."""
    lines = HELD_OUT.splitlines(keepends=True)
    return ["".join(lines[:count]) for count in (6, 12, 18, 24, 24, 25)]


@pytest.mark.parametrize("kind", LEAST)
@pytest.mark.parametrize("mode", ["none", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_text_is_the_same_and_drafts_stand(kind: str, mode: str, dtype: str) -> None:
    settings = {**SETTINGS, "dtype": dtype, "graphs.mode": mode, "max_num_batched_tokens": 128}
    path = {"drafter.path": str(FOLDER)} if kind == "draft_model" else {}
    plain = LLM(**settings)
    texts = [output.outputs[0].token_ids for output in plain.generate(prompts(), PARAMS)]
    del plain
    llm = LLM(**settings, **path, **{"drafter.name": kind, "drafter.tokens": 4, "drafter.adaptive": False})
    for _ in range(2):  # the second time from cached prefixes
        found = [output.outputs[0].token_ids for output in llm.generate(prompts(), PARAMS)]
        same = sum(a == b for a, b in zip(found, texts, strict=True))
        # In bfloat16 a batch of another shape may decide a near tie otherwise.
        assert same == len(texts) if dtype == "float32" else same >= len(texts) - 3
    drafting = llm.engine.extension("drafts").drafting
    assert drafting is not None
    assert drafting.counts.failures == 0, drafting.counts.last_failure
    assert drafting.counts.acceptance_length >= LEAST[kind] - 0.6 * (dtype == "bfloat16")


@pytest.mark.parametrize("family", mtp_checkpoints.FAMILIES)
def test_multi_token_prediction_layers_draft_what_their_formula_says(
    tiny: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    path = mtp_checkpoints.build(tmp_path / family, tiny(family), family)
    settings = {**SETTINGS, "dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 32}
    prompts = random_prompts((5, 40, 17, 2, 30, 12), seed=3)
    texts = tokens_of(LLM(path, **settings), prompts)
    llm = LLM(
        path,
        **settings,
        **{
            "drafter.name": "mtp",
            "drafter.tokens": 3,
            "drafter.adaptive": False,
            "scheduler.async": False,
            "drafter.graphs": False,
        },
    )
    seen = watch(llm)  # what is captured is not seen
    assert tokens_of(llm, prompts) == texts
    counts = llm.engine.extension("drafts").drafting.counts
    assert counts.failures == 0, counts.last_failure
    assert agree(seen[::6], mtp_checkpoints.Expected(path, family), 128) > 0.95  # type: ignore[arg-type]


@pytest.mark.parametrize("family", mtp_checkpoints.FAMILIES)
def test_captured_multi_token_prediction_layers_draft_as_eager_ones(
    tiny: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """In bfloat16, in which experts do not wait for the host; random layers guess little, but always the same."""
    path = mtp_checkpoints.build(tmp_path / family, tiny(family), family)
    settings = {**SETTINGS, "dtype": "bfloat16", "max_model_len": 256, "max_num_batched_tokens": 64}
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    given = []
    for captured in (False, True):
        llm = LLM(
            path,
            **settings,
            **{"drafter.name": "mtp", "drafter.tokens": 3, "drafter.adaptive": False, "drafter.graphs": captured},
        )
        drafting = llm.engine.extension("drafts").drafting
        assert drafting is not None
        assert (drafting.graphs is not None) == captured
        proposals, ask = list[torch.Tensor](), drafting.call_drafter

        def keep(*args: Any, proposals: Any = proposals, ask: Any = ask) -> Any:
            draft = ask(*args)
            proposals.append(draft.token_ids.clone())
            return draft

        drafting.call_drafter = keep  # type: ignore[method-assign]
        tokens_of(llm, random_prompts((7,), seed=4), params)  # alone: equal steps until a near tie
        assert drafting.counts.failures == 0, drafting.counts.last_failure
        given.append(torch.cat(proposals[1:9]).cpu())
        del llm, drafting
    assert (given[0] == given[1]).float().mean() > 0.8


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "draft_model", "medusa"])
@pytest.mark.parametrize("requests", [1, 5, 13])
def test_captured_drafts_are_the_eager_ones(kind: str, requests: int) -> None:
    """Whatever the batch is padded to, and beside prompts, which are drafted behind eagerly or padded."""
    path = {"drafter.path": str(FOLDER)} if kind == "draft_model" else {}
    settings = {**SETTINGS, "dtype": "float32", "max_num_batched_tokens": 128, **path}
    lines, shares, texts = HELD_OUT.splitlines(keepends=True), [], []
    own = ["".join(lines[i : i + 4 + i]) for i in range(requests)]
    for captured in (False, True):
        llm = LLM(
            **settings,
            **{"drafter.name": kind, "drafter.tokens": 4, "drafter.adaptive": False, "drafter.graphs": captured},
        )
        drafting = llm.engine.extension("drafts").drafting
        assert drafting is not None
        assert (drafting.graphs is not None) == captured
        replays = 0
        if drafting.graphs is not None:
            assert drafting.graphs.report.graphs > 0
            original = drafting.graphs.propose

            def propose(*args: Any, original: Any = original) -> Any:
                nonlocal replays
                replays += 1
                return original(*args)

            drafting.graphs.propose = propose  # type: ignore[method-assign]
        texts.append([output.outputs[0].token_ids for output in llm.generate(own, PARAMS)])
        assert drafting.counts.failures == 0, drafting.counts.last_failure
        assert replays == (drafting.counts.proposals if captured else 0)
        shares.append(drafting.counts.accepted / drafting.counts.proposed)
    assert texts[0] == texts[1]
    assert shares[0] > (0.1 if kind == "medusa" else 0.3)  # Medusa's heads cannot copy, as attention can
    assert abs(shares[0] - shares[1]) < 0.02  # keys are split otherwise, which may decide a near tie
