"""Trials of broken plugins: the suite as it runs on one, the check that is known to kill it before its neighbours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from repository import ROOT

from slotline.testing.check import Check, Level
from slotline.testing.mutants import Mutant
from slotline.testing.runner import Record, check_plugin
from slotline.testing.subject import subject_of


@cache
def known_killers() -> Mapping[tuple[str, str], str]:
    """Return the check that killed each mutant when docs/reference/mutants.md was made, by kind and name."""
    text = (ROOT / "docs/reference/mutants.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| ([\w-]+) \| .* \| L\d \| `([\w.]+)` \|$", text, re.MULTILINE)
    return {(kind, name): check for kind, name, check in rows}


def until_killed(mutant: Mutant, *, lowest: Level = Level.CONTRACT, **subject_options: Any) -> list[Record]:
    """Run a mutant from `lowest` to the level that it states, until a mandatory check fails.

    All lower levels come first. At its own the known killer is asked first, and the other checks only if that passes.
    """
    subject = subject_of(mutant.descriptor, **subject_options)
    known = known_killers().get((mutant.kind.value, mutant.name))

    def below(item: Check) -> bool:
        return lowest <= item.level < mutant.level

    def killer(item: Check) -> bool:
        return item.level == mutant.level and item.id == known

    def rest(item: Check) -> bool:
        return item.level == mutant.level and item.id != known

    records: list[Record] = []
    for wanted in (below, killer, rest):
        records += check_plugin(subject, only=wanted, stop_at_first=True)
        if records and records[-1].bad:
            break
    return records
