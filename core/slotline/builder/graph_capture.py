"""Capture of graphs: the parts that a capture is broken into, and what all of it took."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from time import perf_counter
from typing import Any, Self

import torch
from attrs import define

from slotline.builder.served_attention import ServedAttention
from slotline.core.batch.attend import Attend
from slotline.core.device.out_of_memory import is_out_of_memory
from slotline.core.device.torch_device import TorchDevice, compiler_of
from slotline.core.model_runner.attention_dispatcher import AttentionDispatcher
from slotline.kernels.attention_edges import new_output
from slotline.kernels.graph_capture_state import alias_without_ownership, as_if_run
from slotline.registry.collection import frozen_objects
from slotline.registry.contracts import AttentionLayer
from slotline.registry.contracts.device import Device, Graph, MissingKernels
from slotline.registry.contracts.device import GraphCapture as DeviceCapture
from slotline.registry.engine_reports import CaptureReport
from slotline.registry.errors import CapacityError, ModelError, SlotlineError

logger = logging.getLogger("slotline")
WARM_UPS = 1
"""Eager runs before a capture: they compile kernels and let libraries take their workspaces."""


@define(eq=False)
class Recorder:
    """Captures one forward in as many graphs as it is broken into.

    Attributes:
        pool: the device's session, whose graphs share memory.
        parts: replays of graphs and eager calls between them, in order.
        graphs: how many there are so far.
        replayed: False for graphs that are made to be dropped.
    """

    pool: DeviceCapture
    parts: list[Callable[[], None]]
    graph: Graph | None = None
    graphs: int = 0
    replayed: bool = True

    def begin(self) -> None:
        """Begin a graph."""
        self.graph = self.pool.graph(replayed=self.replayed)
        self.graph.begin()

    def end(self) -> None:
        """End it, and keep its replay."""
        assert self.graph is not None
        self.graph.end()
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


def breaking(
    router: AttentionDispatcher,
    names: Container[str],
    cut: Callable[[Callable[[], None]], None],
    *,
    zeroed: bool = False,
) -> Attend:
    """Return an `attend` for capturing, which hands the layers of the groups `names` to `cut` as later calls.

    Args:
        zeroed: whether outputs start as zeros: of a mixed batch, no request owns the padded tokens, so that a
            captured backend writes nothing there.
    """
    broken = {layer.index for group in router.groups if group.name in names for layer in group.layers}

    def attend(
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
        written: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        out = new_output(layer, query, **more)
        if zeroed and layer.index not in broken:
            out.zero_()
        if layer.index in broken:
            q, k, v, o = (alias_without_ownership(tensor) for tensor in (query, key, value, out))
            own: Any = {name: {n: alias_without_ownership(t) for n, t in part.items()} for name, part in more.items()}

            def call() -> None:
                router.serve(layer, q, k, v, sinks, o, **own)

            cut(call)
        else:
            router.serve(layer, query, key, value, sinks, out, written, **more)
        return out

    return ServedAttention(router, attend, broken)


class GraphCapture:
    """Session of captures on a device. Errors become typed, and there is a report at the end.

    Args:
        fix: what to do where something cannot be captured.
        device: has graphs.

    Attributes:
        pool: the device's session, whose graphs share memory.
        what: is being captured.
    """

    def __init__(self, fix: str, device: Device) -> None:
        device.synchronize()
        self._start = perf_counter()
        self.pool, self.what = device.graph_capture(), ""
        self._fix, self._around = fix, ExitStack()

    def __enter__(self) -> Self:
        self._around.enter_context(_no_collection())
        self._around.enter_context(self.pool)
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
        """Report memory, time and number of graphs after the last capture."""
        memory, seconds = self.pool.finish(), perf_counter() - self._start
        message = "captured %d shapes in %d graphs: %.2f GiB, %.1f s"
        logger.info(message, shapes, graphs, memory / 2**30, seconds)
        return CaptureReport(shapes=shapes, graphs=graphs, memory=memory, seconds=seconds)


@torch.inference_mode()
def note_lacking(
    calls: Iterable[Callable[[Recorder], object]],
    missing: MissingKernels,
    what: str,
    *,
    replayed: bool,
    device: Device | None = None,
) -> None:
    """Note the kernels that calls lack. Each call is captured once, which runs nothing, and dropped.

    Args:
        calls: each is planned and its inputs are copied when it is taken from the iterable. Each is given its recorder.
        missing: where kernels are noted, see `KernelCompiler.leaving_out`.
        what: makes the calls, for the record: behind one that cannot be captured, none is looked at.
        device: has graphs.
        replayed: whether they will be captured to be replayed, or run by themselves, see `replays.is_replayed`.
    """
    device = device or TorchDevice("cpu", "cpu")
    compiler = compiler_of(device)
    with (
        GraphCapture("report this", device) as capturing,
        nullcontext() if replayed else as_if_run(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "The .* Graph is empty")  # all of its launches lack a kernel
        dropped: list[Recorder] = []  # the pool lasts as long as one of its graphs
        try:
            for call in calls:
                dropped.append(Recorder(capturing.pool, [], replayed=False))
                with nullcontext() if compiler is None else compiler.leaving_out(missing):
                    _record(dropped[-1], call)
        except Exception as error:  # a backend may raise anything at a step that it may never see
            logger.info("the kernels of %s are not all compiled ahead: %s", what, error)
        dropped.clear()
    device.release_cached()


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

    A collection that a library asks for takes longer where the host process has frozen objects.
    """
    with frozen_objects():
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()
