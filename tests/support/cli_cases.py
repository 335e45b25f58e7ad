"""What the command line's tests share: a tiny checkpoint, and distributions that exist only on the import path."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
import tiny_models


def tiny_checkpoint(folder: Path) -> Path:
    """A random Llama of a few layers."""
    return tiny_models.build("llama", folder, 0)


def pretend_installed(
    monkeypatch: pytest.MonkeyPatch, site: Path, name: str, groups: Mapping[str, Mapping[str, str]], *sources: Path
) -> None:
    """Put a distribution's metadata and source folders on the import path, as an editable install does."""
    info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    tables = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items())
    (info / "entry_points.txt").write_text("\n".join(tables))
    for folder in (site, *sources):
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    importlib.invalidate_caches()


def pretend_project_installed(monkeypatch: pytest.MonkeyPatch, site: Path, project: Path) -> None:
    """The same, from a project's pyproject.toml."""
    table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    pretend_installed(monkeypatch, site, table["name"], table["entry-points"], project / "src")
