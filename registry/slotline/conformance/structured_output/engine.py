"""Whole texts of an engine on the small model that ships."""

from __future__ import annotations

import json
from typing import Any

from slotline.registry.contracts import StructuredOutputsParams
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.engine import COMMON, engine, selection
from slotline.testing.environments.structured_output import Example, declared

_PROMPTS = ("def main(", "import os\n", "x = [1, 2, ")


def _params(example: Example) -> StructuredOutputsParams:
    constraint = example.constraint
    value: Any = json.loads(constraint.text) if constraint.kind in ("choice", "json") else constraint.text
    given: dict[str, Any] = {constraint.kind: value}
    return StructuredOutputsParams(**given, disable_any_whitespace=not constraint.any_whitespace)


@check(
    Kind.STRUCTURED_OUTPUT,
    "structured_output.engine.texts",
    Level.ENGINE,
    cases=lambda _: ({"mode": mode} for mode in ("plain", "asynchronous", "drafted")),
    cost=5.0,
)
def engine_texts(run: Run) -> None:
    """Every text of an engine, sampled and greedy, is one of its constraint, with overlapped steps and drafts too."""
    from slotline.core import SamplingParams

    modes: dict[str, dict[str, Any]] = {
        "plain": {},
        "asynchronous": {"scheduler.async": True},
        "drafted": {"drafter.name": "ngram", "drafter.adaptive": False},
    }
    settings = {**COMMON, "structured_output.backend": run.subject.name, "plugins.inline": selection(run.subject)}
    examples = [example for example in declared(run.subject) for _ in range(4)]
    params = [
        SamplingParams(temperature=i % 4 / 2, seed=i, max_tokens=40, structured_outputs=_params(example))
        for i, example in enumerate(examples)
    ]
    prompts = [_PROMPTS[i % len(_PROMPTS)] for i in range(len(examples))]
    with engine(run.subject.device.type, **{**settings, **modes[run["mode"]]}) as llm:
        outputs = llm.generate(prompts, params)
    for example, output in zip(examples, outputs, strict=True):
        (found,) = output.outputs
        if found.finish_reason != "stop" or found.text.encode() not in example.language.texts:
            raise Failed(f"{example.name}: {found.text!r} with finish reason {found.finish_reason!r}")
