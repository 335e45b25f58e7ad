"""Sampled tokens that the host does not know yet, on the device where the next step needs them.

Under asynchronous scheduling a step is prepared while the previous step still runs. Its input tokens are then
stand-ins, numbers from `vocab_size` on, and a table on the device turns every id into a token: an ordinary one into
itself, a stand-in into the token that the row sampled last, or into one of the tokens to verify after it. One lookup,
the same in every step, so that graphs can hold it.

If steps verify tokens, the host does not know either how many tokens the row got. It counts the possible ones, and the
device keeps the number of those that are missing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.device.torch_ops import TorchOps
from slotline.registry.contracts import DeviceOps

Int = npt.NDArray[np.int64]


class PlaceholderTokens:
    """Table from ids and placeholder ids to tokens.

    Attributes:
        ops: operations of the device that the table lies on.
        tokens: [vocab_size + max_requests * (1 + max_spec_tokens)] int64 on the device, the token that each id means.
        max_spec_tokens: most tokens of a row that a step verifies, 0 if it verifies none.
        rejected: [max_requests + 1] int64 on the device, tokens that each row's last step rejected. The last entry is
            0, for rows whose tokens are known.
    """

    def __init__(
        self, vocab_size: int, max_requests: int, device: str, max_spec_tokens: int = 0, ops: DeviceOps | None = None
    ) -> None:
        self.ops: DeviceOps = ops or TorchOps()
        self.max_spec_tokens = max_spec_tokens
        self.rejected = torch.zeros(max_requests + 1, dtype=torch.int64, device=device)
        self._vocab_size = vocab_size
        self.tokens = torch.arange(vocab_size + max_requests * (1 + max_spec_tokens), device=device)
        self.tokens[vocab_size:] = 0  # rows that never sampled: a valid token all the same

    def stand_ins(self, rows: Int) -> Int:
        """Return the placeholder ids of the next tokens of `rows` [n]. Token j to verify after one has j + 1 more."""
        return rows * (1 + self.max_spec_tokens) + self._vocab_size

    def resolve(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens [num_tokens] int64 of ids and placeholder ids [num_tokens]."""
        return self.tokens[input_ids]

    def record(self, stand_ins: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep the tokens [n] int64 that the rows of `stand_ins` [n] int64 have just sampled, on any device."""
        self.tokens.scatter_(0, stand_ins, tokens.to(self.tokens.device, non_blocking=True))


def resolved(input_ids: torch.Tensor, last_tokens: PlaceholderTokens | None) -> torch.Tensor:
    """Return a step's tokens [num_padded_tokens] int64, those of a step in flight included if there can be any."""
    return input_ids if last_tokens is None else last_tokens.resolve(input_ids)
