"""Communicator in plain Python: all tensors go through the store that joins the ranks. Slow and right."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define
from torch import distributed
from torch.distributed import distributed_c10d

from slotline.registry.capability import Flag, Set
from slotline.registry.contracts import CommunicatorCapabilities, CommunicatorContext
from slotline.registry.descriptor import Descriptor, Kind
from slotline.registry.errors import CollectiveError

_PAUSE = 0.0005
"""Seconds between two looks into the store."""


@define(eq=False)
class StoreExchange:
    """Exchange whose result is read when it is finished."""

    read: Callable[[], torch.Tensor]

    def finish(self) -> torch.Tensor:
        """See the contract."""
        return self.read()


class StoreCommunicator:
    """Group of ranks. Each call has a number, under which each rank puts a value into the store."""

    def __init__(self, context: CommunicatorContext) -> None:
        self.context = context
        self.rank, self.size = context.rank, len(context.ranks)
        store = distributed_c10d._get_default_store()
        place = f"{context.name} of {context.ranks}"
        made = store.add(f"{place}: groups of rank {self.rank}", 1)  # a later group has keys of its own
        self.store = distributed.PrefixStore(self.prefix(place, made), store)  # type: ignore[attr-defined]
        self.calls = 0
        self.letters: dict[tuple[int, int], int] = {}
        self.aborted = False

    def prefix(self, place: str, made: int) -> str:
        """Return the beginning of the group's keys."""
        return f"{place}, {made}"

    # --- values

    def put(self, key: str, value: Any) -> None:
        """Put a value into the store."""
        self.store.set(key, pickle.dumps(value))  # type: ignore[arg-type]

    def get(self, key: str, what: str) -> Any:
        """Wait for a value of another rank."""
        until = time.monotonic() + self.context.timeout
        while not self.store.check([key]):
            if self.aborted or time.monotonic() > until:
                why = "was aborted" if self.aborted else f"waited for {self.context.timeout:g} s"
                raise CollectiveError(
                    f"{what} in group {self.context.name!r} {why} for {key}", fix="see what the other ranks do"
                )
            time.sleep(_PAUSE)
        return pickle.loads(self.store.get(key))

    def post(self, value: Any) -> int:
        """Put this rank's value of the next call into the store, and return the call's number."""
        self.calls += 1
        self.put(f"rank {self.rank} in call {self.calls}", value)
        return self.calls

    def collect(self, number: int, what: str) -> list[Any]:
        """Return the values of all ranks in a call, in order."""
        return [self.get(f"rank {rank} in call {number}", what) for rank in range(self.size)]

    def parts(self, x: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Return the tensors of all ranks in the next call, in order."""
        return [part.to(x.device) for part in self.collect(self.post(x.cpu()), what)]

    # --- the contract

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See the contract."""
        return self.total(self.parts(x, "all_reduce"))

    def total(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of tensors, rounded once."""
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(parts[0].dtype)

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """See the contract."""
        return torch.cat(self.parts(x, "all_gather"), dim)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """See the contract."""
        rows = x.shape[0] // self.size
        return self.total(self.parts(x, "reduce_scatter"))[self.rank * rows : (self.rank + 1) * rows].clone()

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> StoreExchange:
        """See the contract."""
        number = self.post([part.clone() for part in x.cpu().split(list(sent))])

        def read() -> torch.Tensor:
            return torch.cat([parts[self.rank] for parts in self.collect(number, "all_to_all")]).to(x.device)

        return StoreExchange(read)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """See the contract."""
        return self.parts(x, f"broadcast from {source}")[source]

    def send(self, x: torch.Tensor, to: int) -> None:
        """See the contract."""
        self.put(self.letter(self.rank, to), x.cpu())

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """See the contract."""
        found: torch.Tensor = self.get(self.letter(source, self.rank), f"receive from {source}")
        return found.to(x.device)

    def letter(self, source: int, to: int) -> str:
        """Return the key of the next tensor from one rank to another."""
        number = self.letters[source, to] = self.letters.get((source, to), 0) + 1
        return f"tensor {number} from {source} to {to}"

    def abort(self) -> None:
        """See the contract."""
        self.aborted = True

    def close(self) -> None:
        """See the contract."""


class PairwiseCommunicator(StoreCommunicator):
    """The same with sums of pairs in float64, and the last rank's tensor first."""

    def total(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of tensors, rounded once."""
        left = [part.double() for part in reversed(parts)]
        while len(left) > 1:
            left = [torch.stack(left[i : i + 2]).sum(0) for i in range(0, len(left), 2)]
        return left[0].to(parts[0].dtype)


_CAPABILITIES = CommunicatorCapabilities(
    devices=Set(("cpu", "cuda")), dtypes=Set(("float32", "bfloat16", "float16")), batch_invariant=Flag(True)
)

descriptor = Descriptor(
    kind=Kind.COMMUNICATOR,
    name="store",
    capabilities=_CAPABILITIES,
    factory=StoreCommunicator,
    summary="all tensors through the store that joins the ranks",
)
pairwise = Descriptor(
    kind=Kind.COMMUNICATOR,
    name="pairwise",
    capabilities=_CAPABILITIES,
    factory=PairwiseCommunicator,
    summary="the same with sums of pairs in float64",
)
