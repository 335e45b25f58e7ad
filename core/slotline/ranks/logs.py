"""Logs of ranks: rank 0 says what all ranks say, and the lines of the others begin with the rank."""

from __future__ import annotations

import logging
import warnings


def log_as(rank: int) -> None:
    """Prefix what this process logs with its rank, and leave to rank 0 what all ranks say."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Prefixed(f"[rank {rank}] "))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("slotline").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


class _Prefixed(logging.Formatter):
    """Formatter that begins each line with a prefix."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        return "\n".join(self._prefix + line for line in super().format(record).splitlines())
