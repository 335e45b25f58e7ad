"""The table of docs/model-families.md, by running every tiny family.

`python tests/support/family_table.py` writes the page.

Each family runs three times: in mixed and chunked batches, once more over the cached prefixes, and in a pool so small
that requests are preempted. Tokens are compared with transformers' greedy ones each time.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_models
from attrs import frozen
from engine_driver import GREEDY, random_prompts
from repository import ROOT

from slotline.core import LLM
from slotline.core.batch.request import Request

PAGE = ROOT / "docs" / "model-families.md"
START, END = "<!-- families -->\n", "<!-- end -->"
COLUMNS = ("family", "architecture", "layers", "tokens equal", "cached of the second run", "preemptions")
FAMILIES = (
    *tiny_models.FAMILIES,
    *tiny_models.SHARING_FAMILIES,
    "llama4",
    *tiny_models.LATENT_FAMILIES,
    *tiny_models.INDEXED_FAMILIES,
    *tiny_models.OWN_FAMILIES,
    *tiny_models.STATE_FAMILIES,
)
PROMPTS = random_prompts([3, 33, 17, 40, 1, 25])
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "backend": "torch",
    "block_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "memory": "4MiB",
    "optimize": False,
    "scheduler.max_batched_tokens": 24,
    "state.checkpoints": 8,
    "observability.check_integrity": True,
    "observability.progress": False,
}
BLOCKS = (36, 30, 26, 20, 16)
"""Sizes of the small pool: the first in which requests are preempted counts."""
PREEMPT_AT = (4, 9)
"""Steps in which the scheduler is told to, for models whose requests hold no blocks."""

Greedy = Callable[[Path, list[int], int], list[int]]


@frozen
class Row:
    """What is known of a family.

    Attributes:
        layers: how many of each kind.
        equal: whether all three runs gave transformers' tokens.
        cached: tokens of prompts that the second run found in the cache.
        preemptions: of the third run.
    """

    name: str
    layers: str
    equal: bool
    cached: int
    preemptions: int

    def text(self) -> str:
        """The row of the page."""
        architecture = tiny_models.family(self.name).architecture
        total = sum(map(len, PROMPTS))
        return (
            f"| {self.name} | `{architecture}` | {self.layers} | {'yes' if self.equal else 'NO'} | "
            f"{self.cached} of {total} | {self.preemptions} |"
        )


def measure(name: str, path: Path, greedy: Greedy) -> Row:
    """Run a family's checkpoint."""
    wanted = [greedy(path, prompt, GREEDY.max_tokens or 0) for prompt in PROMPTS]
    llm = LLM(path, **SETTINGS)
    first, again = (llm.generate(PROMPTS, GREEDY) for _ in range(2))
    tokens = [[output.outputs[0].token_ids for output in run] for run in (first, again)]
    preempted, preemptions = _preempted(llm, path)
    return Row(
        name,
        _layers(llm),
        all(run == wanted for run in (*tokens, preempted)),
        sum(output.metrics.num_cached_tokens for output in again),
        preemptions,
    )


def _layers(llm: LLM) -> str:
    facts = llm.engine.runner.model.facts
    attention = (layer.kv_kind if layer.shares_kv_with is None else f"{layer.kv_kind} shared" for layer in facts.layers)
    kinds = Counter([*attention, *(layer.state_kind for layer in facts.state_layers)])
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _preempted(llm: LLM, path: Path) -> tuple[list[list[int]], int]:
    """The tokens of a run in which requests are preempted, and how often they were."""
    memory = llm.engine.memory
    assert memory is not None
    if not llm.engine.runner.model.facts.layers:
        return _told_to_preempt(LLM(path, **SETTINGS))
    for blocks in BLOCKS:
        size = (blocks * sum(device.block for device in memory.devices) + memory.states) // 1024
        tight = LLM(path, **{**SETTINGS, "memory": f"{size + 1}KiB"})
        outputs = tight.generate(PROMPTS, GREEDY)
        preemptions = sum(output.metrics.num_preemptions for output in outputs)
        if preemptions:
            break
    return [output.outputs[0].token_ids for output in outputs], preemptions


def _told_to_preempt(llm: LLM) -> tuple[list[list[int]], int]:
    requests: list[Request] = [llm.engine.add(str(i), prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
    for number in range(1000):
        if number in PREEMPT_AT:
            llm.engine.scheduler._preempt_last()
        if not llm.engine.has_work:
            break
        llm.engine.step()
    return [request.output_token_ids for request in requests], sum(r.metrics.num_preemptions for r in requests)


def shown() -> dict[str, str]:
    """The rows of the page, by family."""
    table = PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0]
    return {match[1]: match[0] for match in re.finditer(r"^\| (\w+) \| `.*$", table, re.MULTILINE)}


def main() -> None:
    rows = []
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            path = tiny_models.build(name, Path(folder) / name)
            rows.append(measure(name, path, tiny_models.greedy_reference).text())
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    head = (f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}")
    table = "\n".join([*head, *rows, ""])
    PAGE.write_text(before + START + table + END + rest.split(END, 1)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
