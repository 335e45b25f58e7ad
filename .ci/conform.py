"""Check installed plugins up to a level in one process: `conform.py L2 NAME...`. Exits with 1 if one is not conformant.

What `slotline conform` does for one plugin in two processes, which import torch each.
"""

from __future__ import annotations

import sys
from collections import Counter

from slotline.testing import Level, Outcome, check_plugin
from slotline.testing.runner import level_reached

_, wanted, *names = sys.argv
level, failed = Level.parse(wanted), []
for name in names:
    records = check_plugin(name, level=level)
    counts = Counter(
        "noted" if record.outcome is Outcome.FAILED and not record.bad else record.outcome.value for record in records
    )
    counted = ", ".join(f"{count} {what}" for what, count in counts.items())
    sys.stdout.write(f"{name}: {level_reached(records)} reached, {counted}\n")
    bad = [f"{record.key}: {record.reason}" for record in records if record.bad]
    if bad or level_reached(records) is None:
        failed.append(name)
        sys.stdout.write("\n".join(bad) + "\n")
sys.exit(f"not conformant: {', '.join(failed)}" if failed else 0)
