"""L5: the communicator joins two ranks of a whole engine, on the small model that ships."""

from __future__ import annotations

from typing import Any

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.communicator import refuse_size
from slotline.testing.environments.engine import COMMON, NEW_TOKENS, PROMPTS, engine, selection

ALIKE = 0.6
"""Share of the tokens in front of the first difference: sums in another order may part greedy texts at a near tie."""


@check(Kind.COMMUNICATOR, "communicator.engine.text", Level.ENGINE, cost=20.0)
def engine_text(run: Run) -> None:
    """Greedy text of the small model, divided among two ranks, is that of one rank."""
    from slotline.core import SamplingParams

    refuse_size(run.subject, 2)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    divided: dict[str, Any] = {"parallel.tensor": 2, "parallel.communicator": run.subject.name}
    texts = []
    for own in ({}, {**divided, "plugins.inline": selection(run.subject)}):
        with engine(run.subject.device.type, **COMMON, **own) as llm:
            outputs = llm.generate([list(prompt) for prompt in PROMPTS], params)
        texts.append([tuple(output.outputs[0].token_ids) for output in outputs])
    same = sum(_common(one, other) for one, other in zip(*texts, strict=True))
    run.measured["same"] = same
    if same < ALIKE * NEW_TOKENS * len(PROMPTS):
        raise Failed(f"{same} of {NEW_TOKENS * len(PROMPTS)} tokens come before the first difference")


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
