"""Behaviour of a process that another one started as a part of its engine."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time

_LOOK = 0.5
"""Seconds between two looks whether the parent lives, before there is a connection with it."""


def be_child_of(parent: int) -> None:
    """Leave interrupts and standard output to the process that started this one, and end when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process once its parent has ended, also while it still imports or waits for its parent."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(1)
