"""L4 of communicators: collectives that a graph has captured."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slotline.registry.capability import GraphSupport
from slotline.registry.descriptor import Kind
from slotline.testing.check import Level, NotApplicable, Run, check
from slotline.testing.environments.communicator import (
    GroupUnderTest,
    by_size,
    compare_call,
    dtypes_of,
    everywhere,
    random_tensors,
)
from slotline.testing.environments.communicator_rank import Joined

REPLAYS = 4
SHAPES = ((1, 4096), (8, 4096), (64, 130))


def _replayed(joined: Joined, inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Capture a sum and a gathering, and replay them for each input."""
    buffer = inputs[0].to(joined.device)

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        total = joined.communicator.all_reduce(buffer.clone())
        return total, joined.communicator.all_gather(buffer, -1)

    work()  # what is made at the first call is made before the capture
    joined.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = work()
    found = []
    for x in inputs:
        buffer.copy_(x.to(joined.device))
        graph.replay()
        joined.wait()
        found.append([out.cpu() for out in outputs])
    del graph
    return found


@check(
    Kind.COMMUNICATOR,
    "communicator.graphs.replay",
    Level.GRAPHS,
    needs={"graphs": GraphSupport.SINGLE_TOKEN},
    cases=by_size,
    cost=1.0,
    profile="graphs",
)
def graphs_replay(run: Run) -> None:
    """A captured sum and a captured gathering give, at each replay, what the inputs of the replay say."""
    if run.subject.device.type != "cuda":
        raise NotApplicable("graphs are captured on CUDA devices only")
    size, dtype = run["ranks"], dtypes_of(run.subject)[0]
    for salt, shape in enumerate(SHAPES):
        replays = [random_tensors(run, size, shape, dtype, 10 * salt + number) for number in range(REPLAYS)]
        given = [[xs[rank] for xs in replays] for rank in range(size)]
        found = GroupUnderTest(run, size).perform(_replayed, given)
        for number, xs in enumerate(replays):
            compare_call(run, everywhere("all_reduce", xs), [ranks[number][0] for ranks in found])
            compare_call(run, everywhere("all_gather", xs, -1), [ranks[number][1] for ranks in found])
