"""Role of a process that torchrun started with a command of ours: rank 0 runs the command, the others follow it."""

from __future__ import annotations

import os
from collections.abc import Mapping

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun tells each process."""
_left: list[bool] = []


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun started this process."""
    return all(name in environment for name in LAUNCHED)


def leave_to_rank_0() -> None:
    """Have engines of this process follow rank 0 from now on, if this is another rank."""
    _left[:] = [True]


def is_left_to_rank_0() -> bool:
    """Return whether rank 0 alone runs the command of these processes."""
    return bool(_left)


def follows_rank_0() -> bool:
    """Return whether this process is to follow rank 0 in place of its command."""
    return is_left_to_rank_0() and os.environ["RANK"] != "0"
