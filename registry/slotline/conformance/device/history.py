"""L3: long random histories of steps, as an engine makes them."""

from __future__ import annotations

import numpy as np

from slotline.conformance.device.buffers import reserved, sent
from slotline.registry.contracts.device import Download
from slotline.registry.descriptor import Kind
from slotline.testing.check import Level, Run, check
from slotline.testing.environments.device import DTYPES, Array, DeviceUnderTest, random_array, same
from slotline.testing.oracles import device as oracle

STEPS = 60


@check(Kind.DEVICE, "device.history.steps", Level.STATEFUL, explores=True, cost=0.2, profile="mixed")
def history_steps(run: Run) -> None:
    """Uploads of any sizes, work on them, tables that change, and downloads that are waited for a step later."""
    under_test = DeviceUnderTest(run)
    rng, buffer = under_test.rng, under_test.device.transfer_buffer()
    table = rng.integers(0, 999, (12, 9)).astype(np.int32)
    room, under_way = 0, list[tuple[Array, Download]]()
    with under_test.at_work():
        held = under_test.put(table)
        out = under_test.put(np.zeros_like(table))
        for step in range(STEPS):
            n = int(rng.integers(0, 9))
            rows, values = rng.permutation(12)[:n].astype(np.int64), random_array(rng, np.int32, (n, 9))
            shapes = [tuple(rng.integers(0, 9, rng.integers(1, 4)).tolist()) for _ in range(int(rng.integers(6)))]
            others = [random_array(rng, DTYPES[int(rng.integers(len(DTYPES)))], shape) for shape in shapes]
            arrays = [rows, values, *others]
            if reserved(arrays) > room:
                room = reserved(arrays) + int(rng.integers(0, 99))
                buffer.reserve(room)
            tensors = sent(under_test, buffer, arrays)
            under_test.ops.put_rows(held, tensors[0], tensors[1])
            under_test.ops.gather_rows(held, tensors[0].flip(0), out)
            table = oracle.put_rows(table, rows, values)["table"]
            downloads = [buffer.download(out[:n]), buffer.download(held.clone())]
            for array, tensor in zip(others, tensors[2:], strict=True):
                same(array, under_test.host(tensor), f"step {step}: an upload")
            for wanted, download in under_way:
                same(wanted, download.wait(), f"step {step}: a download of the step before")
            if run.subject.capabilities.host_memory.support:  # its downloads are views, which the next step changes
                downloads[0] = buffer.download(out[:n].clone())
            under_way = list(zip((table[rows[::-1]], table), downloads, strict=True))
    for wanted, download in under_way:
        same(wanted, download.wait(), "a download of the last step")
