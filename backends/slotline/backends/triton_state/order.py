"""When a kernel may read states before the kernels in front of it have ended (programmatic dependent launch)."""

from __future__ import annotations

from torch import Tensor


class Order:
    """Permission for launches of `decode` to read their layer's states, and the batch's slots, before their wait.

    A kernel starts once every program of the previous kernel has allowed it, which most kernels do at their begin. Any
    number of earlier kernels may therefore still run, and their writes may not be visible before the wait. A launch
    that may not read ahead allows the next kernel only after its own wait. When any later kernel starts, everything
    before that launch has ended, though the launch itself may still run. States may therefore be read ahead if they
    were written before the last launch of this kind.

    That launch is the first one after the begin of a step (the batch's slots are new, and states may have been written
    between two steps), after a prompt, a copy or a rollback of drafts, and every launch for states that were written
    since. A convolution's weights are read ahead by the same launches. By the contract only copies write them in a
    step, and no kernel starts while an earlier copy runs. A captured graph is a sequence of the same kind, because it
    starts when everything before its replay has ended.
    """

    def __init__(self) -> None:
        self._written: set[int] | None = None  # by the last launch that waited and those since

    def begin(self) -> None:
        """Forbid reading ahead in the next launch."""
        self._written = None

    def launch(self, state: Tensor) -> bool:
        """Record a launch that writes these states of a layer, and return True if it may read them ahead."""
        where = state.data_ptr()
        if self._written is None or where in self._written:
            self._written = {where}
            return False
        self._written.add(where)
        return True
