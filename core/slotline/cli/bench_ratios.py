"""Ratios of a workload's figures to another engine's, the file that keeps them, and the check against kept ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from slotline.cli.bench_figures import Figure, figures
from slotline.cli.bench_limits import Machine, ModelCost
from slotline.cli.bench_run import Run
from slotline.cli.result_facts import commit, machine_name, software, today
from slotline.registry.errors import ConfigError

_CELL = ("peer", "workload", "scale", "model", "settings", "peer_settings")
"""What makes a cell of a file of ratios: a later run of the same replaces it."""
HEADERS = ("figure", "slotline", "{peer}", "ratio", "share of the limit", "{peer}'s share")


@frozen(kw_only=True)
class Ratio:
    """A figure of both engines.

    Attributes:
        ours, theirs: the figure of each.
    """

    ours: Figure
    theirs: Figure

    @property
    def ratio(self) -> float:
        """How many times as fast as the other engine ours is."""
        first, second = self.ours.value, self.theirs.value
        return second / first if self.ours.is_time else first / second

    def cells(self) -> tuple[str, ...]:
        """Return the figure as a row of the table."""
        ours, theirs = self.ours.cells(), self.theirs.cells()
        return (ours[0], ours[1], theirs[1], f"{self.ratio:.2f}x", ours[3], theirs[3])

    def to_json(self) -> dict[str, Any]:
        """Return the figure as JSON types."""
        shares = {"share": self.ours.share, "peer_share": self.theirs.share}
        return {"ours": self.ours.value, "theirs": self.theirs.value, "ratio": self.ratio, **shares}


def ratios(ours: Run, theirs: Run, cost: ModelCost | None, machine: Machine) -> list[Ratio]:
    """Return the figures that both engines have. New tokens of prompts are counted as ours."""
    waves = (
        evolve(wave, served=tuple(evolve(b, cached=a.cached) for a, b in zip(mine.served, wave.served, strict=True)))
        for mine, wave in zip(ours.waves, theirs.waves, strict=True)
    )
    other = {row.key: row for row in figures(evolve(theirs, waves=tuple(waves)), cost, machine)}
    found = figures(ours, cost, machine)
    return [Ratio(ours=row, theirs=other[row.key]) for row in found if row.key in other and other[row.key].value]


def save(file: Path, cell: Mapping[str, Any]) -> None:
    """Write a cell into a file of ratios, in the form of benchmarks/results, beside the cells that it has.

    Args:
        file: JSON. Made if there is none.
        cell: of `bench_against.Against.to_json`.

    Raises:
        ConfigError: if the file has another form.
        OSError: if it cannot be written.
    """
    before = read_cells(file) if file.is_file() else []
    cells = [one for one in before if any(one[name] != cell[name] for name in _CELL)] + [dict(cell)]
    result = {
        "benchmark": "slotline bench",
        "machine": machine_name(),
        "software": software(),
        "date": today(),
        "commit": commit(),
        "commands": [one["command"] for one in cells],
        "source": "written by the benchmark",
        "note": "Medians after a run to warm up, one engine after the other in one command.",
        "columns": ["peer, model, workload, figure", "slotline", "peer", "ratio", "share of the limit", "peer's share"],
        "rows": [list(row) for one in cells for row in _rows(one)],
        "cells": cells,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_cells(file: Path) -> list[dict[str, Any]]:
    """Return the cells of a file of ratios.

    Raises:
        ConfigError: if there is no such file, or it has another form.
    """
    fix = "name a file that `slotline bench WORKLOAD --against PEER --save FILE` wrote"
    try:
        cells: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["cells"]
        if all(cell["figures"] for cell in cells):
            return cells
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", fix=fix) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} has no ratios: {error!r}", fix=fix) from error
    raise ConfigError(f"{file} has a cell without figures", fix=fix)


def slower(before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float) -> list[str]:
    """Return what got slower: the figures whose ratio fell by more than `tolerance`, 0.05 being 5 %.

    Raises:
        ConfigError: if the two compared different work: another model or number of tokens.
    """
    for name in ("parameters", "requests", "tokens_in", "tokens_out", "dtype"):
        if before[name] != now[name]:
            what = f"{before['workload']} with {before['peer']}"
            raise ConfigError(
                f"{what} was kept with {name} {before[name]}, and has {now[name]} now",
                fix="run it with the kept model and settings, or keep it anew with --save",
            )
    lines = []
    for key, kept in before["figures"].items():
        found = now["figures"].get(key)
        if found is None:
            lines.append(f"{before['workload']}, {key}: there is no such figure now, it was {kept['ratio']:.2f}x")
        elif found["ratio"] < kept["ratio"] * (1 - tolerance):
            change = found["ratio"] / kept["ratio"] - 1
            lines.append(
                f"{before['workload']}, {key}: {found['ratio']:.2f}x {before['peer']}, kept {kept['ratio']:.2f}x "
                f"({change:+.0%}); ours {_change(kept, found, 'ours')}, theirs {_change(kept, found, 'theirs')}"
            )
    return lines


def _change(kept: Mapping[str, float], found: Mapping[str, float], name: str) -> str:
    return f"{found[name] / kept[name] - 1:+.0%}"


def _rows(cell: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    model = Path(cell["model"]).name or "the small model"
    head = f"{cell['peer']} {cell['peer_version']}, {model} in {cell['dtype']}, {cell['workload']}"
    for row in cell["rows"]:
        yield (f"{head}, {row[0]}", *row[1:])
