"""Checks of the answers of a device's operations, before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from slotline.builder.sampling_profile import made_up_batch
from slotline.core.device.torch_device import compiler_of
from slotline.planner.plan import Planned
from slotline.registry.contracts import Device
from slotline.registry.descriptor import Kind

_VOCAB_SIZE = 33


def check_operations(planned: Planned) -> None:
    """Call the operations of the device that samples on two rows of logits.

    A device that compiles its kernels is asked only under `observability.check_integrity`, since each start would wait
    for kernels of these shapes.

    Raises:
        ContractError: if an answer has a wrong shape or dtype. It names the plugin and its package.
    """
    device = planned.hardware[planned.device]
    descriptor = planned.registry.load(Kind.DEVICE, device.name.partition(":")[0], required=True)
    if compiler_of(device) is not None and not planned.loaded.config.observability.check_integrity:
        return
    for name, found, expected in _answers(device):
        if not _fits(found, expected):
            wrong = f"{name}() returns {_forms(found)}, expected {_forms(expected)}"
            planned.registry.fit(descriptor, "an operation", [wrong])


def _answers(device: Device) -> Iterator[tuple[str, Any, tuple[torch.Tensor, ...]]]:
    """Yield each operation, what it returns, and tensors of the shapes and dtypes that this should have."""
    ops, where = device.ops, device.torch_device
    logits = torch.zeros(2, _VOCAB_SIZE, device=where)
    tokens = torch.zeros(2, dtype=torch.int64, device=where)
    flags = torch.zeros(2, dtype=torch.bool, device=where)
    rows = torch.arange(2, dtype=torch.int32, device=where)
    words = torch.full((2, 2), -1, dtype=torch.int32, device=where)
    batch = made_up_batch(2, _VOCAB_SIZE)
    params = torch.from_numpy(batch.packed()).to(where)
    yield "argmax", (ops.argmax(logits),), (tokens,)
    yield "argmax_checked", ops.argmax_checked(logits), (tokens, flags)
    yield "sample", ops.sample(logits, batch, params, keep_final=True), (tokens, logits, flags)
    yield "apply_bitmask", (ops.apply_bitmask(logits, words, rows),), (logits,)
    marked = ops.mark_unusable(logits, logits, flags, tokens, not_finite=-2, none_left=-3, all_greedy=False)
    yield "mark_unusable", (marked,), (tokens,)


def _fits(found: Any, expected: tuple[torch.Tensor, ...]) -> bool:
    """Return whether an answer has the expected form. None may stand for a flag of each row."""
    if not isinstance(found, tuple) or len(found) != len(expected):
        return False
    pairs = zip(found, expected, strict=True)
    return all(_form(part) == _form(one) or (part is None and one.dtype == torch.bool) for part, one in pairs)


def _forms(values: Any) -> str:
    return " and ".join(map(_form, values)) if isinstance(values, tuple) else _form(values)


def _form(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device.type}"
