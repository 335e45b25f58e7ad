"""The draws of steps that ask for tokens and nothing else, in Triton, with as little work on the host as can be.

All that such a step gives is its tokens, and the kernel that draws them writes them where they are wanted: into the
table that the next step reads, and into the host's memory, where a copy of its own would hold the device up. Behind a
captured forward pass logits and parameters lie where those of the steps before lay, so launches are looked up once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen

from slotline.core.batch.placeholder_tokens import PlaceholderTokens
from slotline.core.device.transfer_buffer import Download, TransferBuffer
from slotline.core.sampling import triton_argmax as triton_likeliest
from slotline.core.sampling import triton_sampling
from slotline.core.sampling.triton_logits_ops import Kept
from slotline.kernels.triton_launcher import MOST, Launch
from slotline.registry.errors import IntegrityError


@frozen(eq=False)
class _Prepared:
    """Launches for logits at one place; `tokens` [n] int64 is where they leave what they draw, and `host` [n]."""

    launches: tuple[Callable[[], None], ...]
    tokens: torch.Tensor
    host: torch.Tensor


class FastSampler:
    """Draws tokens, keeps them for the next step, and starts them on their way to the host.

    The tokens of one call must have arrived before the next one: there is one place for them.

    Args:
        last_tokens: on the device where the logits are; without drafts.
        staging: of that device, a torch device string.
        most: rows of a step.
    """

    def __init__(
        self, last_tokens: PlaceholderTokens, staging: TransferBuffer, most: int, vocab_size: int, device: str
    ) -> None:
        self._table, self._staging, self._vocab_size = last_tokens.tokens, staging, vocab_size
        self._scratch = triton_sampling.Scratch.of(most, vocab_size, device)
        self._parts = torch.empty(most * 2 * triton_likeliest.PARTS, dtype=torch.float32, device=device)
        self._host = staging.landing(most, torch.int64)
        self._prepared: dict[tuple[int, ...], _Prepared] = {}

    def __call__(
        self, logits: torch.Tensor, params: torch.Tensor | None, stand_ins: torch.Tensor, *, captured: bool
    ) -> tuple[torch.Tensor, Download]:
        """Tokens [n] int64 drawn from the first n logits, overwritten by the next call, and their arrival.

        Args:
            logits: [n or more, vocab_size] float32.
            params: `SamplingMetadata.packed` of the rows on the device, [n, 8] int32; None where all are greedy.
            stand_ins: [n] int64, see `PlaceholderTokens`.
            captured: whether the logits lie in a graph's memory, and are to be found at this place again.

        Raises:
            IntegrityError: if there are more rows than there is room for.
        """
        n = len(stand_ins)
        # Graphs share memory: the logits of another shape, of other rows' length, may begin at the same place.
        places = logits.data_ptr(), 0 if params is None else params.data_ptr(), stand_ins.data_ptr()
        key = (n, *places, *logits.stride())
        prepared = self._prepared.get(key) if captured else None
        if prepared is not None:
            for launch in prepared.launches:
                launch()
            return prepared.tokens, self._staging.arriving(prepared.host)
        launches = self._launches(logits[:n], params, stand_ins)
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
        self, logits: torch.Tensor, params: torch.Tensor | None, stand_ins: torch.Tensor
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
        return triton_sampling.launches(logits, params, self._scratch, kept)
