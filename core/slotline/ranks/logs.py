"""Logs of ranks: rank 0 says what all ranks say, and the lines of the others begin with the rank."""

from __future__ import annotations

import logging
import warnings


def log_as(name: str) -> None:
    """Prefix what this process logs with its name, and leave to the process that began it what all say."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Prefixed(f"[{name}] "))
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
