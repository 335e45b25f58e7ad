"""L5: whole texts with the extension, on the small model that ships."""

from __future__ import annotations

from typing import Any

from slotline.registry.descriptor import Kind
from slotline.registry.errors import RequestError
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.engine import COMMON, PROMPTS, engine, selection

TOKENS = 8


@check(Kind.EXTENSION, "extension.engine.text", Level.ENGINE, cost=8.0)
def engine_text(run: Run) -> None:
    """Requests that ask nothing of the extension end as they should, twice alike, with its own checks in each step."""
    from slotline.core import SamplingParams

    settings: dict[str, Any] = {**COMMON, "cache.memory": "64MiB", "scheduler.max_requests": 4, "graphs.mode": "none"}
    settings |= {"observability.check_integrity": True, "plugins.inline": selection(run.subject)}
    settings[f"extensions.{run.subject.name}"] = dict(run.subject.settings)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    try:
        with engine(run.subject.device.type, **settings) as llm:
            texts = [[o.outputs[0] for o in llm.generate([list(p) for p in PROMPTS], params)] for _ in range(2)]
    except RequestError as error:
        raise NotApplicable(f"it refuses a plain request: {error.message}") from error
    reasons = {output.finish_reason for outputs in texts for output in outputs}
    if reasons != {"length"}:
        raise Failed(f"requests ended with {', '.join(map(str, reasons))}, expected length")
    if len({tuple(tuple(output.token_ids) for output in outputs) for outputs in texts}) > 1:
        raise Failed("the same requests gave other tokens the second time")
