"""Table of the checks that kill the mutants: `python -m slotline.testing.mutants [--kind KIND] [--markdown]`.

Each mutant runs through the suite, lowest level first, until a mandatory check fails. Exits with 1 if a mutant survives
or dies at another level than declared, or if a correct implementation fails any check.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from attrs import frozen

from slotline.registry.descriptor import Kind
from slotline.testing.check import Level
from slotline.testing.mutants import Mutant, all_correct, all_mutants
from slotline.testing.runner import check_plugin


@frozen
class Verdict:
    """Result of a mutant: the check that killed it, its level and the seconds until then. None if it survived."""

    mutant: Mutant
    killer: str | None
    level: Level | None
    seconds: float

    @property
    def right(self) -> bool:
        """True if it died at the declared level."""
        return self.level is self.mutant.level


def verdicts(kind: Kind | None = None, *, device: str = "cpu") -> Iterator[Verdict]:
    """Run every mutant of a kind, or of all, up to the level it states, and no further."""
    for mutant in all_mutants(kind):
        start = time.perf_counter()
        where = _device_for(mutant.kind, device)
        records = check_plugin(mutant.descriptor, level=mutant.level, stop_at_first=True, device=where)
        bad = next((record for record in records if record.bad), None)
        seconds = time.perf_counter() - start
        yield Verdict(mutant, bad.id if bad else None, bad.level if bad else None, seconds)


def _device_for(kind: Kind, device: str) -> str | None:
    """Return the device to test on. A device is tested on itself."""
    return None if kind is Kind.DEVICE else device


def _row(cells: tuple[str, ...], *, markdown: bool) -> str:
    if markdown:
        return f"| {' | '.join(cells)} |"
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, (16, 32, 3, 44), strict=False)).rstrip()


def main(arguments: list[str] | None = None) -> int:
    """Print the table (see the module)."""
    parser = argparse.ArgumentParser(prog="python -m slotline.testing.mutants", description=__doc__)
    parser.add_argument("--kind", choices=[kind.value for kind in Kind])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--markdown", action="store_true", help="a Markdown table with what is wrong with each")
    given = parser.parse_args(arguments)
    kind = Kind(given.kind) if given.kind else None
    start, wrong, count = time.perf_counter(), 0, 0
    if given.markdown:
        print("| kind | mutant | what is wrong | level | killed by |\n|---|---|---|---|---|")
    for verdict in verdicts(kind, device=given.device):
        mutant, killer = verdict.mutant, verdict.killer or "nothing"
        count += 1
        wrong += not verdict.right
        if given.markdown:
            cells = (
                mutant.kind.value,
                mutant.name,
                mutant.summary.replace("|", "\\|"),
                str(mutant.level),
                f"`{killer}`",
            )
        else:
            cells = (mutant.kind.value, mutant.name, str(mutant.level), killer, f"{verdict.seconds:.1f} s")
        print(_row(cells, markdown=given.markdown), flush=True)
    failed = []
    for right in all_correct(kind):
        records = check_plugin(right.descriptor, device=_device_for(right.descriptor.kind, given.device))
        failed += [f"{right.descriptor.name}: {record.id}: {record.reason}" for record in records if record.bad]
    for line in failed:
        print(f"a correct implementation fails: {line}", file=sys.stderr)
    total = time.perf_counter() - start
    print(
        f"{count} mutants, {count - wrong} killed at their level; {len(all_correct(kind))} correct implementations, "
        f"{len(failed)} failures; {total:.0f} s",
        file=sys.stderr,
    )
    return int(bool(wrong or failed))


if __name__ == "__main__":
    sys.exit(main())
