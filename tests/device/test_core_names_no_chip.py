"""The core names no chip and no library of kernels: it asks the device."""

from __future__ import annotations

import re

from repository import TESTS

CORE = TESTS.parent / "core" / "slotline" / "core"
NAMES = re.compile(r"cuda|triton|hopper|gluon|nvrtc", re.IGNORECASE)


def test_no_file_of_the_core_names_a_chip_or_its_kernels() -> None:
    found = {str(file.relative_to(CORE)) for file in CORE.rglob("*.py") if NAMES.search(file.read_text("utf-8"))}
    assert found == set(), "ask the device instead: slotline.registry.contracts.device"
