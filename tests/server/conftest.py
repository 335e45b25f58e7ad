"""One server of the small model that ships, for all tests of a process that change nothing in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running_server import RunningServer, running_server
from tool_model import make_tool_model

from slotline.core import LLM

SETTINGS = {"dtype": "float32", "lora.name": "torch", "prompt_embeds": True}  # what is in the cache changes no text


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running_server(**SETTINGS, **{"observability.check_integrity": True}) as running:
        yield running


@pytest.fixture(scope="session")
def embedding_server() -> Iterator[RunningServer]:
    with running_server(task="embed") as running:
        yield running


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the same weights with a chat template for tools and reasoning."""
    folder = make_tool_model(tmp_path_factory.mktemp("model") / "tools")
    with running_server(model=str(folder), dtype="float32", **{"observability.check_integrity": True}) as running:
        yield running


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model, offline."""
    return LLM(**SETTINGS)
