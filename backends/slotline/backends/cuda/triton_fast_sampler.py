"""Sampling of steps that need only tokens, in Triton, with as little work on the host as possible.

The only result of these steps are tokens, and the kernel that draws them writes them to where they are needed: into the
table that the next step reads, and into the host's memory, since a separate copy would hold up the device. After a
captured forward pass logits and parameters are at the same addresses as in earlier steps, so launches are looked up
once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen

from slotline.backends.cuda import triton_argmax as triton_likeliest
from slotline.backends.cuda import triton_sampling
from slotline.backends.cuda.triton_logits_ops import Kept
from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.core.device.transfer_buffer import Download, TransferBuffer
from slotline.kernels.triton_launcher import MOST, Launch
from slotline.registry.contracts.device import SampledRows
from slotline.registry.errors import IntegrityError


@frozen(eq=False)
class _Prepared:
    """Launches for logits at one address, which write their draws to `tokens` [n] int64 and `host` [n]."""

    launches: tuple[Callable[[], None], ...]
    tokens: torch.Tensor
    host: torch.Tensor


class FastSampler:
    """Draws tokens, keeps them for the next step, and starts their copy to the host.

    The tokens of one call must have arrived before the next call: both use the same memory.

    Args:
        last_tokens: on the device of the logits, without drafts.
        staging: of that device, a torch device string.
        most: the largest number of rows of a step.
    """

    def __init__(
        self, last_tokens: PlaceholderTokens, staging: TransferBuffer, most: int, vocab_size: int, device: str
    ) -> None:
        self._table, self._staging, self._vocab_size = last_tokens.tokens, staging, vocab_size
        self._scratch = triton_sampling.Scratch.of(most, vocab_size, device)
        self._parts = torch.empty(most * 2 * triton_likeliest.PARTS, dtype=torch.float32, device=device)
        self._host = staging.landing(most, torch.int64)
        self._prepared: dict[tuple[int, ...], _Prepared] = {}
        self._limited = True

    def expect(self, rows: SampledRows) -> None:
        """Note whether a row has limits: two launches less are needed if there are none."""
        self._limited = triton_sampling.are_limited(rows)

    def __call__(
        self, logits: torch.Tensor, params: torch.Tensor | None, stand_ins: torch.Tensor, *, captured: bool
    ) -> tuple[torch.Tensor, Download]:
        """Draw tokens [n] int64 from the first n logits. Return them with their download.

        The next call overwrites them.

        Args:
            logits: [n or more, vocab_size] float32.
            params: `SamplingMetadata.packed` of the rows on the device, [n, 8] int32. None means that all are greedy.
            stand_ins: [n] int64, see `PlaceholderTokens`.
            captured: whether the logits are in a graph's memory, and so at the same address again.

        Raises:
            IntegrityError: if there are more rows than there is room for.
        """
        n = len(stand_ins)
        # Graphs share memory: the logits of another shape, of other rows' length, may begin at the same place.
        places = logits.data_ptr(), 0 if params is None else params.data_ptr(), stand_ins.data_ptr()
        limited, self._limited = self._limited, True
        key = (n, limited, *places, *logits.stride())
        prepared = self._prepared.get(key) if captured else None
        if prepared is not None:
            for launch in prepared.launches:
                launch()
            return prepared.tokens, self._staging.arriving(prepared.host)
        launches = self._launches(logits[:n], params, stand_ins, limited=limited)
        tokens, host = self._scratch.tokens[:n], self._host[:n]
        if captured and logits.stride(1) == 1:
            if len(self._prepared) >= MOST:
                self._prepared.clear()
            self._prepared[key] = _Prepared(tuple(launch.prepared() for launch in launches), tokens, host)
        else:
            for launch in launches:
                launch()
        return tokens, self._staging.arriving(host)

    def _launches(
        self, logits: torch.Tensor, params: torch.Tensor | None, stand_ins: torch.Tensor, *, limited: bool
    ) -> tuple[Launch, ...]:
        n, vocab_size = logits.shape
        if n > len(self._host) or vocab_size != self._vocab_size:
            raise IntegrityError(
                f"logits {n} x {vocab_size} are to be drawn from, and there is room for {len(self._host)} x "
                f"{self._vocab_size}"
            )
        kept = Kept(stand_ins, self._table, self._host)
        if params is None:
            return triton_likeliest.launches(logits, self._parts, self._scratch.tokens, kept)
        return triton_sampling.launches(logits, params, self._scratch, kept, limited=limited)
