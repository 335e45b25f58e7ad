"""Plugins that go wrong on one rank, in the way that the file named by TEST_RANK_FAULT says: `rank what`.

`Attention` is the shipped backend, and does it in its next forward pass. `Drawing` changes the logits of requests with
the parameter `skewed` on rank 1.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from slotline.backends import torch_sdpa
from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsBatch, LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.loading import resolve_factory

FAULT = "TEST_RANK_FAULT"


def go_wrong() -> None:
    """Do what the file says, if it names this rank or all."""
    try:
        rank, what = Path(os.environ[FAULT]).read_text().split()
    except (OSError, KeyError, ValueError):
        return
    if rank not in (os.environ.get("RANK", "0"), "all"):
        return
    if what == "raise":
        raise ValueError("wrong on purpose")
    if what == "memory":
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")
    if what == "sleep":
        time.sleep(3600)
    os.kill(os.getpid(), getattr(signal, what))


class Attention:
    """The shipped backend, but for what `go_wrong` does."""

    def __init__(self, built: Any) -> None:
        self._built = built

    def __getattr__(self, name: str) -> Any:
        return getattr(self._built, name)

    def forward(self, *arguments: Any, **more: Any) -> Any:
        """Go wrong, or attend."""
        go_wrong()
        return self._built.forward(*arguments, **more)


descriptor = evolve(
    torch_sdpa.descriptor,
    name="faulty",
    factory=lambda context: Attention(resolve_factory(torch_sdpa.descriptor)(context)),
)


class Drawing:
    """Raises the logit of token 7 above all others, on rank 1."""

    descriptor = Descriptor(
        kind=Kind.LOGITS_PROCESSOR,
        name="drawing",
        capabilities=LogitsProcessorCapabilities(parameters=("skewed",), speculation=Flag(True), default=True, order=5),
        factory=None,
    )

    def __init__(self, context: Any) -> None:
        pass

    def validate(self, params: Mapping[str, Any]) -> None:
        """Anything goes."""

    def admit(self, row: int, params: Mapping[str, Any], prompt_token_ids: list[int]) -> bool:
        """Take the requests that ask for it."""
        return "skewed" in params

    def apply(self, logits: torch.Tensor, batch: LogitsBatch) -> torch.Tensor:
        """Change the logits."""
        if os.environ.get("RANK") == "1":
            logits[:, 7] = 1e4
        return logits

    def release(self, row: int) -> None:
        """Forget nothing."""
