"""Broken communicators, one bug each, and right ones that differ."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from slotline.registry.contracts import CommunicatorContext
from slotline.testing.check import Level
from slotline.testing.mutants import Correct, Mutant
from slotline.testing.reference import communicator as reference
from slotline.testing.reference.communicator import StoreCommunicator, StoreExchange

Parts = Sequence[torch.Tensor]


class NoAbort(StoreCommunicator):
    abort = None  # type: ignore[assignment]


class NoDim(StoreCommunicator):
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().all_gather(x)


class PlaceOfAll(StoreCommunicator):
    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        self.place = context.rank
        self.rank = context.ranks[context.rank]


class FewerRanks(StoreCommunicator):
    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        self.size = min(self.size, 2)


class ForgetsLast(StoreCommunicator):
    def total(self, parts: Parts) -> torch.Tensor:
        return super().total(parts[:-1])


class Mean(StoreCommunicator):
    def total(self, parts: Parts) -> torch.Tensor:
        return super().total(parts) / len(parts)


class OwnFirst(StoreCommunicator):
    def total(self, parts: Parts) -> torch.Tensor:
        return super().total([*parts[self.rank :], *parts[: self.rank]])


class RoundsTwice(StoreCommunicator):
    def total(self, parts: Parts) -> torch.Tensor:
        total = super().total([part.float() for part in parts])
        return total.half().to(parts[0].dtype) if parts[0].dtype == torch.bfloat16 else total.to(parts[0].dtype)


class DropsLastOdd(StoreCommunicator):
    def total(self, parts: Parts) -> torch.Tensor:
        total = super().total(parts)
        if total.numel() > 1000 and total.numel() % 2:
            total.view(-1)[-1] = parts[self.rank].view(-1)[-1]
        return total


class Flattens(StoreCommunicator):
    def total(self, parts: Parts) -> torch.Tensor:
        return super().total([part.reshape(-1) for part in parts]) if not parts[0].dim() else super().total(parts)


class NeedsNumbers(StoreCommunicator):
    def total(self, parts: Parts) -> torch.Tensor:
        parts[0].abs().max()
        return super().total(parts)


class OwnGatheredFirst(StoreCommunicator):
    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        parts = self.parts(x, "all_gather")
        return torch.cat([*parts[self.rank :], *parts[: self.rank]], dim)


class GathersRows(StoreCommunicator):
    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        shape = list(x.shape)
        shape[dim] *= self.size
        return super().all_gather(x).reshape(shape)


class GathersLast(StoreCommunicator):
    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return super().all_gather(x, -1 if dim < 0 else dim)


class GathersFloats(StoreCommunicator):
    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return super().all_gather(x.float(), dim).to(x.dtype)


class ScattersNext(StoreCommunicator):
    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.total(self.parts(x, "reduce_scatter")).chunk(self.size)
        return parts[(self.rank + 1) % self.size].clone()


class ScattersOwn(StoreCommunicator):
    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        super().reduce_scatter(x)
        return x.chunk(self.size)[self.rank].clone()


class Swapped(StoreCommunicator):
    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> StoreExchange:
        return super().all_to_all(x, received, sent)


class FromZero(StoreCommunicator):
    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return super().broadcast(x, 0)


class LeavesInput(StoreCommunicator):
    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        out = super().all_gather(x, dim)
        x.zero_()
        return out


class DoesNotWait(StoreCommunicator):
    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> StoreExchange:
        number = self.calls + 1
        exchange = super().all_to_all(x, sent, received)

        def read() -> torch.Tensor:
            keys = [f"rank {rank} in call {number}" for rank in range(self.size)]
            until = time.monotonic() + 0.4
            while not self.store.check(keys) and time.monotonic() < until:
                time.sleep(0.001)
            return exchange.finish() if self.store.check(keys) else x.new_zeros(sum(received), *x.shape[1:])

        return StoreExchange(read)


class FinishesInOrder(StoreCommunicator):
    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        self.started: list[StoreExchange] = []

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> StoreExchange:
        self.started.append(super().all_to_all(x, sent, received))
        return StoreExchange(lambda: self.started.pop(0).finish())


class LastFirst(StoreCommunicator):
    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        self.pile: list[torch.Tensor] = []

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        if not self.pile:
            self.pile.append(super().receive(x, source))
            time.sleep(0.05)
            number = self.letters[source, self.rank]
            while self.store.check([f"tensor {number + 1} from {source} to {self.rank}"]):
                self.pile.append(super().receive(x, source))
                number += 1
        return self.pile.pop()


class FromAnyone(StoreCommunicator):
    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        time.sleep(0.05)
        for other in range(self.size):
            number = self.letters.get((other, self.rank), 0) + 1
            if self.store.check([f"tensor {number} from {other} to {self.rank}"]):
                return super().receive(x, other)
        return super().receive(x, source)


class OneGroup(StoreCommunicator):
    def prefix(self, place: str, made: int) -> str:
        return f"{self.context.ranks}"


class StaleGroup(StoreCommunicator):
    def prefix(self, place: str, made: int) -> str:
        return place

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        key = f"rank {self.rank} in call {self.calls + 1}"
        if self.store.check([key]):
            raise RuntimeError(f"there is a value {key} already")
        return super().all_gather(x, dim)


class OneBuffer(StoreCommunicator):
    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(context)
        self.buffers: dict[Any, torch.Tensor] = {}

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        out = super().all_gather(x, dim)
        return self.buffers.setdefault((tuple(out.shape), out.dtype), out).copy_(out)


class CleansNaN(StoreCommunicator):
    def total(self, parts: Parts) -> torch.Tensor:
        return super().total([torch.nan_to_num(part) for part in parts])


class TurnsByPlace(StoreCommunicator):
    """Adds up each quarter of a tensor beginning with another rank, as rings do."""

    def total(self, parts: Parts) -> torch.Tensor:
        flat = [part.reshape(-1) for part in parts]
        step = max(-(-flat[0].numel() // 4), 1)
        out = []
        for number, pieces in enumerate(zip(*(part.split(step) for part in flat), strict=True)):
            first = number % self.size
            out.append(super().total([*pieces[first:], *pieces[:first]]))
        return torch.cat(out).view(parts[0].shape)


class WaitsForever(StoreCommunicator):
    def __init__(self, context: CommunicatorContext) -> None:
        super().__init__(attrs.evolve(context, timeout=1e9))


class SaysNothing(StoreCommunicator):
    def get(self, key: str, what: str) -> Any:
        try:
            return super().get(key, what)
        except RuntimeError:
            raise RuntimeError("timed out") from None


class GivesUp(StoreCommunicator):
    def get(self, key: str, what: str) -> Any:
        try:
            return super().get(key, what)
        except RuntimeError:
            return torch.zeros(4)


class AbortsLater(StoreCommunicator):
    def abort(self) -> None:
        self.stopped = True


def _mutant(name: str, what: str, level: Level, factory: type) -> Mutant:
    return Mutant(name, what, level, attrs.evolve(reference.descriptor, name=name, factory=factory))


_L0, _L1, _L2 = Level.CONTRACT, Level.NUMERICS, Level.HOSTILE
MUTANTS = (
    _mutant("abort-missing", "there is no abort", _L0, NoAbort),
    _mutant("gather-without-dim", "all_gather takes no dimension", _L0, NoDim),
    _mutant("two-ranks", "a third rank is not seen", _L1, FewerRanks),
    _mutant("forgets-last", "sums lack the last rank", _L1, ForgetsLast),
    _mutant("mean", "sums are means", _L1, Mean),
    _mutant("own-first", "each rank adds up from its own tensor on, so that bits differ", _L1, OwnFirst),
    _mutant("rounds-twice", "sums of bfloat16 are rounded to float16 first", _L1, RoundsTwice),
    _mutant("drops-last-odd", "the last of an odd number of numbers is not added up", _L1, DropsLastOdd),
    _mutant("no-scalar", "a tensor without dimensions comes back with one", _L1, Flattens),
    _mutant("needs-numbers", "an empty tensor is an error", _L1, NeedsNumbers),
    _mutant("gathers-own-first", "gathered tensors begin with a rank's own", _L1, OwnGatheredFirst),
    _mutant("gathers-rows", "gathered rows get the shape of other dimensions", _L1, GathersRows),
    _mutant("gathers-last", "negative dimensions are the last one", _L1, GathersLast),
    _mutant("gathers-floats", "gathered tensors go through float32", _L1, GathersFloats),
    _mutant("scatters-next", "each rank gets the next one's part of the sum", _L1, ScattersNext),
    _mutant("scatters-own", "reduce_scatter does not add up", _L1, ScattersOwn),
    _mutant("sent-is-received", "rows sent are taken for rows received", _L1, Swapped),
    _mutant("from-zero", "broadcasts come from rank 0", _L1, FromZero),
    _mutant("zeroes-input", "all_gather overwrites its input", _L1, LeavesInput),
    _mutant("rank-of-all", "the rank is the number among all ranks", _L2, PlaceOfAll),
    _mutant("does-not-wait", "finish does not wait for late ranks", _L2, DoesNotWait),
    _mutant("finishes-in-order", "exchanges are finished as they were started", _L2, FinishesInOrder),
    _mutant("last-first", "the tensor sent last is received first", _L2, LastFirst),
    _mutant("from-anyone", "whatever was sent first is received", _L2, FromAnyone),
    _mutant("one-group", "groups of the same ranks are one", _L2, OneGroup),
    _mutant("stale-group", "a closed group's values are in the way of the next", _L2, StaleGroup),
    _mutant("one-buffer", "results of one shape share a buffer", _L2, OneBuffer),
    _mutant("cleans-nan", "NaN and infinity are replaced", _L2, CleansNaN),
    _mutant("turns-by-place", "the order of a sum hangs on the place in the tensor", _L2, TurnsByPlace),
    _mutant("waits-forever", "the timeout is ignored", _L2, WaitsForever),
    _mutant("says-nothing", "the error of a timeout does not say whose", _L2, SaysNothing),
    _mutant("gives-up", "a collective that nobody joins returns zeros", _L2, GivesUp),
    _mutant("aborts-nothing", "abort does not end what waits", _L2, AbortsLater),
)

CORRECT = (
    Correct("all tensors through the store, added up in float32", reference.descriptor),
    Correct("sums of pairs in float64, the last rank first", reference.pairwise),
)
