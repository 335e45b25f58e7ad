"""Every family in bfloat16: at most three times as far from float32 as transformers' own eager bfloat16.

The rule is that of docs/decisions/tolerance.md, for the logits of whole models: both have the same rounded weights, and
the reference is transformers in float32 over these. On a CUDA device with the backends that are chosen there, on a CPU
with the `torch` backends.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import family_table
import pytest
import tiny_models
import torch
from attrs import evolve, frozen
from engine_driver import GREEDY, random_prompts

from slotline.core import LLM, RequestOutput

pytestmark = pytest.mark.usefixtures("one_thread")

Tiny = Callable[..., Path]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = random_prompts([33, 17, 40])
SETTINGS: dict[str, Any] = {
    "device": DEVICE,
    "dtype": "bfloat16",
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
    "memory": "16MiB",
    "sampling.logprobs_mode": "raw_logits",
    "sampling.max_logprobs": tiny_models.VOCAB_SIZE,
    "observability.check_integrity": True,
    "observability.progress": False,
    **({} if DEVICE == "cuda" else {"backend": "torch", "optimize": False}),
}
K = 3.0
"""How many times the baseline's error is allowed, as for attention backends."""


@frozen
class Errors:
    """Of logits [positions, vocab_size] against float32.

    Attributes:
        largest: of all.
        median: over positions, of each one's largest: experts chosen otherwise at few positions do not show in it.
    """

    largest: float
    median: float

    @classmethod
    def of(cls, found: torch.Tensor, exact: torch.Tensor) -> Errors:
        """The errors of `found`; NaN where one of its numbers is."""
        each = (found - exact).abs().amax(1)  # [positions]
        return cls(float(each.max()), float(each.median()))

    def within(self, baseline: Errors) -> bool:
        """The rule."""
        return self.largest <= K * baseline.largest and self.median <= K * baseline.median


@pytest.fixture(autouse=True)
def exact_matrix_products() -> None:
    """float32 means float32 here, not tf32."""
    torch.set_float32_matmul_precision("highest")


def _rows(output: RequestOutput) -> torch.Tensor:
    """The engine's logits at every position but the last: [prompt + generated - 1, vocab_size] float32."""
    done = output.outputs[0]
    assert output.prompt_logprobs is not None
    assert done.logprobs is not None
    entries = [*output.prompt_logprobs[1:], *done.logprobs]
    rows = torch.full((len(entries), tiny_models.VOCAB_SIZE), torch.nan)
    for position, entry in enumerate(entries):
        assert entry is not None
        rows[position, list(entry)] = torch.tensor([found.logprob for found in entry.values()])
    return rows


def _logits(model: Any, sequences: Sequence[list[int]]) -> torch.Tensor:
    """transformers' logits at every position but each sequence's last: [positions, vocab_size] float32."""
    with torch.no_grad():
        found = [model(torch.tensor([tokens[:-1]], device=DEVICE), use_cache=False).logits[0] for tokens in sequences]
    return torch.cat(found).float().cpu()


def _errors(served: Path, path: Path) -> tuple[Errors, Errors, str]:
    """An engine's errors over a checkpoint, transformers' own, and the backends: prompts in chunks, then 12 tokens."""
    llm, every = LLM(served, **SETTINGS), tiny_models.VOCAB_SIZE
    outputs = llm.generate(PROMPTS, evolve(GREEDY, max_tokens=12, logprobs=every, prompt_logprobs=every))
    sequences = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    rounded = tiny_models.oracle(path, torch.bfloat16).to(DEVICE)
    baseline = _logits(rounded, sequences)
    exact = _logits(rounded.float(), sequences)
    used = sorted({group.backend for group in (*llm.plan.groups, *llm.plan.state_groups)})
    return Errors.of(torch.cat([_rows(out) for out in outputs]), exact), Errors.of(baseline, exact), ", ".join(used)


@pytest.mark.parametrize("name", family_table.FAMILIES)
@pytest.mark.behaviour(3, 18)
def test_bfloat16_is_as_near_to_float32_as_transformers_own(
    name: str, tiny: Tiny, record_property: Callable[[str, object], None]
) -> None:
    path = tiny(name)
    ours, baseline, used = _errors(path, path)
    largest, median = ours.largest / baseline.largest, ours.median / baseline.median
    record_property("ratio", f"{name}: {largest:.2f} of the largest error, {median:.2f} of the median one, by {used}")
    assert ours.within(baseline)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_the_rule_sees_a_window_of_one_key_more(name: str, tiny: Tiny, tmp_path: Path) -> None:
    served = Path(shutil.copytree(tiny(name), tmp_path / name))
    config = json.loads((served / "config.json").read_text(encoding="utf-8"))
    (served / "config.json").write_text(json.dumps({**config, "sliding_window": tiny_models.WINDOW + 1}))
    ours, baseline, _ = _errors(served, tiny(name))
    assert not ours.within(baseline)
