"""Structured output on a GPU: right texts, the same with overlapped steps, and masks that wait for nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import torch

from slotline.core import LLM, SamplingParams, StructuredOutputsParams

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.behaviour(102),
]

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPTS = ["def f(", "class Person:", "import", "x = [1, 2, "]


def texts(llm: LLM) -> list[str]:
    """Of constrained and free requests together."""
    wanted = StructuredOutputsParams(json=PERSON, disable_any_whitespace=True)
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=60, structured_outputs=None if i == 1 else wanted)
        for i in range(len(PROMPTS))
    ]
    found = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    for i, one in enumerate(found):
        if i != 1 and one.finish_reason == "stop":
            jsonschema.validate(json.loads(one.text), PERSON)
    return [one.text for one in found]


@pytest.mark.parametrize("plugin", ["xgrammar", "llguidance"])
def test_masks_wait_for_nothing_and_overlapped_steps_change_no_text(plugin: str) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cuda", "max_model_len": 128, "memory": "64MiB"}
    settings |= {"structured_output.backend": plugin, "observability.check_integrity": True}
    one_by_one = texts(LLM(**settings, **{"scheduler.async": False}))
    llm = LLM(**settings, **{"scheduler.async": True})
    grammars, calls = llm.engine.extension("structured_output"), 0

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **settings: Any) -> Any:
            nonlocal calls
            calls += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                return work(*arguments, **settings)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return called

    grammars.begin, grammars.apply = watched(grammars.begin), watched(grammars.apply)  # type: ignore[method-assign]
    assert texts(llm) == one_by_one
    assert calls > 10
