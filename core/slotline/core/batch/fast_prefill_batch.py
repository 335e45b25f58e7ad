"""A step's batch cut down to the tokens whose logits are wanted, for layers that store nothing and the last queries.

Example: requests with 1, 5 and 3 scheduled tokens, of which the second is in the middle of its prompt, want the tokens
at 0 and 8: query_start_loc becomes [0, 1, 1, 2]. Keys stay those of the whole step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, frozen

from slotline.registry.contracts import AttentionBatch

Int = npt.NDArray[np.int64]


@frozen(kw_only=True, eq=False)
class FastPrefillBatch:
    """Wanted tokens of each request, always its last ones.

    Attributes:
        num_tokens: of all requests.
        index: [num_tokens] int64 on the device, their places in the step.
        query_start_loc: [num_requests + 1] int32 on the device, with `query_start_loc_cpu` on the host.
        max_query_len: most of one request.
        num_decodes: requests at the front with one token each.
    """

    num_tokens: int
    index: torch.Tensor
    query_start_loc: torch.Tensor
    query_start_loc_cpu: npt.NDArray[np.int32]
    max_query_len: int
    num_decodes: int

    @classmethod
    def of(
        cls, starts: Int, indices: Int, index: torch.Tensor, upload: Callable[[npt.NDArray[np.int32]], torch.Tensor]
    ) -> FastPrefillBatch:
        """Build the batch of the tokens `indices` of a step whose requests' tokens begin at `starts`.

        `index` are the same indices on the device.
        """
        own = np.searchsorted(indices, starts).astype(np.int32)  # [num_requests + 1]
        lens = np.diff(own)
        others = np.flatnonzero(lens != 1)
        return cls(
            num_tokens=len(indices),
            index=index,
            query_start_loc=upload(own),
            query_start_loc_cpu=own,
            max_query_len=int(lens.max(initial=0)),
            num_decodes=int(others[0]) if len(others) else len(lens),
        )

    def batch(self, batch: AttentionBatch) -> AttentionBatch:
        """Return a batch of the step with these tokens as its query tokens, on the device of `index`."""
        return evolve(
            batch,
            num_tokens=self.num_tokens,
            max_query_len=self.max_query_len,
            query_start_loc=self.query_start_loc,
            query_start_loc_cpu=self.query_start_loc_cpu,
            slot_mapping=batch.slot_mapping[self.index],
            positions=batch.positions[self.index],
            num_decodes=self.num_decodes,
            common_prefix_len=0,
            common_prefix=None,
            prefix_groups=None,
        )
