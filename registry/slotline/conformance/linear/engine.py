"""L5: the plugin in a whole engine, on the small model that ships, quantized at load."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slotline.registry.descriptor import Kind
from slotline.testing.check import Case, Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.engine import COMMON, NEW_TOKENS, PROMPTS, engine, selection
from slotline.testing.environments.linear import dtypes_of
from slotline.testing.subject import Subject

METHODS = ("int8", "int4", "fp8")
ALIKE = 0.6
"""Share of the tokens in front of the first difference: sums in another order may part greedy texts at a near tie."""


def _methods(subject: Subject) -> Iterable[Case]:
    found = [method for method in METHODS if subject.capabilities.schemes.refusal(method) is None]
    if not found:
        raise NotApplicable(f"weights.quantize gives {', '.join(METHODS)}, of which none is declared")
    return [{"quantize": method} for method in found]


@check(Kind.LINEAR, "linear.engine.text", Level.ENGINE, cases=_methods, cost=5.0)
def engine_text(run: Run) -> None:
    """Greedy text of the small model, quantized at load, is that of the plugin `dequantized`."""
    from slotline.core import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    settings: dict[str, Any] = {**COMMON, "dtype": dtypes_of(run.subject)[0], "weights.quantize": run["quantize"]}
    texts = []
    for name in (run.subject.name, "dequantized"):
        own: dict[str, Any] = {"weights.linear": name, "plugins.inline": selection(run.subject)}
        with engine(run.subject.device.type, **settings, **own) as llm:
            outputs = llm.generate([list(prompt) for prompt in PROMPTS], params)
        texts.append([tuple(output.outputs[0].token_ids) for output in outputs])
    same = sum(_common(one, other) for one, other in zip(*texts, strict=True))
    run.measured["same"] = same
    if same < ALIKE * NEW_TOKENS * len(PROMPTS):
        raise Failed(f"{same} of {NEW_TOKENS * len(PROMPTS)} tokens come before the first difference")


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
