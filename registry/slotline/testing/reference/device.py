"""Devices in the host's memory under names of their own: torch's operations, and some of its own with graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slotline.core.device import TorchDevice, TorchOps
from slotline.registry.capability import Flag
from slotline.registry.contracts.device import (
    DecodeBatch,
    DeviceCapabilities,
    DeviceContext,
    Download,
    Drawn,
    TokenSampler,
    TransferBuffer,
)
from slotline.registry.descriptor import Descriptor, Kind
from slotline.testing.oracles.device import uniform
from slotline.testing.reference.device_graphs import RecordedSession, is_recording

COUNT = 2
"""Devices that the machine has."""


class HostDevice(TorchDevice):
    """Device of torch, whose uploads are copied to addresses that stay.

    Args:
        context: names the device.
    """

    make_ops: Callable[[], TorchOps] = TorchOps
    session: type[RecordedSession] = RecordedSession

    def __init__(self, context: DeviceContext) -> None:
        super().__init__(f"{context.name}:{context.index or 0}", "cpu", type(self).make_ops())

    def is_capturing(self) -> bool:
        return is_recording()

    def graph_capture(self) -> RecordedSession:
        return self.session()


class Factory:
    """Factory of both devices.

    Args:
        device: class of the devices.
    """

    def __init__(self, device: Callable[[DeviceContext], Any] = HostDevice) -> None:
        self.device = device

    def count(self) -> int:
        return COUNT

    def __call__(self, context: DeviceContext) -> Any:
        return self.device(context)


class OwnOps(TorchOps):
    """Operations that torch leaves to the host or to the general way: repeated steps, and steps that want tokens."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the first place of the largest value, by comparison."""
        values = logits.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        found = torch.where(values == values.amax(-1, keepdim=True), torch.arange(logits.shape[1]), logits.shape[1])
        return found.amin(-1)

    def sample(self, logits: torch.Tensor, rows: Any, params: torch.Tensor, *, keep_final: bool = False) -> Drawn:
        """Draw one row at a time."""
        drawn = super().sample(logits, rows, params, keep_final=True)
        assert drawn.final is not None
        tokens = drawn.tokens.clone()
        for row, final in enumerate(drawn.final):
            if rows.temperature[row] and not logits[row].isnan().any():
                ends = final.double().softmax(-1).cumsum(-1)
                number = uniform(int(rows.seed[row]), int(rows.positions[row]))
                tokens[row] = int((ends <= number * ends[-1]).sum().clamp(max=len(ends) - 1))
        return Drawn(tokens, drawn.final if keep_final else None, logits.isnan().any(-1))

    def token_sampler(
        self, table: torch.Tensor, buffer: TransferBuffer, max_rows: int, vocab_size: int
    ) -> TokenSampler | None:
        return TableSampler(table, buffer, max_rows)

    def advance_decode_batch(self, batch: DecodeBatch) -> Callable[[int, int], None] | None:
        return Advance(batch)


class TableSampler:
    """Sampler that has one place for the tokens of a step. Of drawn rows it knows the packed parameters alone."""

    def __init__(self, table: torch.Tensor, buffer: TransferBuffer, max_rows: int) -> None:
        self.table, self.buffer = table, buffer
        self.tokens = torch.zeros(max_rows, dtype=torch.int64)
        self.landing = buffer.landing(max_rows, torch.int64)

    def __call__(
        self, logits: torch.Tensor, params: torch.Tensor | None, stand_ins: torch.Tensor, *, captured: bool
    ) -> tuple[torch.Tensor, Download]:
        n = len(stand_ins)
        tokens, landed = self.tokens[:n], self.landing[:n]
        tokens.copy_(self.draw(logits[:n], params))
        self.table[stand_ins] = tokens
        landed.copy_(tokens)
        return tokens, self.buffer.arriving(landed)

    def draw(self, logits: torch.Tensor, params: torch.Tensor | None) -> torch.Tensor:
        """Return tokens of rows without limits."""
        if params is None:
            return logits.argmax(-1)
        from slotline.kernels.packed_parameters import PackedParameters

        columns = PackedParameters(params)
        ends = (logits / columns.temperature[:, None]).double().softmax(-1).cumsum(-1)
        return torch.searchsorted(ends, columns.uniform[:, None] * ends[:, -1:], right=True).squeeze(-1)


class Advance:
    """Repeated step in torch."""

    def __init__(self, batch: DecodeBatch) -> None:
        self.batch = batch

    def __call__(self, at: int, width: int) -> None:
        batch, n = self.batch, len(self.batch.rows)
        if width:
            changes = batch.changes[at : at + n].tolist()
            tables = batch.changes[at + n : at + n + width * (1 + max(changes))].view(-1, width)
            for request, change in enumerate(changes):
                if change >= 0:
                    batch.table[batch.rows[request], :width] = tables[change]
                    batch.taken[request, :width] = tables[change]
        if batch.first:
            batch.positions[:n] += 1
            batch.seq_lens[:n] += 1
            if batch.drawn:
                batch.counters[:n, 3] += batch.stride - 2**64
        positions = batch.positions[:n]
        blocks = batch.taken[:n].gather(1, positions[:, None] // batch.block_size).squeeze(1).long()
        batch.slots[:n] = blocks * batch.block_size + positions % batch.block_size


class OwnDevice(HostDevice):
    """The same device with operations of its own."""

    make_ops = OwnOps


descriptor = Descriptor(
    kind=Kind.DEVICE,
    name="host_torch",
    capabilities=DeviceCapabilities(compatible_with=("cpu",), priority=-1),
    factory=Factory(),
    summary="torch's operations in the host's memory",
)

recorded = Descriptor(
    kind=Kind.DEVICE,
    name="host_recorded",
    capabilities=DeviceCapabilities(graphs=Flag(True, "recorded operations"), compatible_with=("cpu",), priority=-1),
    factory=Factory(OwnDevice),
    summary="operations of its own, and recorded graphs",
)
