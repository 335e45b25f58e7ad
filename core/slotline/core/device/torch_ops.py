"""Operations of a step in torch, for any device. They define what every other implementation gives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slotline.kernels.torch_drafts import TorchDraftOps
from slotline.kernels.torch_sampling import draw_torch
from slotline.registry.contracts.device import DecodeBatch, Drawn, SampledRows, TokenSampler, TransferBuffer


class TorchOps(TorchDraftOps):
    """Operations in torch. Implements `DeviceOps`, which describes each. Those of drafts are inherited."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the first of the largest entries of each row."""
        return logits.argmax(-1)

    def argmax_checked(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the same, and which rows hold NaN: the largest entry is NaN then."""
        tokens = self.argmax(logits)
        return tokens, logits.gather(1, tokens[:, None]).squeeze(1).isnan()

    def sample(
        self, logits: torch.Tensor, rows: SampledRows, params: torch.Tensor, *, keep_final: bool = False
    ) -> Drawn:
        """Draw by a cumulative sum over the vocabulary."""
        return draw_torch(logits, rows, params, keep_final=keep_final)

    def apply_bitmask(
        self, logits: torch.Tensor, words: torch.Tensor, rows: torch.Tensor, *, in_place: bool = False
    ) -> torch.Tensor:
        """Unpack the bits."""
        result = logits if in_place and logits.is_contiguous() else logits.clone()
        result[rows] = logits[rows].masked_fill_(unpacked(words, logits.shape[1]), -torch.inf)
        return result

    def mark_unusable(
        self,
        logits: torch.Tensor,
        raw: torch.Tensor,
        touched: torch.Tensor | None,
        tokens: torch.Tensor,
        *,
        not_finite: int,
        none_left: int,
        all_greedy: bool,
    ) -> torch.Tensor:
        """Look at the largest logit of each row."""
        if all_greedy:
            best, place = logits.gather(1, tokens[:, None]).squeeze(1), tokens
        else:
            best, place = logits.max(dim=-1)  # of NaN, if there is one
        made_here = ~best.isfinite() & raw.gather(1, place[:, None]).squeeze(1).isfinite()
        marked = tokens.masked_fill(made_here, not_finite).masked_fill(best == -torch.inf, none_left)
        return marked if touched is None else torch.where(touched, marked, tokens)

    def token_sampler(
        self, table: torch.Tensor, buffer: TransferBuffer, max_rows: int, vocab_size: int
    ) -> TokenSampler | None:
        """Return None: the general way is as fast."""
        return None

    def put_rows(self, table: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Copy by index."""
        table.index_copy_(0, rows, values)

    def gather_rows(self, table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Select by index."""
        torch.index_select(table, 0, rows, out=out[: len(rows)])

    def advance_decode_batch(self, batch: DecodeBatch) -> Callable[[int, int], None] | None:
        """Return None: steps are prepared on the host."""
        return None


def unpacked(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return what bitmasks [num_rows, ceil(vocab_size / 32)] int32 ban, [num_rows, vocab_size] bool."""
    eights = words.contiguous().view(torch.uint8)[:, :, None]
    bit = torch.bitwise_left_shift(1, torch.arange(8, dtype=torch.uint8, device=words.device))
    return ((eights & bit) == 0).flatten(1)[:, :vocab_size]
