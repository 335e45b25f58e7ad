"""Step extensions for tests: one that takes part everywhere, and some that answer wrongly."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slotline.registry import Descriptor, Kind, Set
from slotline.registry.contracts import ExtensionCapabilities, ExtensionContext
from slotline.registry.errors import RequestError

CALLS: list[str] = []


class Everywhere:
    """Notes the methods that are called, and bans token 7."""

    def __init__(self, context: ExtensionContext) -> None:
        self.context = context

    def validate(self, request: Any) -> None:
        CALLS.append("validate")

    def admit(self, request: Any) -> None:
        assert request.row >= 0
        CALLS.append("admit")

    def release(self, row: int) -> None:
        CALLS.append("release")

    def limit_tokens(self, rows: Any, counts: Any) -> Any:
        CALLS.append("limit_tokens")
        return counts

    def before_step(self, scheduled: Any) -> Any:
        CALLS.append("before_step")
        return scheduled

    def prepare_inputs(self, inputs: Any) -> Any:
        CALLS.append("prepare_inputs")
        return inputs

    def plan(self, inputs: Any) -> None:
        CALLS.append("plan")

    def forward_kwargs(self, inputs: Any) -> dict[str, Any]:
        CALLS.append("forward_kwargs")
        return {}

    def process_logits(self, logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        assert len(inputs.logits_rows) == len(logits)
        CALLS.append("process_logits")
        return logits.index_fill(1, torch.tensor([7]), -torch.inf)

    def after_sample(self, pending: Any) -> None:
        CALLS.append("after_sample")

    def commit(self, output: Any) -> None:
        CALLS.append("commit")

    def check(self) -> None:
        CALLS.append("check")


class WrongLimits:
    def __init__(self, context: ExtensionContext) -> None:
        pass

    def limit_tokens(self, rows: Any, counts: Any) -> Any:
        return np.zeros(len(rows) + 1, np.int64)


class WrongLogits:
    def __init__(self, context: ExtensionContext) -> None:
        pass

    def process_logits(self, logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        return logits[:, :-1]


class WrongInputs:
    def __init__(self, context: ExtensionContext) -> None:
        pass

    def prepare_inputs(self, inputs: Any) -> Any:
        return None


class Kwargs:
    def __init__(self, context: ExtensionContext) -> None:
        pass

    def forward_kwargs(self, inputs: Any) -> dict[str, Any]:
        return {}


class Chooses:
    def __init__(self, context: ExtensionContext) -> None:
        pass

    def graph_variant(self, rows: Any) -> int:
        return 0


class Refuses:
    def __init__(self, context: ExtensionContext) -> None:
        pass

    def enter(self, request: Any) -> None:
        if request.params.seed == 13:
            raise RequestError("seed=13 is unlucky", fix="take another")


class Raises:
    def __init__(self, context: ExtensionContext) -> None:
        pass

    def plan(self, inputs: Any) -> None:
        raise ZeroDivisionError("a plan that fails")


def _descriptor(name: str, factory: Any, **offer: Any) -> Descriptor[ExtensionCapabilities]:
    return Descriptor(kind=Kind.EXTENSION, name=name, capabilities=ExtensionCapabilities(**offer), factory=factory)


everywhere = _descriptor("everywhere", Everywhere, excludes=("graphs",), order=50)
wrong_limits = _descriptor("wrong_limits", WrongLimits)
wrong_logits = _descriptor("wrong_logits", WrongLogits)
wrong_inputs = _descriptor("wrong_inputs", WrongInputs)
kwargs = _descriptor("kwargs", Kwargs)
raises = _descriptor("raises", Raises)
refuses = _descriptor("refuses", Refuses)
chooses = _descriptor("chooses", Chooses)
also_chooses = _descriptor("also_chooses", Chooses)
needs_drafts = _descriptor("needs_drafts", Kwargs, requires=("drafts", "lanes"))
lanes = _descriptor("lanes", WrongInputs, provides=("lanes",))
no_lanes = _descriptor("no_lanes", WrongInputs, excludes=("lanes",))
wants_lanes = _descriptor("wants_lanes", WrongInputs, requires=("lanes",))
on_tpu = _descriptor("on_tpu", WrongInputs, devices=Set(("tpu",)))
descriptor = lanes
