"""Step extensions of an engine: their methods, resolved once into tuples that a step calls in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import field, frozen

from slotline.core.batch.input_batch_cpu import InputBatchCPU
from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.batch.step_output import ForwardOutput, PendingSample, StepOutput
from slotline.registry.contracts import BlockHash, CacheBlock
from slotline.registry.contracts.extension import FEATURE_METHODS, METHODS, SPEC_METHODS
from slotline.registry.errors import PluginError

Int = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Ended = dict[int, tuple[str, str | int | None]]
"""Rows that end, each with its finish reason and the cause."""
_NO_FIELD = frozenset({"bind_caches", "block_events", "give_back", "limit_prefix_of", "outside_steps"})
_NAMED = frozenset({"captured_inputs", "gather", "measured", "keep_states", "take_results"})
"""Methods whose results are kept under the extension's name."""
_FIX = "tell the author of the plugin, or remove its table under [extensions]"


@frozen(kw_only=True)
class Extensions:
    """Bound methods of the extensions, each tuple in the declared order; see `StepExtension` and `FeatureExtension`.

    Answers that a step relies on are checked: a wrong type or shape is a `PluginError` that names the extension.

    Attributes:
        named: the extension objects by name.
        inputs: names of further arguments of `Engine.add` that some extension takes.
    """

    named: Mapping[str, Any] = field(factory=dict)
    inputs: frozenset[str] = frozenset()
    engine_ready: tuple[Callable[[], None], ...] = ()
    prepare_request: tuple[Callable[[Request], None], ...] = ()
    validate: tuple[Callable[[Request], None], ...] = ()
    followers: tuple[Callable[[Request], Sequence[Request]], ...] = ()
    linked: tuple[Callable[[Request], Sequence[Request]], ...] = ()
    enter: tuple[tuple[Callable[[Request], None], Callable[[Request], None]], ...] = ()  # each with its `leave`
    leave: tuple[Callable[[Request], None], ...] = ()
    defer: tuple[Callable[[Request], bool], ...] = ()
    collect_ready: tuple[Callable[..., tuple[Sequence[Request], Sequence[tuple[Request, BaseException]]]], ...] = ()
    measured: tuple[tuple[str, Callable[[], Any]], ...] = ()
    acquire: tuple[tuple[Callable[..., bool], Callable[[Request], None]], ...] = ()  # each with its `give_back`
    first_waiting: tuple[Callable[[Int], Request | None], ...] = ()
    before_schedule: tuple[Callable[[Int], Sequence[tuple[int, Exception]]], ...] = ()
    requeue: tuple[Callable[[], Sequence[Request]], ...] = ()
    limit_prefix: tuple[Callable[[Request, Sequence[BlockHash]], int], ...] = ()  # and `limit_prefix_of`
    begin_request: tuple[Callable[[Request, int], None], ...] = ()
    limit_prompt: tuple[Callable[[Request, int, int], int | None], ...] = ()
    trim_tokens: tuple[Callable[[Int, Int], Int], ...] = ()
    admit: tuple[Callable[[Request], None], ...] = ()
    release: tuple[Callable[[int], None], ...] = ()
    unschedule: tuple[Callable[[Request], None], ...] = ()
    find_blocks: tuple[Callable[[Request, int, Sequence[BlockHash]], Collection[BlockHash]], ...] = ()
    fill_block: tuple[Callable[[CacheBlock], None], ...] = ()
    block_evicted: tuple[Callable[[CacheBlock], None], ...] = ()
    blocks_filled: tuple[Callable[[int, Sequence[int], Sequence[BlockHash]], None], ...] = ()
    held_blocks: tuple[Callable[[], Collection[int]], ...] = ()
    forget_prefixes: tuple[Callable[[], None], ...] = ()
    limit_tokens: tuple[Callable[[Int, Int], Int], ...] = ()
    before_step: tuple[Callable[[SchedulerOutput], SchedulerOutput], ...] = ()
    step_variants: tuple[Callable[[], Sequence[int]], ...] = ()
    captured_variants: tuple[Callable[[int], Sequence[int]], ...] = ()
    graph_variant: tuple[Callable[[Int], int], ...] = ()
    needs_eager: tuple[Callable[[SchedulerOutput], bool], ...] = ()
    gather_shortcut: tuple[Callable[[Any], Any], ...] = ()  # of `InputPreparer`, gives a `GatherShortcut`
    gather: tuple[tuple[str, Callable[..., Any]], ...] = ()
    staging_bytes: tuple[Callable[[int], int], ...] = ()
    prepare_inputs: tuple[Callable[[ModelInputs], ModelInputs], ...] = ()
    plan: tuple[Callable[[ModelInputs], None], ...] = ()
    forward_kwargs: tuple[Callable[[ModelInputs], Mapping[str, Any]], ...] = ()
    captured_inputs: tuple[tuple[str, Callable[[ModelInputs], tuple[torch.Tensor, ...]]], ...] = ()
    prepare_captured: tuple[Callable[[ModelInputs], ModelInputs], ...] = ()
    computed_by: tuple[Callable[[], Sequence[str]], ...] = ()
    capture_kwargs: tuple[Callable[..., Mapping[str, Any]], ...] = ()
    output_head: tuple[Callable[[Any], Any], ...] = ()  # of `ModelRunner`, gives an `OutputHead`
    wrap_forward: tuple[Callable[[Any, Any], Any], ...] = ()  # of `ModelRunner` and its `ForwardPass`
    profile_memory: tuple[Callable[[], Any], ...] = ()
    launched: tuple[Callable[[SchedulerOutput], None], ...] = ()
    plan_logits: tuple[Callable[[ModelInputs, torch.Tensor], None], ...] = ()
    begin_logits: tuple[Callable[[ModelInputs], None], ...] = ()
    wants_all_hidden: tuple[Callable[[ModelInputs], bool], ...] = ()
    leaves_logits: tuple[Callable[[ModelInputs], bool], ...] = ()
    ban_tokens: tuple[Callable[[torch.Tensor, ModelInputs], torch.Tensor], ...] = ()
    process: tuple[Callable[[Any, ModelInputs], Any], ...] = ()  # of `Processed`
    restrictions: tuple[Callable[[int], Sequence[str]], ...] = ()
    process_logits: tuple[Callable[[torch.Tensor, ModelInputs], torch.Tensor], ...] = ()
    revise_tokens: tuple[Callable[[torch.Tensor, torch.Tensor | None, ModelInputs], torch.Tensor], ...] = ()
    after_sample: tuple[Callable[[PendingSample], None], ...] = ()
    commit: tuple[Callable[[StepOutput], None], ...] = ()
    roll_back: tuple[Callable[[Int, Int, Int, npt.NDArray[np.bool_]], None], ...] = ()
    recompute: tuple[Callable[[], Sequence[Request]], ...] = ()
    advance: tuple[Callable[[Int, Int32, Ended], Ended], ...] = ()
    after_step: tuple[Callable[[StepOutput, Int], None], ...] = ()
    restore: tuple[Callable[[Sequence[Request]], None], ...] = ()
    resume: tuple[Callable[[Request, Sequence[int]], None], ...] = ()
    reset: tuple[Callable[[], None], ...] = ()
    rehearse: tuple[Callable[[StepOutput], None], ...] = ()
    capture_graphs: tuple[Callable[..., None], ...] = ()
    arrange_spec_tokens: tuple[Callable[[InputBatchCPU], InputBatchCPU], ...] = ()
    take_results: tuple[tuple[str, Callable[[], torch.Tensor | None]], ...] = ()
    settle_step: tuple[Callable[[ForwardOutput, SchedulerOutput, Int], tuple[ForwardOutput, SchedulerOutput]], ...] = ()
    wants_final_logits: tuple[Callable[[ModelInputs], bool], ...] = ()
    keep_states: tuple[tuple[str, Callable[[ForwardOutput, torch.Tensor], Any]], ...] = ()
    extend_pending: tuple[Callable[[PendingSample], PendingSample], ...] = ()
    accept_tokens: tuple[Callable[[PendingSample, Int], tuple[Int, Int | None]], ...] = ()
    check: tuple[Callable[[], None], ...] = ()

    @classmethod
    def of(cls, built: Sequence[tuple[str, str, Any]], inputs: frozenset[str] = frozenset()) -> Extensions:
        """Resolve the methods of built extensions.

        Args:
            built: name, label and object of each extension, in order.
            inputs: names of further arguments of `Engine.add` that some of them take.
        """

        def bound(method: str) -> tuple[Any, ...]:
            found = [(name, label, getattr(one, method, None)) for name, label, one in built]
            checked = _CHECKED.get(method)
            return tuple(
                call if checked is None else checked(call, label) for _, label, call in found if call is not None
            )

        def named(method: str) -> tuple[Any, ...]:
            return tuple((name, getattr(one, method)) for name, _, one in built if hasattr(one, method))

        def paired(method: str, back: str) -> tuple[Any, ...]:
            return tuple(
                (getattr(one, method), getattr(one, back, _nothing)) for _, _, one in built if hasattr(one, method)
            )

        methods = {
            method: bound(method) for method in (*METHODS, *FEATURE_METHODS, *SPEC_METHODS) if method not in _NO_FIELD
        }
        methods["limit_prefix"] += bound("limit_prefix_of")
        methods |= {method: named(method) for method in _NAMED}
        methods |= {"enter": paired("enter", "leave"), "acquire": paired("acquire", "give_back")}
        for last_first in ("limit_tokens", "limit_prompt"):
            methods[last_first] = methods[last_first][::-1]
        return cls(named={name: one for name, _, one in built}, inputs=inputs, **methods)

    def results(self) -> dict[str, torch.Tensor]:
        """Return what a forward pass left for extensions, by name."""
        found = ((name, take()) for name, take in self.take_results)
        return {name: result for name, result in found if result is not None}

    def all_linked(self, request: Request) -> list[Request]:
        """Return the other requests that are admitted, preempted and ended together with a request."""
        return [other for linked in self.linked for other in linked(request)]

    @property
    def notes(self) -> tuple[str, ...]:
        """The remarks of all extensions that are shown with the plan."""
        return tuple(note for one in self.named.values() for note in getattr(one, "notes", ()))


