"""Broken step extensions, one bug each, and right ones that differ."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from slotline.registry.contracts import ExtensionContext
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.reference import extension as reference
from slotline.testing.reference.extension import Everywhere, SlowStart

Int = npt.NDArray[np.int64]


class Misspelt(SlowStart):
    def limit_token(self, rows: Int, counts: Int) -> Int:
        return counts

    limit_tokens = None  # type: ignore[assignment]


class TakesNoPart:
    def __init__(self, context: ExtensionContext) -> None:
        pass

    def begin(self) -> None:
        """Never called."""


class OneArgument(SlowStart):
    def limit_tokens(self, rows: Int) -> Int:  # type: ignore[override]
        return rows


class ReturnsTrue(SlowStart):
    def validate(self, request: Any) -> Any:
        return True


class RaisesKey(SlowStart):
    def validate(self, request: Any) -> None:
        request.params.extra_args["slow_start"]  # of a request that has none


class ChangesParams(SlowStart):
    def admit(self, request: Any) -> None:
        super().admit(request)
        request.prompt_token_ids.append(0)


class WritesRows(SlowStart):
    def admit(self, request: Any) -> None:
        super().admit(request)
        self.context.rows.num_tokens[request.row] += 1


class FloatLimits(SlowStart):
    def limit_tokens(self, rows: Int, counts: Int) -> Any:
        return super().limit_tokens(rows, counts) * 0.5


class OneLimit(SlowStart):
    def limit_tokens(self, rows: Int, counts: Int) -> Any:
        return np.array([5])


class NegativeLimits(SlowStart):
    def limit_tokens(self, rows: Int, counts: Int) -> Int:
        return super().limit_tokens(rows, counts) - 3


class WritesCounts(SlowStart):
    def limit_tokens(self, rows: Int, counts: Int) -> Int:
        counts[:] = np.minimum(counts, 5)
        return counts


class LimitsByPlace(SlowStart):
    def limit_tokens(self, rows: Int, counts: Int) -> Int:
        return np.minimum(counts, 5 + np.arange(len(rows)))


class KeepsSteps(SlowStart):
    def admit(self, request: Any) -> None:
        """Keep the steps of the row."""

    def release(self, row: int) -> None:
        """Keep the steps of the row."""

    def check(self) -> None:
        """Look at nothing."""


class ReleasesAll(SlowStart):
    def release(self, row: int) -> None:
        self.steps[:] = 0


class ReleasesOnce(SlowStart):
    def __init__(self, context: ExtensionContext) -> None:
        super().__init__(context)
        self.names: dict[int, str] = {}

    def admit(self, request: Any) -> None:
        super().admit(request)
        self.names[request.row] = request.request_id

    def release(self, row: int) -> None:
        del self.names[row]
        super().release(row)


class WritesLogits(SlowStart):
    def process_logits(self, logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        return logits.index_fill_(1, torch.tensor([7]), -torch.inf)


class DoubleLogits(SlowStart):
    def process_logits(self, logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        return super().process_logits(logits, inputs).double()


class ShorterLogits(SlowStart):
    def process_logits(self, logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        return logits[:, :-1]


class LogitsByPlace(SlowStart):
    def process_logits(self, logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        return logits + torch.arange(len(logits))[:, None]


class SomeLogits(SlowStart):
    def process_logits(self, logits: torch.Tensor, inputs: Any) -> torch.Tensor:
        return logits - logits.max() + logits.max()


class NoInputs(Everywhere):
    def prepare_inputs(self, inputs: Any) -> Any:
        return None


class WritesInputs(Everywhere):
    def prepare_inputs(self, inputs: Any) -> Any:
        inputs.positions.add_(1)
        return inputs


class ReversedStep(Everywhere):
    def before_step(self, scheduled: Any) -> Any:
        return attrs.evolve(scheduled, rows=scheduled.rows[::-1])


class UncountedStep(Everywhere):
    def before_step(self, scheduled: Any) -> Any:
        return attrs.evolve(scheduled, rows=scheduled.rows[:-1])


class ListedArguments(Everywhere):
    def forward_kwargs(self, inputs: Any) -> Any:
        return [("scale", 1)]


class Starves(SlowStart):
    def limit_tokens(self, rows: Int, counts: Int) -> Int:
        return np.where(rows == 3, 0, super().limit_tokens(rows, counts))


class FourthRequest(SlowStart):
    def __init__(self, context: ExtensionContext) -> None:
        super().__init__(context)
        self.requests = np.zeros(len(self.steps), np.int64)

    def admit(self, request: Any) -> None:
        super().admit(request)
        self.requests[request.row] += 1
        if self.requests[request.row] == 4:
            self.steps[request.row] = 2


def _mutant(name: str, summary: str, level: Level, factory: Any, **offer: Any) -> Mutant:
    base = (
        reference.everywhere if isinstance(factory, type) and issubclass(factory, Everywhere) else reference.descriptor
    )
    capabilities = attrs.evolve(base.capabilities, **offer)
    changed = attrs.evolve(
        base, name=f"mutant_{name.replace('-', '_')}", summary=summary, factory=factory, capabilities=capabilities
    )
    return Mutant(name, summary, level, changed)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("misspelt", "a method is misspelt and never called", Level.CONTRACT, Misspelt),
    _mutant("takes-no-part", "it has no method of a step", Level.CONTRACT, TakesNoPart),
    _mutant("one-argument", "limit_tokens takes the rows alone", Level.CONTRACT, OneArgument),
    _mutant("graphs-beside-arguments", "it has arguments and graphs", Level.CONTRACT, Everywhere, excludes=()),
    _mutant("provides-drafts", "it provides a feature of the plan", Level.CONTRACT, SlowStart, provides=("graphs",)),
    _mutant("returns-true", "validate answers True", Level.NUMERICS, ReturnsTrue),
    _mutant("raises-key", "a request without its parameter is an error", Level.NUMERICS, RaisesKey),
    _mutant("changes-params", "admission changes a request", Level.NUMERICS, ChangesParams),
    _mutant("writes-rows", "it writes into the table of rows", Level.NUMERICS, WritesRows),
    _mutant("float-limits", "limits are no integers", Level.NUMERICS, FloatLimits),
    _mutant("one-limit", "one limit is for all rows", Level.NUMERICS, OneLimit),
    _mutant("negative-limits", "limits are negative", Level.NUMERICS, NegativeLimits),
    _mutant("writes-counts", "it writes into the counts", Level.NUMERICS, WritesCounts),
    _mutant("writes-logits", "it writes into the logits", Level.NUMERICS, WritesLogits),
    _mutant("double-logits", "logits are float64", Level.NUMERICS, DoubleLogits),
    _mutant("shorter-logits", "logits lack the last token", Level.NUMERICS, ShorterLogits),
    _mutant("some-logits", "no logits are an error", Level.NUMERICS, SomeLogits),
    _mutant("no-inputs", "prepare_inputs answers nothing", Level.NUMERICS, NoInputs),
    _mutant("writes-inputs", "it writes into the inputs' tensors", Level.NUMERICS, WritesInputs),
    _mutant("reversed-step", "the step's rows are in another order", Level.NUMERICS, ReversedStep),
    _mutant("uncounted-step", "a row leaves the step, and its tokens stay", Level.NUMERICS, UncountedStep),
    _mutant("listed-arguments", "arguments of the forward pass are a list", Level.NUMERICS, ListedArguments),
    _mutant("limits-by-place", "limits are of places, not of rows", Level.HOSTILE, LimitsByPlace),
    _mutant("logits-by-place", "logits are changed by place, not by row", Level.HOSTILE, LogitsByPlace),
    _mutant("keeps-steps", "a row keeps what its last request left", Level.HOSTILE, KeepsSteps),
    _mutant("releases-all", "the end of one request is that of all", Level.HOSTILE, ReleasesAll),
    _mutant("releases-once", "a row that was never prepared cannot be released", Level.HOSTILE, ReleasesOnce),
    _mutant("fourth-request", "the fourth request of a row goes on from two steps", Level.HOSTILE, FourthRequest),
    _mutant("starves", "a row never gets its turn", Level.STATEFUL, Starves),
)

CORRECT: tuple[Correct, ...] = (
    Correct("limits by row, and a ban of a token", reference.descriptor),
    Correct("the same with every method of a step", reference.everywhere),
)
