"""When a kernel may read states before the kernels in front of it have ended (programmatic dependent launch)."""

from __future__ import annotations

from torch import Tensor


class Order:
    """Which launches of `decode` may read their layer's states, and the batch's slots, ahead of their wait.

    A kernel starts once every program of the one in front has said that it may, which most kernels do first thing; so
    any number of kernels in front may still run, and what they write may not be there before the wait. A launch that
    may not read ahead says so only behind its wait, and then everything in front of it has ended when any kernel
    behind it starts; it itself may not have. States may hence be read ahead if they were written before the last such
    launch.

    That one is the first launch behind the begin of a step (the batch's slots are new, and anybody may have written
    states between two steps), behind a prompt, a copy or a return from drafts; and every launch for states that were
    written since. A convolution's weights are read ahead by the same launches: by the contract nothing of a step writes
    them but copies, and no kernel starts beside a copy in front. What a captured graph holds is such a sequence too,
    for it starts when all before its replay has ended.
    """

    def __init__(self) -> None:
        self._written: set[int] | None = None  # by the last launch that waited and those since

    def begin(self) -> None:
        """What follows reads nothing ahead."""
        self._written = None

    def launch(self, state: Tensor) -> bool:
        """Note a launch that writes these states of a layer; whether it may read them ahead."""
        where = state.data_ptr()
        if self._written is None or where in self._written:
            self._written = {where}
            return False
        self._written.add(where)
        return True
