"""Drafts of tokens that grammars force, and of those that they leave of a drafter's proposals."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slotline.core.batch.request_table import RequestTable
from slotline.registry.contracts import GrammarState

Int = npt.NDArray[np.int64]
logger = logging.getLogger("slotline")


class DraftTable(Protocol):
    """Drafts of all rows, as the extension `drafts` keeps them.

    Attributes:
        rows: the request table.
        entry: [max_requests] int64, of the row in the last proposal, -1 if no distribution of its drafts is known.
    """

    rows: RequestTable
    entry: Int

    def write(self, rows: Int, token_ids: Int, counts: Int, *, forced: bool = False) -> None:
        """Put drafts after the known tokens of `rows`: the first `counts` [n] of `token_ids` [n, k]."""
        ...

    def keep_chains(self, rows: Int) -> Int:
        """Cut the drafts of `rows` [n] to the first that form a chain. Return how many each may have from now on."""
        ...


def drafts_of(table: RequestTable, row: int) -> list[int]:
    """Return the drafts of a row."""
    known = int(table.num_tokens[row])
    drafts: list[int] = table.token_ids[row, known : known + table.num_spec_tokens[row]].tolist()
    return drafts


def force_drafts(drafts: DraftTable, states: Mapping[int, GrammarState], rows: Int, most: int, name: str) -> None:
    """Draft the tokens that the grammars of rows [n] force, up to `most` for each row.

    If a grammar forces nothing, cut the row's existing drafts from the first banned one on, which cannot be accepted.

    Of a tree the first nodes remain that form a chain: a grammar's states follow one path.

    None of these drafts is verified by rejection sampling. The cut depends on the drawn drafts, so the remaining drafts
    do not follow the distribution that the drafter names, and the text would lean towards them.

    Args:
        drafts: of all rows.
        states: by row, of rows with a grammar.
        name: of the plugin, for the log.
    """
    bound = [row for row in rows.tolist() if row in states]
    table, drafts.entry[bound] = drafts.rows, -1
    chains = drafts.keep_chains(np.array(bound, np.int64))
    for row, chain in zip(bound, chains.tolist(), strict=True):
        longest = min(int(table.length_limit[row] - table.num_tokens[row]) - 1, most, chain)
        if longest <= 0:
            continue
        table.num_spec_tokens[row] = min(int(table.num_spec_tokens[row]), longest)
        try:
            _force(drafts, states[row], row, longest)
        except Exception:  # a plugin's code may raise anything, and a mask that fails ends the request
            logger.exception("structured-output plugin %r failed on drafts", name)
            table.num_spec_tokens[row] = 0


def _force(drafts: DraftTable, state: GrammarState, row: int, longest: int) -> None:
    table, forced = drafts.rows, list(state.forced())[:longest]
    if forced:
        count = state.count_legal(forced)
        drafts.write(np.array([row]), np.array([forced]), np.array([count]), forced=True)
    elif table.num_spec_tokens[row]:
        table.num_spec_tokens[row] = state.count_legal(drafts_of(table, row))
