"""Encoder outputs that an engine hands to others, in host memory by the hash of their item."""

from __future__ import annotations

import logging
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any, NamedTuple

import torch

logger = logging.getLogger("slotline")


class Output(NamedTuple):
    """An output in host memory.

    Attributes:
        data: its bytes.
        shape, dtype: its form. The dtype is a name of torch.
    """

    data: bytes
    shape: tuple[int, ...]
    dtype: str

    def described(self) -> list[Any]:
        """Return what a message says of it."""
        return [list(self.shape), self.dtype, len(self.data), zlib.crc32(self.data)]


def output_of(data: bytearray, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """Return the tensor of an output that was received.

    Raises:
        ValueError: if it has no such form.
    """
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype")
    try:
        return torch.frombuffer(data, dtype=kind).view(list(shape))
    except RuntimeError as error:
        raise ValueError(f"{len(data)} bytes are no {dtype} {list(shape)}") from error


class Items:
    """Outputs up to some bytes, the least recently used go first. A thread copies them from the device.

    Args:
        num_bytes: of all outputs at most.
    """

    def __init__(self, num_bytes: int) -> None:
        self._most, self._used = num_bytes, 0
        self._changed = Condition()
        self._outputs: OrderedDict[str, Output] = OrderedDict()
        self._pending: set[str] = set()
        self._queue: SimpleQueue[tuple[str, torch.Tensor, Any] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def put(self, mm_hash: str, output: torch.Tensor) -> None:
        """Keep an output soon. The current stream of its device writes it."""
        with self._changed:
            if mm_hash in self._pending or mm_hash in self._outputs:
                return
            self._pending.add(mm_hash)
        written = None
        if output.device.type == "cuda":
            written = torch.cuda.Event()
            written.record(torch.cuda.current_stream(output.device))
        if self._thread is None:
            self._thread = Thread(target=self._run, name="slotline-handoff-items", daemon=True)
            self._thread.start()
        self._queue.put((mm_hash, output, written))

    def find(self, mm_hashes: Sequence[str], timeout: float) -> list[Output | None]:
        """Return outputs, None for those that are not here. Any thread may call it.

        Args:
            timeout: seconds to wait for those that are being copied.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._pending.isdisjoint(mm_hashes), timeout)
            for one in mm_hashes:
                if one in self._outputs:
                    self._outputs.move_to_end(one)
            return [self._outputs.get(one) for one in mm_hashes]

    def clear(self) -> None:
        """Forget all outputs."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)
            self._outputs.clear()
            self._used = 0

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)

    def _run(self) -> None:
        while (asked := self._queue.get()) is not None:
            mm_hash, output, written = asked
            kept: Output | None = None
            try:
                if written is not None:
                    written.synchronize()
                data = output.detach().to("cpu", copy=True).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                kept = Output(data, tuple(output.shape), str(output.dtype).removeprefix("torch."))
            except Exception:  # of the device
                logger.exception("kv_connector.handoff cannot keep an encoder output")
            del asked, output
            with self._changed:
                self._pending.discard(mm_hash)
                if kept is not None and len(kept.data) <= self._most:
                    self._outputs[mm_hash] = kept
                    self._used += len(kept.data)
                    while self._used > self._most:
                        self._used -= len(self._outputs.popitem(last=False)[1].data)
                self._changed.notify_all()
