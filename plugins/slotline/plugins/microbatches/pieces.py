"""Microbatches: a step's forward pass in pieces, one after the other.

Over pipeline stages the second piece runs on the first stage while the first piece is on the second.

Example: a step of 10 tokens in two pieces, of requests with 3, 5 and 2: tokens 0 .. 4 are the first request and two
tokens of the second, whose sequence then ends three tokens early. Tokens 5 .. 9 are its other three and the third
request. The second piece finds the first one's keys in the cache, as a chunk of a prompt finds those of the chunk
before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from slotline.registry.contracts import AttentionBatch


@frozen
class Microbatches:
    """Rule for the steps that are cut, and for their pieces.

    Attributes:
        most: pieces of a step, 1 for uncut steps.
        min_tokens: fewest tokens of a piece.
    """

    most: int = 1
    min_tokens: int = 1

    def pieces(self, num_tokens: int, num_padded_tokens: int) -> tuple[slice, ...]:
        """Return token slices of a step, as even as possible, or nothing for an uncut step.

        The last slice is extended to the padded total.
        """
        count = self.count(num_tokens)
        return () if count < 2 else even_pieces(count, num_tokens, num_padded_tokens)

    def count(self, num_tokens: int) -> int:
        """Return the number of pieces of a step, 1 for an uncut one."""
        return max(1, min(self.most, num_tokens // self.min_tokens))


def even_pieces(count: int, num_tokens: int, num_padded_tokens: int) -> tuple[slice, ...]:
    """Return so many token slices of a step, as even as possible. The last is extended to the padded total."""
    ends = [num_tokens * number // count for number in range(1, count)]
    return tuple(slice(*pair) for pair in zip((0, *ends), (*ends, num_padded_tokens), strict=True))


def cut(batch: AttentionBatch, piece: slice) -> AttentionBatch:
    """Return the attention batch of a step's tokens `piece`: their requests, each up to its last token in the piece.

    Only layers of type ``decoder`` can be cut like this, and no trees. A common prefix is given up.
    """
    starts = batch.query_start_loc_cpu[: batch.num_requests + 1]
    end = min(piece.stop, int(starts[-1]))  # the rest is padding
    first = int(np.searchsorted(starts, piece.start, "right")) - 1
    last = max(int(np.searchsorted(starts, end, "left")), first + 1)
    own_starts = np.clip(starts[first : last + 1], piece.start, end) - piece.start
    behind = np.maximum(starts[first + 1 : last + 1] - end, 0)  # tokens that come in a later piece
    seq_lens = batch.seq_lens_cpu[first:last] - behind
    counts = np.diff(own_starts)
    on_device = batch.query_start_loc[first : last + 1]
    return evolve(
        batch,
        num_requests=last - first,
        num_tokens=end - piece.start,
        max_query_len=int(counts.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
        query_start_loc=on_device.clamp(piece.start, end) - piece.start,
        seq_lens=batch.seq_lens[first:last] - (on_device[1:] - end).clamp(min=0),
        block_table=batch.block_table[first:last],
        slot_mapping=batch.slot_mapping[piece],
        positions=batch.positions[piece],
        query_start_loc_cpu=own_starts,
        seq_lens_cpu=seq_lens,
        num_decodes=int(np.append(counts != 1, True).argmax()),
        common_prefix_len=0,
        common_prefix=None,
        prefix_groups=None,
    )


def places_in(places: npt.NDArray[np.int64], piece: slice) -> slice:
    """Return the slice of the ascending token `places` [n] that lie in a piece."""
    first, end = np.searchsorted(places, (piece.start, piece.stop)).tolist()
    return slice(first, end)
