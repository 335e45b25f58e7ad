"""A decode step's inputs that the device turns into those of the next step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slotline.registry.contracts.device import DecodeBatch
from slotline.registry.descriptor import Kind
from slotline.testing.check import Level, NotApplicable, Run, check
from slotline.testing.environments.device import DeviceUnderTest, Laid, same
from slotline.testing.oracles import device as oracle

BLOCK, WIDTH, ROWS, MAX_ROWS = 4, 25, 5, 9
STRIDE = oracle.GROWTH


def batch_of(rng: np.random.Generator, *, first: bool, drawn: bool) -> dict[str, Any]:
    """Return the fields of a `DecodeBatch` of `ROWS` requests, as arrays."""
    rows = rng.permutation(MAX_ROWS)[:ROWS].astype(np.int64)
    table = rng.integers(1, 999, (MAX_ROWS + 1, WIDTH)).astype(np.int32)
    taken = np.zeros_like(table)
    taken[:ROWS] = table[rows]
    positions = rng.integers(1, 60, ROWS + 2).astype(np.int64)
    return {
        "positions": positions,
        "seq_lens": (positions + 1).astype(np.int32),
        "counters": rng.integers(-(2**62), 2**62, (ROWS + 2, 4)),
        "stride": STRIDE,
        "changes": np.zeros(64 + ROWS * WIDTH, np.int32),
        "rows": rows,
        "table": table,
        "taken": taken,
        "slots": np.zeros(ROWS + 2, np.int64),
        "block_size": BLOCK,
        "first": first,
        "drawn": drawn,
    }


@check(
    Kind.DEVICE,
    "device.repeats.advance",
    Level.NUMERICS,
    cases=lambda _: (
        {"first": first, "drawn": drawn} for first, drawn in ((True, True), (True, False), (False, False))
    ),
    cost=0.03,
)
def repeats_advance(run: Run) -> None:
    """Repeated steps move positions, lengths, counters and slots, take in changed tables, and touch no padded row."""
    under_test = DeviceUnderTest(run)
    rng = under_test.rng
    batch = batch_of(rng, first=run["first"], drawn=run["drawn"])
    sent = under_test.device.host_empty(len(batch["changes"]), torch.int32).zero_()
    laid: dict[str, Laid] = {
        name: under_test.lay(value)
        for name, value in batch.items()
        if isinstance(value, np.ndarray) and name != "changes"
    }
    fields: dict[str, Any] = {name: laid[name].tensor if name in laid else value for name, value in batch.items()}
    with under_test.at_work():
        advance = under_test.ops.advance_decode_batch(DecodeBatch(**{**fields, "changes": sent}))
        if advance is None:
            raise NotApplicable("the device leaves repeated steps to the host")
        for step in range(6):
            at, width = 3 * step, WIDTH - 2 if step % 2 else 0
            if width:
                batch["changes"][at : at + ROWS] = [0, -1, 1, -1, -1]
                tables = rng.integers(1, 999, 2 * width)
                batch["changes"][at + ROWS : at + ROWS + 2 * width] = tables
            under_test.device.synchronize()
            sent.numpy()[:] = batch["changes"]
            batch |= oracle.advance(batch, at, width)
            advance(at, width)
            for name, one in laid.items():
                same(batch[name], under_test.host(one.tensor), f"step {step}: {name}")
                assert not one.touched_outside(), f"step {step}: memory behind {name} was written"


@check(Kind.DEVICE, "device.repeats.tokens", Level.NUMERICS, cases=lambda _: ({"draws": d} for d in (False, True)))
def repeats_tokens(run: Run) -> None:
    """The sampler of steps that want tokens only draws as `sample` does, keeps the tokens, and sends them."""
    from slotline.testing.environments.device_sampling import Rows, expect_tokens

    under_test = DeviceUnderTest(run)
    vocab_size, most = 300, 8
    table = np.arange(vocab_size + most)
    with under_test.at_work():
        buffer, held = under_test.buffer(), under_test.lay(table)
        sampler = under_test.ops.token_sampler(held.tensor, buffer, most, vocab_size)
        if sampler is None:
            raise NotApplicable("the device has no sampler for steps that want tokens only")
        for step in range(4):
            n = most - step
            rows = Rows.random(under_test.rng, n, vocab_size, plain=not run["draws"])
            stand_ins = vocab_size + under_test.rng.permutation(most)[:n].astype(np.int64)
            logits = under_test.put(np.concatenate([rows.logits, rows.logits[:1]]))
            params = under_test.put(rows.packed()) if run["draws"] else None
            tokens, arrival = sampler(logits, params, under_test.put(stand_ins), captured=bool(step % 2))
            found = under_test.host(tokens)
            expect_tokens(rows, found, f"step {step}")
            same(found, arrival.wait(), f"step {step}: the tokens that arrive")
            table[stand_ins] = found
            same(table, under_test.host(held.tensor), f"step {step}: the table of placeholders")
