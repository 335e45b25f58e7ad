"""Commands that torchrun started in several processes: rank 0 runs and prints, the others follow it in silence."""

from __future__ import annotations

import os
import signal
import sys
import time

from slotline.ranks.roles import follows_rank_0, is_launched, leave_to_rank_0

_PATIENCE = 10.0
"""Seconds in which torchrun ends a rank after an error that rank 0 has shown."""


def take_role() -> None:
    """Leave the command to rank 0 if torchrun started it, and print nothing on other ranks."""
    if not is_launched() or os.environ["WORLD_SIZE"] == "1":
        return
    leave_to_rank_0()
    if follows_rank_0():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def said_by_rank_0(error: BaseException) -> str:
    """Return the text of an error to print: after a while, and with the rank, if this is not rank 0."""
    if not follows_rank_0():
        return f"error: {error}"
    time.sleep(_PATIENCE)
    return f"[rank {os.environ['RANK']}] error: {error}"
