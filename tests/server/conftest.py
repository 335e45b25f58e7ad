"""One server of the small model that ships, for all tests of a process that change nothing in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running_server import RunningServer, running_server
from tiny_vision import png_file
from tool_model import make_tool_model

from slotline.core import LLM

IMAGE_TEMPLATE = """{% for message in messages %}{% for part in message.content %}
{%- if part.type == "image" %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"""
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
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose images requests may name."""
    pytest.importorskip("PIL", reason="images need Pillow")
    (folder := tmp_path_factory.mktemp("shown") / "shown").mkdir()
    (folder / "0.png").write_bytes(png_file(0))
    return folder


@pytest.fixture(scope="session")
def seeing(
    tiny_vision_model: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory, shown: Path
) -> Iterator[RunningServer]:
    """A server of a tiny model that sees images, also those of servers of this machine."""
    folder = tmp_path_factory.mktemp("model") / "seeing"
    shutil.copytree(tiny_vision_model(), folder)
    (folder / "chat_template.jinja").write_text(IMAGE_TEMPLATE)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    hosts = ("127.0.0.1", "169.254.169.254")
    limits = {"urls": hosts, "url_networks": ("127.0.0.1/32",), "folder": str(shown), "max_items": 3}
    settings = {f"multimodal.{name}": value for name, value in limits.items()}
    with running_server(model=str(folder), dtype="float32", **settings) as running:
        yield running


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model, offline."""
    return LLM(**SETTINGS)
