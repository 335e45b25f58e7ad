"""Parts of mixtures on ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slotline.plugins.model_families.tensor_parallel import expert_parallel, expert_routing, threads
from slotline.plugins.model_families.tensor_parallel.threads import ThreadCommunicator
from slotline.registry.contracts.communicator import Exchange
from slotline.registry.contracts.model_family import Shard


class Counting(ThreadCommunicator):
    """Communicator that counts the rows sent to other ranks by `all_to_all`."""

    rows = 0

    def all_to_all(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Exchange:
        assert x.is_contiguous()
        self.rows += sum(sent) - sent[self.rank]
        found = super().all_to_all(x, sent, received)
        assert len(found.finish()) == sum(received)
        return found


def over_threads(size: int, run: Callable[[Counting], Any]) -> list[Any]:
    """Run a function on some ranks, and return what each returned.

    Raises:
        BaseException: the first error of a rank that is no effect of another's.
    """
    return threads.run(size, lambda _shard, ranks: run(ranks), Counting)


def share(module: Any, ranks: ThreadCommunicator, form: Any, redundant: int = 0, *, count: bool = False) -> None:
    """Leave a mixture a rank's experts, and let it run over all ranks."""
    shard = Shard(rank=ranks.rank, size=ranks.size, experts=True, redundant_experts=redundant, count_experts=count)
    expert_parallel.own(module, "experts", shard)
    module.forward = form(module, ranks)
    if form is expert_routing.SameTokens:
        module.register_forward_hook(lambda _module, _given, out: ranks.all_reduce(out))
