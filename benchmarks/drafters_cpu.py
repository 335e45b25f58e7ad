"""What a proposal of the drafters costs that look tokens up: 256 requests of 4,096 tokens, one step after the other.

    OMP_NUM_THREADS=1 python benchmarks/drafters_cpu.py [--requests 256] [--tokens 4096] [--steps 50]

Three texts: Python source in the shipped model's tokens (another file of the standard library for each request, joined
and cut), random tokens of a large vocabulary (nothing matches, so all is read), and fifty tokens (much matches). Each
step a request gets two more tokens. Milliseconds for one proposal: median, best; drafts: tokens for each request.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import at_least, positive

from slotline.core import LLM
from slotline.proposers.ngram.drafter import NgramDrafter
from slotline.proposers.suffix.drafter import SuffixDrafter
from slotline.registry.contracts import DraftBatch, DrafterContext

SHORT = "--requests 2 --tokens 64 --steps 2"
DRAFTERS: dict[str, Callable[[DrafterContext], Any]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=positive, default=256)
    parser.add_argument("--tokens", type=positive, default=4096)
    parser.add_argument("--steps", type=at_least(2), default=50)
    arguments = parser.parse_args()
    shape = (arguments.requests, arguments.tokens + 2 * arguments.steps)
    rng = np.random.default_rng(0)
    texts = {
        "Python source": source(*shape),
        "random, 128,256 tokens": rng.integers(0, 128_256, shape, np.int32),
        "random, 50 tokens": rng.integers(0, 50, shape, np.int32),
    }
    print(f"{arguments.requests} requests of {arguments.tokens} tokens, {torch.get_num_threads()} torch threads")
    for what, text in texts.items():
        for name, build in DRAFTERS.items():
            times, drafted = timed(build, text, arguments.tokens, arguments.steps)
            figures = f"{statistics.median(times) * 1e3:6.2f} ms, best {min(times) * 1e3:6.2f} ms"
            print(f"{what:24} {name:8} {figures}, {drafted:.2f} drafts")


def source(requests: int, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Files of the standard library in the shipped model's tokens, [requests, length]."""
    tokenizer = LLM(overrides=["observability.progress=false"]).engine.tokenizer
    assert tokenizer is not None
    tokens: list[int] = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tokens += tokenizer.encode(file.read_text(encoding="utf-8", errors="ignore"))
        if len(tokens) > requests * length:
            break
    return np.resize(np.array(tokens, np.int32), (requests, length))


def timed(
    build: Callable[[DrafterContext], Any], text: np.ndarray[Any, Any], tokens: int, steps: int
) -> tuple[list[float], float]:
    """Seconds of each proposal but the first, which compiles and reads the prompts, and drafts for each request."""
    requests, length = text.shape
    context = DrafterContext(
        contract=1,
        num_tokens=4,
        vocab_size=128_256,
        hidden_size=1,
        max_requests=requests,
        max_model_len=length,
        device="cpu",
        dtype="float32",
    )
    drafter, table, seconds, drafted = build(context), torch.from_numpy(text), list[float](), 0
    for row in range(requests):
        drafter.admit(row, text[row, :tokens].tolist())
    for step in range(steps):
        known = tokens + 2 * step
        batch = DraftBatch(
            rows=torch.arange(requests),
            token_table=table,
            num_tokens=torch.full((requests,), known, dtype=torch.int32),
            last_token_ids=table[:, known - 1].long(),
            positions=torch.full((requests,), known - 1),
        )
        start = time.perf_counter()
        draft = drafter.propose(batch)
        seconds.append(time.perf_counter() - start)
        drafted += int((draft.token_ids >= 0).sum())
    return seconds[1:], drafted / steps / requests


if __name__ == "__main__":
    main()
