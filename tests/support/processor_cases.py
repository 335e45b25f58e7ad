"""What tests of logits processors share: a built processor on some requests, and the histories that it must see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch
from attrs import frozen
from hypothesis import strategies as st

from slotline.registry.contracts import LogitsBatch, LogitsProcessorContext
from slotline.registry.loading import resolve_factory
from slotline.testing.environments.logits_processor import parameters

VOCAB_SIZE, MAX_REQUESTS, MAX_MODEL_LEN = 12, 5, 40


@frozen
class Asked:
    """A request, and the drafts that are assumed before its logits."""

    settings: Mapping[str, Any]
    prompt: list[int]
    output: list[int]
    drafts: list[int]

    @property
    def history(self) -> list[int]:
        return self.prompt + self.output + self.drafts


def tokens(least: int, most: int, vocab_size: int = 6) -> st.SearchStrategy[list[int]]:
    """Few different tokens, so that passages repeat."""
    return st.lists(st.integers(0, vocab_size - 1), min_size=least, max_size=most)


def asked(settings: st.SearchStrategy[Mapping[str, Any]]) -> st.SearchStrategy[list[Asked]]:
    """Up to `MAX_REQUESTS` requests of any length."""
    one = st.builds(Asked, settings, tokens(1, 12), tokens(0, 15), tokens(0, 4))
    return st.lists(one, min_size=1, max_size=MAX_REQUESTS)


def build(name: str, options: Any = None) -> Any:
    """One of the processors that ship, as the core builds it."""
    context = LogitsProcessorContext(
        contract=1,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(2,),
        max_requests=MAX_REQUESTS,
        max_model_len=MAX_MODEL_LEN,
        device="cpu",
        options=options,
    )
    return resolve_factory(import_module(f"slotline.plugins.logits_processors.{name}").descriptor)(context)


def batch_of(requests: Sequence[Asked], rows: Sequence[int]) -> LogitsBatch:
    """Their batch, with tokens of nobody behind each history."""
    table = np.full((MAX_REQUESTS, MAX_MODEL_LEN), 5, np.int32)
    width = max(len(one.drafts) for one in requests)
    drafts = np.full((len(requests), width), -1, np.int64)
    for i, (one, row) in enumerate(zip(requests, rows, strict=True)):
        known = one.prompt + one.output
        table[row, : len(known)] = known
        drafts[i, : len(one.drafts)] = one.drafts
    return LogitsBatch(
        rows=np.array(rows, np.int64),
        draft_positions=np.array([len(one.drafts) for one in requests], np.int64),
        token_table=table,
        num_tokens=np.array([len(one.prompt) + len(one.output) for one in requests], np.int64),
        num_prompt_tokens=np.array([len(one.prompt) for one in requests], np.int64),
        draft_token_ids=drafts if width else None,
    )


def processed(name: str, requests: Sequence[Asked], logits: torch.Tensor, options: Any = None) -> torch.Tensor:
    """The logits [n, VOCAB_SIZE] of the requests behind the processor `name`, all in one batch on rows in reverse."""
    processor = build(name, options)
    rows = list(range(MAX_REQUESTS))[::-1][: len(requests)]
    shown = []
    for i, (one, row) in enumerate(zip(requests, rows, strict=True)):
        params = parameters(one.settings)
        processor.validate(params)
        if processor.admit(row, params, one.prompt):
            shown.append(i)
    result = logits.clone()
    if shown:
        batch = batch_of([requests[i] for i in shown], [rows[i] for i in shown])
        result[shown] = processor.apply(logits[shown], batch)
    return result


def some_logits(count: int, seed: int = 0) -> torch.Tensor:
    """[count, VOCAB_SIZE] float32."""
    return 3 * torch.randn(count, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
