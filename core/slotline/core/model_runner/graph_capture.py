"""Capture of CUDA graphs: a stream, a memory pool, the parts of a broken capture, and a report of time and memory."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from time import perf_counter
from typing import Any, Self

import torch
from attrs import asdict, define, frozen

from slotline.core.device.out_of_memory import is_out_of_memory
from slotline.kernels import triton_precompile as compiling
from slotline.kernels.graph_capture_state import as_if_run
from slotline.registry.errors import CapacityError, ModelError, SlotlineError

logger = logging.getLogger("slotline")
WARM_UPS = 1
"""Eager runs before a capture: they compile kernels and let libraries take their workspaces."""


@frozen(kw_only=True)
class CaptureReport:
    """Time and memory that capturing took.

    Attributes:
        shapes: captured shapes.
        graphs: graphs of these shapes, more than shapes if attention breaks them.
        memory: bytes of device memory.
        seconds: wall-clock time.
    """

    shapes: int = 0
    graphs: int = 0
    memory: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return asdict(self)


@define(eq=False)
class Recorder:
    """Captures one forward in as many graphs as it is broken into.

    Attributes:
        pool: the memory that captures share.
        parts: replays of graphs and eager calls between them, in order.
        graphs: how many there are so far.
        replayed: False for graphs that are made to be dropped.
    """

    pool: Any
    parts: list[Callable[[], None]]
    graph: torch.cuda.CUDAGraph | None = None
    graphs: int = 0
    replayed: bool = True

    def begin(self) -> None:
        """Begin a graph."""
        self.graph = torch.cuda.CUDAGraph(keep_graph=not self.replayed)
        self.graph.capture_begin(pool=self.pool)

    def end(self) -> None:
        """End it, and keep its replay."""
        assert self.graph is not None
        self.graph.capture_end()
        self.parts.append(self.graph.replay)
        self.graph = None
        self.graphs += 1

    def give_up(self) -> None:
        """End a graph whose capture failed. The error is known already."""
        with suppress(RuntimeError):
            self.end()

    def cut(self, call: Callable[[], None]) -> None:
        """Keep an eager call between the parts captured before and after it."""
        self.end()
        self.parts.append(call)
        self.begin()


class GraphCapture:
    """Stream to capture on and its memory pool. Errors become typed, and there is a report at the end.

    Args:
        fix: the remedy if something cannot be captured.

    Attributes:
        pool: memory pool that captures share.
        what: name of the object that is being captured.
    """

    def __init__(self, fix: str) -> None:
        torch.cuda.synchronize()
        self._start, self._before = perf_counter(), torch.cuda.mem_get_info()[0]
        self.pool, self.what = torch.cuda.graph_pool_handle(), ""
        self._stream, self._fix, self._around = torch.cuda.Stream(), fix, ExitStack()
        self._stream.wait_stream(torch.cuda.current_stream())

    def __enter__(self) -> Self:
        self._around.enter_context(_no_collection())
        self._around.enter_context(torch.cuda.stream(self._stream))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave the stream.

        Raises:
            CapacityError: if the device ran out of memory. It names the setting to lower.
            ModelError: if something cannot be captured.
        """
        self._around.close()
        if is_out_of_memory(error) and not isinstance(error, SlotlineError):
            raise CapacityError(
                f"capturing {self.what} does not fit into memory",
                fix='lower cache.memory or the largest of graphs.sizes, or set graphs.mode = "none"',
            ) from error
        if isinstance(error, RuntimeError):
            what = f"{self.what} cannot be captured: {str(error).splitlines()[0]}"
            raise ModelError(what, fix=self._fix) from error

    def report(self, shapes: int, graphs: int) -> CaptureReport:
        """Return the report, once all is captured."""
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        memory, seconds = self._before - torch.cuda.mem_get_info()[0], perf_counter() - self._start
        message = "captured %d shapes in %d graphs: %.2f GiB, %.1f s"
        logger.info(message, shapes, graphs, memory / 2**30, seconds)
        return CaptureReport(shapes=shapes, graphs=graphs, memory=memory, seconds=seconds)


@torch.inference_mode()
def note_lacking(
    calls: Iterable[Callable[[Recorder], object]],
    missing: compiling.MissingKernels,
    what: str,
    *,
    replayed: bool,
) -> None:
    """Note the kernels that calls lack. Each call is captured once, which runs nothing, and dropped.

    Args:
        calls: each is planned and its inputs are copied when it is taken from the iterable. Each is given its recorder.
        missing: where kernels are noted, see `compiling.leaving_out`.
        what: name of the calls, for the log. After a call that cannot be captured the rest is left out.
        replayed: whether they will be captured to be replayed, or run by themselves, see `replays.is_replayed`.
    """
    with (
        GraphCapture("report this") as capturing,
        nullcontext() if replayed else as_if_run(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # all of its launches lack a kernel
        dropped: list[Recorder] = []  # the pool lasts as long as one of its graphs
        try:
            for call in calls:
                dropped.append(Recorder(capturing.pool, [], replayed=False))
                with compiling.leaving_out(missing):
                    _record(dropped[-1], call)
        except Exception as error:  # a backend may raise anything at a step that it may never see
            logger.info("the kernels of %s are not all compiled ahead: %s", what, error)
        dropped.clear()
    torch.cuda.empty_cache()


def _record(recorder: Recorder, call: Callable[[Recorder], object]) -> None:
    """Capture a call. The capture ends in any case."""
    recorder.begin()
    try:
        call(recorder)
    except Exception:
        recorder.give_up()
        raise
    recorder.end()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage: that might free a tensor of the device, or a graph, in the middle of a capture.

    Objects that the host process has frozen stay frozen: a call would unfreeze them with those frozen here, so
    nothing is frozen then. A collection that a library asks for takes longer for it.
    """
    gc.collect()
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        if freezes:
            gc.unfreeze()
