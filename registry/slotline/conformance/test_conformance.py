"""The one test of the suite: a run of a check. `slotline.testing.plugin` says which runs there are."""

from __future__ import annotations

import pytest

from slotline.testing.plugin import generate, perform
from slotline.testing.selection import Selected


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each run."""
    generate(metafunc, __name__)


def test_check(selected: Selected, request: pytest.FixtureRequest) -> None:
    """What `slotline.testing.check` says a check is."""
    perform(selected, request)
