"""Badge for a README, in the form of shields.io's endpoint: ``slotline attention contract 1 | L3``."""

from __future__ import annotations

from typing import Any

from slotline.testing.check import Level
from slotline.testing.report import Report

_COLOURS = {
    Level.CONTRACT: "orange",
    Level.NUMERICS: "yellow",
    Level.HOSTILE: "yellowgreen",
    Level.STATEFUL: "green",
    Level.GRAPHS: "brightgreen",
    Level.ENGINE: "brightgreen",
}


def badge(report: Report) -> dict[str, Any]:
    """Return a badge with the level of a report. A run of a part of the checks shows no level."""
    reached = report.level_reached
    return {
        "schemaVersion": 1,
        "label": f"slotline {report.plugin.kind.replace('_', ' ')} contract {report.plugin.contract}",
        "message": "none" if reached is None else str(reached),
        "color": "red" if reached is None else _COLOURS[reached],
    }
