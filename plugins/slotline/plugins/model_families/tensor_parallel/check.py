"""Comparison of a divided decoder with the whole one, for architectures that no test vouches for.

The ranks are threads of this process. Each has its part of a small copy of the model, and the texts are those of the
self-check.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve

from slotline.plugins.model_families import self_check, trial_runs
from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.plugins.model_families.tensor_parallel import threads
from slotline.registry.contracts.communicator import Communicator
from slotline.registry.contracts.model_family import Shard
from slotline.registry.errors import NegotiationError


def check(found: Checkpoint, shard: Shard, state: Mapping[str, torch.Tensor] | None = None) -> str:
    """Compare the parts of a checkpoint's decoder with the whole, unless a result is kept.

    A small copy has four heads, so that it is divided among four ranks where the model is divided among a multiple of
    four, else among two. A model that is small itself is divided as it is asked for.

    Args:
        found: the decoder.
        shard: of which the number of ranks counts.
        state: the model's weights by name, see `self_check.check`.

    Returns:
        A note on the result.

    Raises:
        NegotiationError: naming the first layer and position that differ.
    """
    shared = " with tokens of their own" if shard.own_tokens else " with whole experts" if shard.experts else ""
    shared += " and divided tokens" if shard.sequence else ""
    kind = f" on {shard.size} ranks{shared}"
    return self_check.kept(found, lambda: _compare(found, shard, state), kind)


def _compare(found: Checkpoint, shard: Shard, state: Mapping[str, torch.Tensor] | None = None) -> str:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        reference, texts, of_what = self_check.reference_of(found, state)
        said = ""
        for size in _sizes(shard.size, of_what):
            try:
                traces = _of_ranks(found, reference, texts, size, shard)
            except NegotiationError as error:
                said = said or error.message
                continue
            difference, worst = self_check.first_difference(traces, texts, reference)
            if difference is not None:
                raise _refusal(
                    f"gives other numbers in {size} parts: {difference.layer} differs first at position "
                    f"{difference.position}, by {difference.amount:.1e} of its largest number",
                    found,
                )
            return f"{size} parts of {of_what} give the whole's logits: the largest difference is {worst:.1e}"
    raise _refusal(f"has no small copy whose division could be checked: {said}", found)


def _sizes(asked: int, of_what: str) -> tuple[int, ...]:
    """Return the numbers of parts to try."""
    if of_what == self_check.OWN:
        return (asked,)
    return (4, 2) if asked % 4 == 0 else (2,)


def _refusal(said: str, found: Checkpoint) -> NegotiationError:
    return NegotiationError(
        f"parallel.tensor: {found.architecture} in {found.path} {said}",
        fix="set parallel.tensor = 1, and report it to slotline",
    )


def _of_ranks(found: Checkpoint, reference: Any, texts: list[Any], size: int, like: Shard) -> list[trial_runs.Trace]:
    @torch.no_grad()
    def run(shard: Shard, communicator: Communicator) -> list[trial_runs.Trace]:
        part = evolve(shard, experts=like.experts, own_tokens=like.own_tokens, sequence=like.sequence)
        return trial_runs.ours(found, reference, texts, part, communicator)

    return threads.run(size, run)[0]