NO_EXTENSIONS = Extensions()


def _nothing(_: Request) -> None:
    """Give back nothing."""


def _limits(method: Callable[[Int, Int], Any], label: str) -> Callable[[Int, Int], Int]:
    def limit_tokens(rows: Int, counts: Int) -> Int:
        limits = np.asarray(method(rows, counts.copy()))
        if limits.shape != rows.shape or limits.dtype.kind not in "iu" or (limits < 0).any():
            raise PluginError(
                f"{label}: limit_tokens gave {limits.dtype} {list(limits.shape)} with a minimum of "
                f"{limits.min(initial=0)}, expected integers {list(rows.shape)} from 0",
                fix=_FIX,
            )
        return np.minimum(counts, limits.astype(np.int64))

    return limit_tokens


def _logits(method: Callable[[torch.Tensor, ModelInputs], Any], label: str) -> Any:
    def process_logits(logits: torch.Tensor, inputs: ModelInputs) -> torch.Tensor:
        found = method(logits, inputs)
        wanted = logits.shape, logits.dtype, logits.device
        if not isinstance(found, torch.Tensor) or (found.shape, found.dtype, found.device) != wanted:
            given = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)[:80]
            raise PluginError(
                f"{label}: process_logits gave {given}, expected {logits.dtype} {list(logits.shape)} "
                f"on {logits.device}",
                fix=_FIX,
            )
        return found

    return process_logits


def _instance(name: str, wanted: type) -> Callable[[Callable[[Any], Any], str], Any]:
    def checked(method: Callable[[Any], Any], label: str) -> Any:
        def call(given: Any) -> Any:
            found = method(given)
            if not isinstance(found, wanted):
                raise PluginError(f"{label}: {name} gave {found!r:.80}, expected {wanted.__name__}", fix=_FIX)
            return found

        return call

    return checked


_CHECKED: Mapping[str, Callable[[Any, str], Any]] = {
    "limit_prefix": lambda limit, _: lambda _request, hashes: limit(hashes),
    "limit_tokens": _limits,
    "process_logits": _logits,
    "before_step": _instance("before_step", SchedulerOutput),
    "prepare_inputs": _instance("prepare_inputs", ModelInputs),
}
