"""Decoding with drafts that stand as often as asked, against decoding without: what verification costs and gives.

    python benchmarks/speculation_gpu.py benchmarks/models/llama-3.1-8b [--batches 1 4 16 32 64] [--drafts 4]
        [--right 3 0] [--drafter-gib 0.5] [--tokens 128] [--set attention.backend=triton]

Weights are random and made on the device. A first greedy run gives the texts; a drafter then proposes them, all tokens
behind the first `right` of each proposal wrong, so that 3 of 4 stand, or none. In each proposal it reads
`drafter-gib` of weights once for each draft, as a small model would. Random weights make near ties of logits, which
two batch shapes may decide differently, so the acceptance that was reached stands beside the one asked for.
Milliseconds a step are wall time by the runs' number of steps; the speedup is in tokens a second.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from step_gpu import engine

from slotline.core import LLM, SamplingParams
from slotline.registry.contracts import Draft, DraftBatch

PROMPT = 128


class Replay:
    """Proposes what it knows will come, the first `right` tokens of each proposal, and wrong ones behind."""

    def __init__(self, drafts: int, right: int, gib: float) -> None:
        self.drafts, self.right = drafts, right
        self.texts: dict[tuple[int, ...], list[int]] = {}
        self.rows: dict[int, torch.Tensor] = {}
        size = int((gib * 2**30 / 2) ** 0.5)
        self.weights = torch.randn(size, size, dtype=torch.bfloat16, device="cuda") if gib else None

    def admit(self, row: int, prompt_token_ids: list[int]) -> None:
        text = prompt_token_ids + self.texts[tuple(prompt_token_ids)]
        self.rows[row] = torch.tensor(text + [0] * self.drafts)

    def release(self, row: int) -> None:
        del self.rows[row]

    def propose(self, batch: DraftBatch) -> Draft:
        if self.weights is not None:
            x = torch.ones(len(batch.rows), len(self.weights), dtype=torch.bfloat16, device="cuda")
            for _ in range(self.drafts):
                x = x @ self.weights
        ids = [
            self.rows[row][known : known + self.drafts].clone()
            for row, known in zip(batch.rows.tolist(), batch.num_tokens.tolist(), strict=True)
        ]
        found = torch.stack(ids)
        found[:, self.right :] = (found[:, self.right :] + 1) % 1000
        return Draft(token_ids=found)


def timed(llm: LLM, prompts: list[list[int]], tokens: int) -> tuple[float, int, list[list[int]]]:
    """Seconds of decoding behind the prompts, its steps, and the texts."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    requests = [llm.engine.add(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    while any(r.metrics.time_to_first_token is None for r in requests):
        llm.engine.step()
    torch.cuda.synchronize()
    start, steps = time.perf_counter(), 0
    while llm.engine.has_work:
        llm.engine.step()
        steps += 1
    torch.cuda.synchronize()
    return time.perf_counter() - start, steps, [r.output_token_ids for r in requests]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--right", type=int, nargs="+", default=[3, 0])
    parser.add_argument("--drafter-gib", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    arguments = parser.parse_args()
    most, drafts = max(arguments.batches), arguments.drafts
    shape: tuple[Any, ...] = (arguments.model, PROMPT + arguments.tokens + drafts + 1, most, PROMPT * most)
    arguments.settings.insert(0, "cache.memory=16GiB")
    plain = engine(*shape, arguments.settings)
    rng, results = Random(0), {}
    prompts = {n: [[rng.randrange(1000) for _ in range(PROMPT)] for _ in range(n)] for n in arguments.batches}
    print(f"plain: {plain.plan.summary()}, asynchronous: {plain.engine.asynchronous}")
    for count, own in prompts.items():
        timed(plain, own, 8)
        results[count] = timed(plain, own, arguments.tokens)
    del plain
    gc.collect()
    torch.cuda.empty_cache()
    llm = engine(*shape, [*arguments.settings, "drafter.name=ngram", f"drafter.tokens={drafts}"])
    drafting = llm.engine.drafting
    assert drafting is not None
    print(f"drafted: {llm.plan.summary()}, verify graphs: {dict(llm.plan.graphs.phases)}")
    for right in arguments.right:
        drafting.drafter = replay = Replay(drafts, right, arguments.drafter_gib)
        for count, own in prompts.items():
            seconds, steps, texts = results[count]
            replay.texts = {tuple(p): t for p, t in zip(own, texts, strict=True)}
            timed(llm, own, 8)
            before = (drafting.counts.steps, drafting.counts.accepted)
            with_drafts, verifying, found = timed(llm, own, arguments.tokens)
            done, stood = drafting.counts.steps - before[0], drafting.counts.accepted - before[1]
            proposal = drafting.counts.draft_seconds / drafting.counts.proposals
            print(
                f"batch {count:3}, {right} of {drafts} right: a step {with_drafts / verifying * 1e3:6.2f} ms against "
                f"{seconds / steps * 1e3:6.2f}, {1 + stood / max(done, 1):.2f} tokens a step, speedup "
                f"{seconds / with_drafts:.2f}x, proposal {proposal * 1e3:.2f} ms on the host so far, "
                f"{sum(a == b for a, b in zip(found, texts, strict=True))} of {count} texts equal, "
                f"{drafting.counts.failures} failures"
            )


if __name__ == "__main__":
    main()
