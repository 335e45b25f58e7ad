"""L5: the connector in a whole engine, on the small model that ships, with a pool that holds one request."""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import attrs

from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, Run, check
from slotline.testing.environments.engine import COMMON, NEW_TOKENS, PROMPTS, engine, selection


@check(
    Kind.KV_CONNECTOR,
    "kv_connector.engine.text",
    Level.ENGINE,
    cases=lambda _: ({"mode": mode} for mode in ("plain", "asynchronous")),
    cost=10.0,
)
def engine_text(run: Run) -> None:
    """Texts of a tight pool equal those of a large one, three times over, and blocks come back from the connector."""
    from slotline.core import SamplingParams

    settings: dict[str, Any] = {**COMMON, "scheduler.max_requests": 2, "graphs.mode": "none"}
    settings |= {"scheduler.async": run["mode"] == "asynchronous", "cache.block_size": 16}
    device = run.subject.device.type
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [list(prompt) for prompt in PROMPTS]
    with engine(device, **settings, **{"cache.memory": "64MiB"}) as llm:
        expected = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
        assert llm.plan.pool is not None
        settings["cache.memory"] = f"{9 * llm.plan.pool.block_bytes // 1024}KiB"
    settings |= {"kv_connector.name": run.subject.name, "plugins.inline": selection(run.subject)}
    settings |= {f"kv_connector.{run.subject.name}.{key}": value for key, value in _asked(run.subject.options)}
    folder = TemporaryDirectory(prefix="slotline-suite-")
    if option := run.subject.capabilities.folder:
        settings[f"kv_connector.{run.subject.name}.{option}"] = folder.name
    loaded = 0
    with engine(device, **settings) as llm:
        for _ in range(3):
            outputs = [llm.generate([prompt], params)[0] for prompt in prompts]
            if [output.outputs[0].token_ids for output in outputs] != expected:
                raise Failed("other tokens than without the connector")
            loaded += sum(output.metrics.num_loaded_tokens for output in outputs)
    if not loaded:
        raise Failed("no block came back from the connector, though the pool had lost it")
    run.measured["loaded"] = loaded


def _asked(options: Any) -> Iterator[tuple[str, Any]]:
    """Yield the options that differ from their defaults, by name."""
    if options is not None and attrs.has(type(options)):
        for one in attrs.fields(type(options)):
            if (value := getattr(options, one.name)) != one.default:
                yield one.name, value
