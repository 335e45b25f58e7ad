"""The communicator contract, version 1 (provisional): collectives among the ranks of a group.

A rank is a process with its own device and its own part of the work. Every rank runs the same engine on the same
arrivals, so all ranks of a group call the same collectives in the same order, with tensors of the same shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from slotline.registry.capability import Flag, GraphSupport, Level, Max, Set
from slotline.registry.declared import declared

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True, field_transformer=declared)
class CommunicatorCapabilities:
    """Capabilities that a communicator declares.

    Attributes:
        devices: types of the devices whose tensors it takes.
        dtypes: dtypes that it adds up. It moves tensors of any dtype.
        max_ranks: most ranks of a group.
        graphs: the batches whose collectives can be captured in a graph.
        batch_invariant: with `CommunicatorContext.batch_invariant`, each number of a sum is bitwise the same whatever
            the other numbers and the shape of the tensor are, by `all_reduce` as by `reduce_scatter`.
        priority: the communicator with the highest one that fits is chosen.
    """

    devices: Set[str]
    dtypes: Set[str]
    max_ranks: Max = Max()
    graphs: Level[GraphSupport] = Level(GraphSupport.NEVER)
    batch_invariant: Flag = Flag(False)
    priority: int = 0


@frozen(kw_only=True)
class CommunicatorContext:
    """Input of a communicator's factory, which all ranks of an engine call once for each group, in one order.

    torch.distributed is initialised by then: its default process group has all ranks, and works on the host by gloo.

    Attributes:
        name: of the group, unique in the engine, as ``tensor``.
        ranks: members of the group by their number in the default process group, in order.
        rank: place of this process in `ranks`.
        device: torch device string of this rank.
        timeout: seconds after which a collective that another rank does not join raises an error that names the group,
            as `slotline.registry.errors.CollectiveError`. Where the device waits and not the host, the error may be
            raised when the device is synchronized, or end the process.
        batch_invariant: True if the plan relies on the capability of that name.
        options: the plugin's own table.
    """

    contract: int
    name: str
    ranks: tuple[int, ...]
    rank: int
    device: str
    timeout: float = 600.0
    batch_invariant: bool = False
    options: Any = None


class Exchange(Protocol):
    """Collective that was started and not waited for."""

    def finish(self) -> torch.Tensor:
        """Return the result. Work queued on the device from now on runs after it. Called once."""
        ...


class Communicator(Protocol):
    """Product of a communicator's factory.

    Tensors are on the context's device and contiguous. Results are new tensors unless the text says otherwise. A call
    returns once its work is queued on the device, and on the host once it is done.

    Attributes:
        rank: place of this process in the group, from 0.
        size: number of ranks in the group.
    """

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' tensors, bitwise the same on all ranks.

        The sum of two numbers is rounded once to their dtype, and at most once more for each further rank.

        Args:
            x: any shape, in one of the dtypes of the capabilities. It may be overwritten, and may be the result.
        """
        ...

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the ranks' tensors of one shape joined along a dimension, in order of the ranks.

        Args:
            x: with at least one dimension.
            dim: negative ones count from the last.
        """
        ...

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part [n / size, ..] of the sum of the ranks' tensors [n, ..]. size divides n.

        The sum is rounded as that of `all_reduce`.
        """
        ...

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Exchange:
        """Start to give each rank its rows of x. The result has the rows given to this rank, in order of the ranks.

        Several exchanges may be started before the first is finished, and be finished in any order.

        Args:
            x: [sum(sent), ..]. It must not change until the exchange is finished.
            sent: number of rows for each rank.
            received: number of rows from each rank.
        """
        ...

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Return the tensor of one rank.

        Args:
            x: on the other ranks a tensor of the same shape and dtype, which may be overwritten and be the result.
        """
        ...

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send a tensor to a rank, which receives it. x must not change until the device has done the work.

        Tensors from one rank to another are received in the order in which they were sent.
        """
        ...

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Return the tensor that a rank sends.

        Args:
            x: a tensor of the same shape and dtype, which may be overwritten and be the result.
        """
        ...

    def abort(self) -> None:
        """End the collectives that wait for another rank with an error. Called from another thread, at any time.

        No collective follows.
        """
        ...

    def close(self) -> None:
        """Free what the group holds. No call follows."""
        ...
