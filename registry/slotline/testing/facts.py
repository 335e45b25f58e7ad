"""Facts of the suite, the plugin and the machine for a report."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attrs import frozen

from slotline.registry.descriptor import HOST_CONTRACTS
from slotline.testing.subject import Subject

_DRIVER = Path("/proc/driver/nvidia/version")


@frozen(kw_only=True)
class Suite:
    """Version of slotline that contains the checks, and the supported contracts of the kind."""

    version: str
    contract: str


@frozen(kw_only=True)
class Plugin:
    """Name, source, bound contract and declared dtypes of the plugin."""

    kind: str
    name: str
    contract: int
    target: str = ""
    distribution: str = ""
    version: str = ""
    summary: str = ""
    dtypes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """``kind:name``."""
        return f"{self.kind}:{self.name}"

    @property
    def source(self) -> str:
        """Distribution with its version, or another source."""
        return f"{self.distribution} {self.version}" if self.distribution else self.target or "an object in memory"


@frozen(kw_only=True)
class Machine:
    """Machine that the run used."""

    device: str
    name: str = ""
    driver: str = ""
    compute_capability: tuple[int, int] | None = None
    cuda: str = ""
    torch: str = ""
    python: str = ""
    platform: str = ""

    def __str__(self) -> str:
        return f"{self.device} ({self.name})" if self.name else self.device


def suite_of(subject: Subject) -> Suite:
    """Return the facts of the suite for this plugin."""
    return Suite(version=installed_version("slotline"), contract=str(HOST_CONTRACTS[subject.kind]))


def plugin_of(subject: Subject) -> Plugin:
    """Return the facts of a plugin."""
    return Plugin(
        kind=subject.kind.value,
        name=subject.name,
        contract=subject.contract,
        target=subject.target,
        distribution=subject.distribution,
        version=subject.version,
        summary=subject.descriptor.summary,
        dtypes=_dtypes(subject.capabilities),
    )


def machine_of(subject: Subject) -> Machine:
    """Return the facts of a machine. torch is imported only for a GPU, since plugins may not need it."""
    on_cuda = subject.device.type == "cuda"
    return Machine(
        device=subject.device.type,
        name=subject.device.name,
        driver=_driver() if on_cuda else "",
        compute_capability=subject.device.compute_capability,
        cuda=_cuda() if on_cuda else "",
        torch=installed_version("torch"),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
    )


def installed_version(distribution: str) -> str:
    """Return the version of a distribution, or an empty string if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _dtypes(capabilities: Any) -> tuple[str, ...]:
    offer = getattr(capabilities, "dtypes", None)
    values = getattr(offer, "values", None)
    if offer is None:
        return ()
    if values is None:
        return ("any",)
    return tuple(sorted("/".join(value) if isinstance(value, tuple) else str(value) for value in values))


def _cuda() -> str:
    """Return the version of CUDA that torch was built with."""
    import torch

    return str(torch.version.cuda or "")


def _driver() -> str:
    """Return the version of NVIDIA's kernel module, or an empty string if it is unknown."""
    try:
        found = re.search(r"Module\D*([\d.]+)", _DRIVER.read_text())
    except OSError:
        return ""
    return found[1] if found else ""
