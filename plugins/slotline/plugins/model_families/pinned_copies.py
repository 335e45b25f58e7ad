"""Copies of large tensors from host memory to a GPU by several threads, each through pinned memory of its own.

A tensor of a checkpoint is a part of a mapped file, which the driver copies piece by piece in one thread. Here each
thread copies a piece to pinned memory, while the GPU fetches its piece before. Python's lock is released meanwhile.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Protocol

import torch

logger = logging.getLogger("slotline")

THREADS = 8
"""At most."""
PIECE = 16 << 20
"""Bytes that a thread copies at a time."""
SMALLEST = 1 << 20
"""Bytes from which on a tensor is copied here."""

Piece = tuple[torch.Tensor, torch.Tensor]
"""Bytes in host memory, and where they belong, as many."""


class Lane(Protocol):
    """What one thread copies by."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy at most `PIECE` bytes [n], or begin to."""
        ...

    def finish(self) -> None:
        """Wait for all copies."""
        ...


class PinnedLane:
    """Two pinned buffers and a stream.

    Raises:
        RuntimeError: if the system gives no pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the targets' memory may be in use there
        made = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._buffers = itertools.cycle([(buffer, torch.cuda.Event()) for buffer in made])

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Fill the next buffer once the GPU has fetched it, and let the GPU fetch it again."""
        buffer, fetched = next(self._buffers)
        fetched.synchronize()
        ctypes.memmove(buffer.data_ptr(), source.data_ptr(), source.numel())
        with torch.cuda.stream(self._stream):
            target.copy_(buffer[: source.numel()], non_blocking=True)
            fetched.record(self._stream)

    def finish(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()


def move(model: torch.nn.Module, device: torch.device) -> None:
    """Move a model to a device, as `model.to` does. To a GPU, large parameters are copied by several threads."""
    if device.type == "cuda":
        large = [parameter for parameter in model.parameters() if is_large(parameter.data)]
        try:
            lanes = [PinnedLane(device) for _ in range(min(THREADS, os.cpu_count() or 1, len(large)))]
        except RuntimeError as error:
            logger.warning("weights are copied from ordinary memory, which takes longer: %s", error)
            lanes = []
        if lanes:
            targets = [torch.empty_like(parameter.data, device=device) for parameter in large]
            copy_all(pieces((parameter.data for parameter in large), targets), lanes)
            for parameter, target in zip(large, targets, strict=True):
                parameter.data = target
            lanes.clear()
            getattr(torch._C, "_host_emptyCache", lambda: None)()  # the buffers, which torch would keep
    model.to(device)


def is_large(tensor: torch.Tensor) -> bool:
    """Return True for a plain tensor in host memory that is worth several threads."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.numel() * tensor.element_size() >= SMALLEST
    )


def pieces(sources: Iterable[torch.Tensor], targets: Iterable[torch.Tensor], most: int = PIECE) -> list[Piece]:
    """Divide contiguous tensors and where they belong into pieces of at most `most` bytes."""
    return [
        piece
        for source, target in zip(sources, targets, strict=True)
        for piece in zip(
            source.view(-1).view(torch.uint8).split(most), target.view(-1).view(torch.uint8).split(most), strict=True
        )
    ]


def copy_all(given: Sequence[Piece], lanes: Sequence[Lane]) -> None:
    """Copy pieces, each lane in a thread of its own, and wait for them.

    Raises:
        Exception: what a lane raised first.
    """
    rest, lock = iter(given), Lock()

    def work(lane: Lane) -> None:
        while True:
            with lock:
                piece = next(rest, None)
            if piece is None:
                break
            lane.copy(*piece)
        lane.finish()

    with ThreadPoolExecutor(len(lanes), thread_name_prefix="slotline-weights") as pool:
        for done in [pool.submit(work, lane) for lane in lanes]:
            done.result()
