"""Grammars that begin once an output has written a text: free before it, held after it, with and without drafts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slotline.core import LLM, SamplingParams
from slotline.registry.contracts import StructuredOutputsParams
from slotline.registry.errors import RequestError

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
PROMPTS = ["def f(self):\n", "class A:\n", "import os\n", "x = 1\n"]
SETTINGS: dict[str, dict[str, Any]] = {
    "xgrammar": {"structured_output.backend": "xgrammar"},
    "llguidance": {"structured_output.backend": "llguidance"},
    "drafts": {"structured_output.backend": "xgrammar", "drafter.name": "ngram", "drafter.tokens": 4},
    "asynchronous": {"structured_output.backend": "xgrammar", "scheduler.async": True},
}


@pytest.fixture(scope="module", params=SETTINGS)
def llm(request: pytest.FixtureRequest) -> LLM:
    small = {"max_model_len": 128, "memory": "16MiB", "max_num_seqs": 8, "optimize": False}
    return LLM(dtype="float32", **small, **SETTINGS[request.param], **{"observability.check_integrity": True})


def params(after: str | None, seed: int = 0, **more: Any) -> SamplingParams:
    wanted = StructuredOutputsParams(json=SCHEMA, after=after, disable_any_whitespace=True)
    return SamplingParams(temperature=1, seed=seed, max_tokens=60, structured_outputs=wanted, **more)


@pytest.mark.slow
def test_only_what_follows_the_text_is_held(llm: LLM) -> None:
    free, markers = SamplingParams(temperature=1, seed=0, max_tokens=60), (")", "\n", " ", "self")
    begun = 0
    for prompt in PROMPTS[:2]:
        plain, *all_held = llm.generate([prompt] * 5, [free, *map(params, markers)])
        for marker, held in zip(markers, all_held, strict=True):
            before, found, after = held.outputs[0].text.partition(marker)
            if marker in plain.outputs[0].text:
                assert found
                assert plain.outputs[0].text.startswith(before + found)
            if held.outputs[0].finish_reason == "stop" and found:
                begun += 1
                assert json.loads(after[after.index("{") :])["a"] in (1, 2)
                assert len(after[: after.index("{")]) < 16  # the rest of the token that held the marker's end
    assert begun >= 4


@pytest.mark.spread(1, slow=1)
def test_a_batch_with_free_and_held_texts(llm: LLM) -> None:
    given = [params(None, 1), params("\n", 2), SamplingParams(temperature=1, seed=3, max_tokens=30), params("(", 4)]
    together = llm.generate(PROMPTS, given)
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(PROMPTS, given, strict=True)]
    assert [one.outputs[0].token_ids for one in together] == [one.outputs[0].token_ids for one in alone]
    assert json.loads(together[0].outputs[0].text)["a"] in (1, 2)


@pytest.mark.spread(1, slow=1)
def test_a_text_that_never_comes_leaves_the_output_free(llm: LLM) -> None:
    (plain,) = llm.generate(PROMPTS[0], SamplingParams(temperature=1, seed=5, max_tokens=20))
    wanted = StructuredOutputsParams(json=SCHEMA, after="</never written>")
    (free,) = llm.generate(PROMPTS[0], SamplingParams(temperature=1, seed=5, max_tokens=20, structured_outputs=wanted))
    assert free.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize("after", ["", 5])
def test_a_wrong_text_is_refused(after: Any) -> None:
    with pytest.raises(RequestError, match="after"):
        StructuredOutputsParams(json=SCHEMA, after=after)
