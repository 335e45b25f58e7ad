"""The only test of the suite: a run of a check. `slotline.testing.plugin` generates the runs."""

from __future__ import annotations

import pytest

from slotline.testing.plugin import generate, perform
from slotline.testing.selection import Selected


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate one test for each run."""
    generate(metafunc, __name__)


def test_check(selected: Selected, request: pytest.FixtureRequest) -> None:
    """Run a check of `slotline.testing.check`."""
    perform(selected, request)
