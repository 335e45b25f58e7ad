"""Sampled tokens that the host does not know yet, on the device where the next step needs them.

Under asynchronous scheduling a step is prepared while the one before still runs. Its input tokens are then stand-ins,
numbers from `vocab_size` on, and a table on the device turns every id into a token: an ordinary one into itself, a
stand-in into the token that the row sampled last, or into one of the drafts behind it. One lookup, the same in every
step, so that graphs can hold it.

Beside drafts the host does not know either how many tokens the row got. It counts all that are possible, and the device
keeps how many of these are missing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slotline.core.device.torch_ops import TorchOps
from slotline.registry.contracts import DeviceOps

Int = npt.NDArray[np.int64]


class PlaceholderTokens:
    """The table.

    Attributes:
        ops: operations of the device that the table lies on.
        tokens: [vocab_size + max_requests * (1 + max_drafts)] int64 on the device, the token that each id means.
        max_drafts: most drafts of a row; 0 where nothing is drafted.
        fallen: [max_requests + 1] int64 on the device, drafts of each row's last step that did not stand; 0 behind the
            last row, for rows whose tokens are known.
    """

    def __init__(
        self, vocab_size: int, max_requests: int, device: str, max_drafts: int = 0, ops: DeviceOps | None = None
    ) -> None:
        self.ops: DeviceOps = ops or TorchOps()
        self.max_drafts = max_drafts
        self.fallen = torch.zeros(max_requests + 1, dtype=torch.int64, device=device)
        self._vocab_size = vocab_size
        self.tokens = torch.arange(vocab_size + max_requests * (1 + max_drafts), device=device)
        self.tokens[vocab_size:] = 0  # rows that never sampled: a valid token all the same

    def stand_ins(self, rows: Int) -> Int:
        """What stands for the next tokens of `rows` [n] until they are known; that of draft j is j + 1 more."""
        return rows * (1 + self.max_drafts) + self._vocab_size

    def resolve(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The tokens [num_tokens] int64 that ids and stand-ins [num_tokens] mean."""
        return self.tokens[input_ids]

    def record(self, stand_ins: torch.Tensor, tokens: torch.Tensor) -> None:
        """Keep the tokens [n] int64 that the rows of `stand_ins` [n] int64 have just sampled, on whatever device."""
        self.tokens.scatter_(0, stand_ins, tokens.to(self.tokens.device, non_blocking=True))

    def record_drafts(self, stand_ins: torch.Tensor, drafts: torch.Tensor) -> None:
        """Keep the drafts [n, max_drafts] int64 behind the tokens of `stand_ins` [n] int64."""
        places = torch.arange(1, 1 + self.max_drafts, device=stand_ins.device)
        self.tokens[stand_ins[:, None] + places] = drafts
