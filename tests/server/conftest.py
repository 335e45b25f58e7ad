"""One server of the small model that ships, for all tests of a process that change nothing in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_server import RunningServer, running_server

from slotline.core import LLM

SETTINGS = {"dtype": "float32", "lora.name": "torch"}  # what is in the cache changes no text


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running_server(**SETTINGS, **{"observability.check_integrity": True}) as running:
        yield running


@pytest.fixture(scope="session")
def embedding_server() -> Iterator[RunningServer]:
    with running_server(task="embed") as running:
        yield running


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model, offline."""
    return LLM(**SETTINGS)
