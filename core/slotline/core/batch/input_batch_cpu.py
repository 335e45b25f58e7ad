"""A step's inputs while they are numbers of the host's, without and with padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import define, field

from slotline.core.batch.graph_dispatcher import GraphShape

Int = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
PAD_SLOT = -1


@define(kw_only=True, eq=False)
class InputBatchCPU:
    """CPU-side model inputs of one step. `pad` makes them as large as a captured shape.

    Attributes:
        rows: [num_requests] int64, permanent rows in batch order. `counts` [num_requests] int64 are the tokens of each.
        table_rows: [num_requests] int64, the rows whose block tables are read, padded to the shape's requests. `starts`
            [num_requests + 1] int64, the first token of each, and `seq_lens` [num_requests] int64 are padded too.
        state_slots: [num_requests] int64, the slot of each request's state in state layers.
        encoder_lens: [num_requests] int64, tokens of the encoder's output of each.
        input_ids, positions: [num_tokens] int64, padded to the shape's tokens, as are `slots` [num_tokens] int64 by
            cache group and `lora_slots` [num_tokens] int64, None for a step without adapters.
        single_slot: as in `ModelInputs`.
        logits_indices, logits_rows, draft_nodes: [num_logits] int64, as in `ModelInputs`.
        num_nodes: [num_requests] int64, nodes of a tree of drafts that each computes. None for no tree.
        num_decodes: leading requests with one token.
        prefixes: tokens of the common prefixes to serve apart, by cache group, empty for none.
        cuts_wanted: whether the model may leave out tokens that are not wanted at its end.
        pending: as in `ModelInputs`.
        num_tokens: without padding. `batch_tokens` are the tokens that attention sees, with those of padded requests.
        max_query_len, max_seq_len: of a request.
        starts32, seq_lens32: `starts` and `seq_lens` as kernels read them, padded, int32.
    """

    rows: Int
    table_rows: Int
    state_slots: Int
    counts: Int
    starts: Int
    seq_lens: Int
    encoder_lens: Int
    input_ids: Int
    positions: Int
    slots: list[Int]
    logits_indices: Int
    logits_rows: Int
    draft_nodes: Int | None
    num_nodes: Int | None
    num_decodes: int
    prefixes: Sequence[int]
    lora_slots: Int | None
    single_slot: int | None
    cuts_wanted: bool = False
    pending: npt.NDArray[np.bool_] | None = None
    num_tokens: int = field(init=False)
    batch_tokens: int = field(init=False)
    max_query_len: int = field(init=False)
    max_seq_len: int = field(init=False)
    starts32: Int32 = field(init=False)
    seq_lens32: Int32 = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.num_tokens = self.batch_tokens = len(self.input_ids)
        self.max_query_len = int(self.counts.max(initial=0))
        self.max_seq_len = int(self.seq_lens.max(initial=0))
        self._narrow()

    def pad(self, shape: GraphShape, null_row: int) -> None:
        """Make this as large as a captured shape.

        A padded request has as many query tokens as the others, or none in a mixed batch. It has a sequence length of
        0, the block table of `null_row`, and slots -1.
        """
        if (padding := shape.num_tokens - self.num_tokens) > 0:
            self.input_ids, self.positions = np.pad(self.input_ids, (0, padding)), np.pad(self.positions, (0, padding))
            self.slots = [np.pad(slots, (0, padding), constant_values=PAD_SLOT) for slots in self.slots]
            if self.lora_slots is not None:
                self.lora_slots = np.pad(self.lora_slots, (0, padding), constant_values=PAD_SLOT)
        if (missing := shape.padded_requests - len(self.rows)) > 0:
            more = np.arange(1, missing + 1) * shape.query_len
            self.starts = np.concatenate([self.starts, self.starts[-1] + more])
            self.seq_lens = np.pad(self.seq_lens, (0, missing))
            self.table_rows = np.pad(self.table_rows, (0, missing), constant_values=null_row)
            if shape.query_len:
                self.batch_tokens = shape.num_tokens
                self.num_decodes = len(self.seq_lens) if self.max_query_len == 1 else 0
            self._narrow()

    def _narrow(self) -> None:
        self.starts32, self.seq_lens32 = self.starts.astype(np.int32), self.seq_lens.astype(np.int32)
