"""Program of a rank that rank 0 of a replica started: build the engine, and do what rank 0 is asked to do."""

from __future__ import annotations

import os
import sys

from slotline.ranks.child import be_child_of
from slotline.ranks.follower import main
from slotline.ranks.replicas.sharing_ranks import told_ranks

if __name__ == "__main__":
    be_child_of(int(sys.argv[1]))
    code = main(told_ranks)
    sys.stderr.flush()
    os._exit(code)  # the process has nothing to save, and libraries may wait for their threads
