"""Comparison of a divided decoder with the whole one, for architectures that no test vouches for.

The ranks are threads of this process. Each has its part of a small copy of the model, and the texts are those of the
self-check.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from attrs import evolve

from slotline.plugins.model_families import self_check, trial_runs
from slotline.plugins.model_families.checkpoint import Checkpoint
from slotline.plugins.model_families.tensor_parallel import threads
from slotline.registry.contracts.communicator import Communicator
from slotline.registry.contracts.model_family import Shard
from slotline.registry.errors import NegotiationError


def check(found: Checkpoint, shard: Shard) -> str:
    """Compare the parts of a checkpoint's decoder with the whole, unless a result is kept.

    A small copy has four heads, so that it is divided among four ranks where the model is divided among a multiple of
    four, else among two.

    Returns:
        A note on the result.

    Raises:
        NegotiationError: naming the first layer and position that differ.
    """
    sizes = (4, 2) if shard.size % 4 == 0 else (2,)
    shared = " with whole experts" if shard.experts else ""
    return self_check.kept(
        found, lambda: _compare(found, sizes, experts=shard.experts), f" on {sizes[0]} ranks{shared}"
    )


def _compare(found: Checkpoint, sizes: tuple[int, ...], *, experts: bool) -> str:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        reference, texts, of_what = self_check.reference_of(found, None)
        said = ""
        for size in sizes:
            try:
                traces = _of_ranks(found, reference, texts, size, experts=experts)
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


def _refusal(said: str, found: Checkpoint) -> NegotiationError:
    return NegotiationError(
        f"parallel.tensor: {found.architecture} in {found.path} {said}",
        fix="set parallel.tensor = 1, and report it to slotline",
    )


def _of_ranks(
    found: Checkpoint, reference: Any, texts: list[Any], size: int, *, experts: bool
) -> list[trial_runs.Trace]:
    @torch.no_grad()
    def run(shard: Shard, communicator: Communicator) -> list[trial_runs.Trace]:
        return trial_runs.ours(found, reference, texts, evolve(shard, experts=experts), communicator)

    return threads.run(size, run)[0]
