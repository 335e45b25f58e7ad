"""Captures of CUDA graphs: a stream to capture on, and a memory pool that the graphs share."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

import torch


class CudaGraph:
    """One CUDA graph. Implements `Graph`.

    Attributes:
        replay: launches it.
    """

    def __init__(self, pool: Any, *, replayed: bool) -> None:
        self._graph = torch.cuda.CUDAGraph(keep_graph=not replayed)
        self._pool = pool
        self.replay = self._graph.replay  # bound once: it is called in every step

    def begin(self) -> None:
        """Begin to capture on the current stream, once all that was launched is over."""
        torch.cuda.synchronize()
        self._graph.capture_begin(pool=self._pool)

    def end(self) -> None:
        """End the capture."""
        self._graph.capture_end()


class CudaCapture:
    """Session on a stream of its own. Implements `GraphCapture`."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._before = torch.cuda.mem_get_info()[0]
        self._pool, self._stream, self._around = torch.cuda.graph_pool_handle(), torch.cuda.Stream(), ExitStack()
        self._stream.wait_stream(torch.cuda.current_stream())

    def __enter__(self) -> Self:
        """Enter the stream."""
        self._around.enter_context(torch.cuda.stream(self._stream))
        return self

    def __exit__(self, *error: object) -> None:
        """Leave it."""
        self._around.close()

    def graph(self, *, replayed: bool = True) -> CudaGraph:
        """Return an empty graph; one that is not replayed is not instantiated either."""
        return CudaGraph(self._pool, replayed=replayed)

    def finish(self) -> int:
        """Wait for the stream, and return the memory that is gone since the session was made."""
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        return int(self._before - torch.cuda.mem_get_info()[0])
