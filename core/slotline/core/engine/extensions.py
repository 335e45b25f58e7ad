"""Step extensions of an engine: their methods, resolved once into tuples that a step calls in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen

from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.scheduler_output import SchedulerOutput
from slotline.core.batch.step_output import PendingSample, StepOutput
from slotline.registry.errors import PluginError

Int = npt.NDArray[np.int64]
_FIX = "tell the author of the plugin, or remove its table under [extensions]"


@frozen(kw_only=True)
class Extensions:
    """Bound methods of the extensions, each tuple in the declared order; see `StepExtension`.

    Answers that a step relies on are checked: a wrong type or shape is a `PluginError` that names the extension.
    """

    validate: tuple[Callable[[Request], None], ...] = ()
    admit: tuple[Callable[[Request], None], ...] = ()
    release: tuple[Callable[[int], None], ...] = ()
    limit_tokens: tuple[Callable[[Int, Int], Int], ...] = ()
    before_step: tuple[Callable[[SchedulerOutput], SchedulerOutput], ...] = ()
    prepare_inputs: tuple[Callable[[ModelInputs], ModelInputs], ...] = ()
    plan: tuple[Callable[[ModelInputs], None], ...] = ()
    forward_kwargs: tuple[Callable[[ModelInputs], Mapping[str, Any]], ...] = ()
    process_logits: tuple[Callable[[torch.Tensor, ModelInputs], torch.Tensor], ...] = ()
    after_sample: tuple[Callable[[PendingSample], None], ...] = ()
    commit: tuple[Callable[[StepOutput], None], ...] = ()
    check: tuple[Callable[[], None], ...] = ()

    @classmethod
    def of(cls, built: Sequence[tuple[str, Any]]) -> Extensions:
        """Resolve the methods of built extensions.

        Args:
            built: label and object of each extension, in order.
        """

        def bound(name: str) -> tuple[Any, ...]:
            found = [(label, getattr(one, name, None)) for label, one in built]
            checked = _CHECKED.get(name)
            return tuple(
                method if checked is None else checked(method, label) for label, method in found if method is not None
            )

        return cls(
            validate=bound("validate"),
            admit=bound("admit"),
            release=bound("release"),
            limit_tokens=bound("limit_tokens"),
            before_step=bound("before_step"),
            prepare_inputs=bound("prepare_inputs"),
            plan=bound("plan"),
            forward_kwargs=bound("forward_kwargs"),
            process_logits=bound("process_logits"),
            after_sample=bound("after_sample"),
            commit=bound("commit"),
            check=bound("check"),
        )


NO_EXTENSIONS = Extensions()


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
    "limit_tokens": _limits,
    "process_logits": _logits,
    "before_step": _instance("before_step", SchedulerOutput),
    "prepare_inputs": _instance("prepare_inputs", ModelInputs),
}
