"""The table of operations against the oracle: plain tensors, hostile layouts, odd sizes, far addresses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from slotline.registry.descriptor import Kind
from slotline.testing.check import Level, NotApplicable, Run, check
from slotline.testing.environments.device import LAYOUTS, DeviceUnderTest, in_host_memory, same
from slotline.testing.environments.device_operations import OPERATIONS, Operation, run_operation

PLAIN = ((1, 33), (6, 200))
"""Rows and vocabulary."""
ODD = ((0, 64), (3, 1), (1, 5003), (40, 31))
"""No rows, a vocabulary of one token, a large one that is a multiple of nothing, more rows than a block has."""
FAR_BYTES = 24 << 30
"""Free memory that tensors behind the reach of 32-bit numbers need."""


def _values(operation: Operation) -> Callable[[Run], None]:
    def values(run: Run) -> None:
        run_operation(operation, run, run["rows"], run["vocab_size"])

    values.__doc__ = (
        f"`{operation.name}` gives the oracle's results in shape, dtype and value, and writes nothing else."
    )
    return values


def _layouts(operation: Operation) -> Callable[[Run], None]:
    def layouts(run: Run) -> None:
        run_operation(operation, run, 7, 130, run["layout"])

    layouts.__doc__ = f"`{operation.name}` reads and writes tensors that are parts of others, and nothing beside them."
    return layouts


for _operation in OPERATIONS:
    check(
        Kind.DEVICE,
        f"device.ops.{_operation.name}",
        Level.NUMERICS,
        cases=lambda _: ({"rows": rows, "vocab_size": size} for rows, size in PLAIN),
        cost=0.02,
    )(_values(_operation))
    check(
        Kind.DEVICE,
        f"device.ops.{_operation.name}.sizes",
        Level.HOSTILE,
        cases=lambda _: ({"rows": rows, "vocab_size": size} for rows, size in ODD),
        cost=0.03,
    )(_values(_operation))
    check(
        Kind.DEVICE,
        f"device.ops.{_operation.name}.layouts",
        Level.HOSTILE,
        cases=lambda _: ({"layout": layout} for layout in LAYOUTS),
        cost=0.03,
    )(_layouts(_operation))


@check(Kind.DEVICE, "device.ops.far", Level.HOSTILE, cost=5.0)
def ops_far(run: Run) -> None:
    """Rows of a table and of logits are found behind the reach of 32-bit offsets."""
    under_test = DeviceUnderTest(run)
    if in_host_memory(under_test) or under_test.device.memory().free < FAR_BYTES:
        raise NotApplicable(f"needs {FAR_BYTES >> 30} GiB of free memory that is not the host's")
    rows, width = 33, (1 << 26) + 8  # 2.2e9 elements
    with under_test.at_work():
        table = under_test.device.zeros(rows * width * 4).view(torch.int32).view(rows, width)
        last = under_test.put(np.array([rows - 1, 1]))
        values = under_test.put(np.array([[5], [6]], np.int32)).expand(2, width).contiguous()
        under_test.ops.put_rows(table, last, values)
        del values
        same(np.array([5, 6, 0]), under_test.host(table[[rows - 1, 1, 0], -1]), "put_rows behind 2**31 elements")
        out = torch.zeros(2, width, dtype=torch.int32, device=under_test.torch_device)
        under_test.ops.gather_rows(table, last, out)
        same(np.array([5, 6]), under_test.host(out[:, -1]), "gather_rows behind 2**31 elements")
        logits = table.view(torch.float32)
        logits[-1, -3] = 7
        same(np.array([width - 3]), under_test.host(under_test.ops.argmax(logits)[-1:]), "argmax behind 2**31 elements")
