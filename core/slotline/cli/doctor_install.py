"""Checks of the installation: versions, the namespace, stale metadata."""

from __future__ import annotations

import json
import platform
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlparse

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from slotline.cli.finding import Finding, Status
from slotline.registry.descriptor import Kind

PROJECT = "slotline"
_PORTIONS = ("core", "registry", "backends", "plugins", "proposers")
_COMPANIONS = ("torchvision", "torchaudio")
"""Packages with compiled code for exactly one release of torch."""
_REINSTALL = "pip install -e . in the source folder, or pip install --force-reinstall slotline"


def check_versions() -> Iterator[Finding]:
    """Check Python and each requirement against the distribution's metadata."""
    ours = _distribution()
    if ours is None:
        yield Finding(Status.FAIL, "slotline", "is not installed: there are no entry points, so no plugins", _REINSTALL)
        return
    yield Finding(Status.OK, "slotline", ours.version)
    wanted = ours.metadata["Requires-Python"] or ""
    fits = SpecifierSet(wanted).contains(platform.python_version(), prereleases=True)
    text = f"{platform.python_version()} (needs {wanted})"
    yield Finding(Status.OK if fits else Status.FAIL, "python", text, "" if fits else f"use a Python {wanted}")
    for text in ours.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield version_finding(requirement)


def version_finding(requirement: Requirement) -> Finding:
    """Report whether a requirement is met."""
    fix = f"pip install '{requirement.name}{requirement.specifier}'"
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return Finding(Status.FAIL, requirement.name, f"not installed (needs {requirement.specifier})", fix)
    text = f"{found} (needs {requirement.specifier})" if requirement.specifier else found
    if requirement.specifier.contains(found, prereleases=True):
        return Finding(Status.OK, requirement.name, text)
    return Finding(Status.FAIL, requirement.name, text, fix)


def check_companions() -> Iterator[Finding]:
    """Check that torchvision and torchaudio, if there are any, are built for the installed torch.

    transformers imports them where they are installed, and fails with "Could not import module ..." if they do not fit.
    """
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return  # `check_versions` reports it
    for name in _COMPANIONS:
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        yield companion_finding(found, torch)


def companion_finding(found: Distribution, torch: str) -> Finding:
    """Report whether a package that is built for one release of torch fits the installed one."""
    name = found.metadata["Name"]
    wanted = [Requirement(text) for text in found.requires or ()]
    pins = [
        each.specifier
        for each in wanted
        if each.name == "torch" and (not each.marker or each.marker.evaluate({"extra": ""}))
    ]
    misfits = [str(pin) for pin in pins if not pin.contains(torch, prereleases=True)]
    if misfits:
        text = f"{found.version} is built for torch{misfits[0]}, and torch is {torch}"
    else:
        error = _import_error(name)
        if error is None:
            return Finding(Status.OK, name, f"{found.version}, for torch {torch}")
        text = f"{found.version} cannot be imported beside torch {torch} ({error}), as one for another build of it"
    fix = (
        f"pip install 'torch=={torch.partition('+')[0]}' --upgrade {name}, or pip uninstall {name}: slotline needs none"
    )
    return Finding(Status.FAIL, name, f"{text}: transformers fails to import its models", fix)


def _import_error(name: str) -> str | None:
    """Return what importing a package raises, in one line. None if it can be imported.

    A torchvision for CUDA satisfies its requirement beside a torch of the same release for the CPU, and still fails.
    """
    try:
        import_module(name)
    except Exception as error:  # whatever loading compiled code raises
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def check_namespace() -> Iterator[Finding]:
    """Check that `slotline` is a namespace of several folders. An `__init__.py` would hide all but one of them."""
    import slotline

    yield namespace_finding(getattr(slotline, "__file__", None), list(slotline.__path__))


def namespace_finding(file: str | None, folders: Iterable[str]) -> Finding:
    """Report whether the namespace is complete."""
    if file is not None:
        return Finding(Status.FAIL, "namespace", f"{file} hijacks the namespace 'slotline'", f"remove {file}")
    missing = [name for name in _PORTIONS if find_spec(f"{PROJECT}.{name}") is None]
    if missing:
        names = ", ".join(f"{PROJECT}.{name}" for name in missing)
        return Finding(Status.FAIL, "namespace", f"{names} cannot be found", _REINSTALL)
    return Finding(Status.OK, "namespace", ", ".join(folders))


def check_installation() -> Iterator[Finding]:
    """Check that the installed metadata is that of the source folder, for an editable install."""
    ours = _distribution()
    folder = None if ours is None else editable_folder(ours)
    if ours is None or folder is None:
        yield Finding(Status.OK, "installation", "not editable")
        return
    file = folder / "pyproject.toml"
    if not file.is_file():
        text = f"editable, and its source {folder} is gone"
        yield Finding(Status.FAIL, "installation", text, "install slotline again")
        return
    stale = list(differences(ours, tomllib.loads(file.read_text())["project"]))
    text = f"editable, {folder}"
    if stale:
        yield Finding(Status.WARN, "installation", f"{text}, is stale: {'; '.join(stale)}", f"pip install -e {folder}")
    else:
        yield Finding(Status.OK, "installation", text)


def editable_folder(ours: Distribution) -> Path | None:
    """Return the source folder of an editable install (PEP 610), else None."""
    record = json.loads(ours.read_text("direct_url.json") or "{}")
    if not record.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(record["url"]).path))


def differences(ours: Distribution, project: Mapping[str, object]) -> Iterator[str]:
    """Yield the differences between the installed metadata and the `[project]` table of its source."""
    if ours.version != project.get("version"):
        yield f"version {ours.version} is installed, the source says {project.get('version')}"
    groups = {kind.entry_point_group for kind in Kind} | {f"{PROJECT}.hooks"}
    declared = project.get("entry-points")
    tables = declared if isinstance(declared, Mapping) else {}
    source = {(group, name): value for group in groups for name, value in tables.get(group, {}).items()}
    installed = {(point.group, point.name): point.value for point in ours.entry_points if point.group in groups}
    for key in sorted(source.keys() | installed.keys()):
        label = f"{key[0].removeprefix(f'{PROJECT}.')}:{key[1]}"
        if key not in installed:
            yield f"{label} is not installed"
        elif key not in source:
            yield f"{label} is gone from the source"
        elif source[key] != installed[key]:
            yield f"{label} has moved"


def _distribution() -> Distribution | None:
    try:
        return distribution(PROJECT)
    except PackageNotFoundError:
        return None
