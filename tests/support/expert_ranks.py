"""Parts of mixtures on ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from thread_ranks import Exchange, Finished, ThreadCommunicator

from slotline.plugins.model_families.tensor_parallel import expert_parallel, expert_routing
from slotline.registry.contracts.model_family import Shard


class Counting(ThreadCommunicator):
    """Communicator that counts the rows sent to other ranks by `all_to_all`."""

    rows = 0

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Finished:
        assert x.is_contiguous()
        self.rows += sum(sent) - sent[self.rank]
        found = super().all_to_all(x, sent, received)
        assert len(found.out) == sum(received)
        return found


def over_threads(size: int, run: Callable[[Counting], Any]) -> list[Any]:
    """Run a function on some ranks, and return what each returned.

    Raises:
        BaseException: the first error of a rank that is no effect of another's.
    """
    exchange = Exchange(size)

    def one(rank: int) -> Any:
        with exchange.turn:
            try:
                return run(Counting(exchange, rank, "tensor"))
            except BaseException:
                exchange.barrier.abort()
                raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for each in running if (error := each.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [each.result() for each in running]


def share(module: Any, ranks: ThreadCommunicator, form: Any, redundant: int = 0, *, count: bool = False) -> None:
    """Leave a mixture a rank's experts, and let it run over all ranks."""
    shard = Shard(rank=ranks.rank, size=ranks.size, experts=True, redundant_experts=redundant, count_experts=count)
    expert_parallel.own(module, "experts", shard)
    module.forward = form(module, ranks)
    if form is expert_routing.SameTokens:
        module.register_forward_hook(lambda _module, _given, out: ranks.all_reduce(out))
