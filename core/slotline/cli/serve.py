"""`slotline serve`: an HTTP server with OpenAI's interface."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from slotline.cli.command import Command, add_config_options, load
from slotline.registry.config import LoadedConfig
from slotline.registry.errors import ConfigError

_MODULES = frozenset({"httpx", "starlette", "uvicorn", "msgspec", "prometheus_client"})


def _configure(parser: argparse.ArgumentParser) -> None:
    add_config_options(parser, positional=True)
    parser.add_argument("--model", metavar="MODEL", help="a local folder or a name on the Hub (default: small model)")
    parser.add_argument("--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, metavar="N", help="port to listen on, 0 for a free one (default: 8000)")


@contextmanager
def needs_extra() -> Iterator[None]:
    """Name the extra of the server if one of its libraries is not installed.

    Raises:
        ConfigError: naming the library.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _MODULES:
            raise
        raise ConfigError(
            f"the server needs {error.name}, which is not installed", fix="pip install 'slotline[server]'"
        ) from error


def _run(arguments: argparse.Namespace) -> int:
    with needs_extra():
        from slotline.server.run import serve
    return serve(server_config(arguments), _say)


def server_config(arguments: argparse.Namespace) -> LoadedConfig:
    """Load the configuration of a server that the options name.

    Raises:
        ConfigError: listing every fault.
    """
    given = {"model": arguments.model, "server.host": arguments.host, "server.port": arguments.port}
    return load(arguments, {name: value for name, value in given.items() if value is not None})


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


COMMAND = Command(
    name="serve",
    summary="answer requests over HTTP, with OpenAI's interface",
    examples=(
        "slotline serve",
        "slotline serve run.toml --port 8080",
        "slotline serve --model checkpoints/my-model --set server.max_unfinished=64",
        """curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "def main("}'""",
    ),
    configure=_configure,
    run=_run,
)
