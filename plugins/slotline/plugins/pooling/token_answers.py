"""Answers with a vector for each token of a prompt, collected over the prompt's chunks in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from slotline.core.batch.model_inputs import ModelInputs
from slotline.core.batch.request import Request
from slotline.core.batch.request_table import RequestTable
from slotline.registry.contracts.pooling import TOKEN_TASKS

_KEPT = "pooled_tokens"
"""Key of a request's answer so far in `Request.inputs`."""


@frozen(kw_only=True, eq=False)
class Chunk:
    """Tokens of one request in a step.

    Attributes:
        row: the request's row.
        start: place of the first one in the step.
        first: position of the first one in the prompt.
        count: number of tokens.
    """

    request: Request
    row: int
    start: int
    first: int
    count: int

    @property
    def last(self) -> bool:
        """True if the prompt ends with the chunk."""
        return self.first + self.count >= len(self.request.prompt_token_ids)


def chunks_of(inputs: ModelInputs, rows: RequestTable) -> list[Chunk]:
    """Return the chunks of a step whose requests want a vector for each token, in the step's order."""
    found = []
    for index, row in enumerate(inputs.rows.tolist()):
        request = rows.requests[row]
        if request is not None and asks_for_tokens(request):
            count = int(inputs.num_scheduled[index])
            first = int(inputs.seq_lens_cpu[index]) - count
            start = int(inputs.query_start_loc_cpu[index])
            found.append(Chunk(request=request, row=row, start=start, first=first, count=count))
    return found


def asks_for_tokens(request: Request) -> bool:
    """Return True if a pooling request wants a vector for each token."""
    return request.task_params is not None and request.task_params.task in TOKEN_TASKS


def places_of(chunks: Sequence[Chunk]) -> npt.NDArray[np.int64]:
    """Return the places [n] of the chunks' tokens in their step."""
    return np.concatenate([np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks])


def collect(chunks: Sequence[Chunk], vectors: npt.NDArray[np.float32]) -> dict[int, npt.NDArray[np.float32]]:
    """Keep the vectors [n, size] of a step's chunks, and return the complete answers [num_tokens, size] by row.

    A chunk is written to its place, so that one that is computed again after preemption changes nothing.
    """
    complete = {}
    taken = 0
    for chunk in chunks:
        part, taken = vectors[taken : taken + chunk.count], taken + chunk.count
        shape = (len(chunk.request.prompt_token_ids), vectors.shape[1])
        kept = chunk.request.inputs.setdefault(_KEPT, np.empty(shape, np.float32))
        kept[chunk.first : chunk.first + chunk.count] = part
        if chunk.last:
            complete[chunk.row] = chunk.request.inputs.pop(_KEPT)
    return complete
