"""Sampled tokens that the host does not know yet, on the device where the next step needs them.

Under asynchronous scheduling a step is prepared while the one before still runs. Its input tokens are then stand-ins,
`vocab_size + row`, and a table on the device turns every id into a token: an ordinary one into itself, a stand-in
into the token that the row sampled last. One lookup, the same in every step, so that graphs can hold it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Int = npt.NDArray[np.int64]


class LastTokens:
    """The table: [vocab_size + max_requests] int64 on the device."""

    def __init__(self, vocab_size: int, max_requests: int, device: str) -> None:
        self._vocab_size = vocab_size
        self._table = torch.arange(vocab_size + max_requests, device=device)
        self._table[vocab_size:] = 0  # rows that never sampled: a valid token all the same

    def stand_ins(self, rows: Int) -> Int:
        """What stands for the next tokens of `rows` [n] until they are known."""
        return rows + self._vocab_size

    def resolve(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The tokens [num_tokens] int64 that ids and stand-ins [num_tokens] mean."""
        return self._table[input_ids]

    def record(self, stand_ins: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep the tokens [n] int64 that the rows of `stand_ins` [n] int64 have just sampled, on whatever device."""
        self._table[stand_ins] = tokens.to(self._table.device, non_blocking=True)
