"""`slotline route`: a router in front of servers that prefill and servers that decode."""

from __future__ import annotations

import argparse
import sys
from urllib.parse import urlsplit

from slotline.cli.command import Command
from slotline.cli.serve import needs_extra
from slotline.registry.errors import ConfigError


def _configure(parser: argparse.ArgumentParser) -> None:
    for name, what in (("prefill", "computes prompts"), ("decode", "answers")):
        parser.add_argument(
            f"--{name}",
            action="append",
            required=True,
            metavar="URL",
            help=f"a server that {what}; repeat it for several, which take turns",
        )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port, 0 for a free one (%(default)s)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time to compute a prompt, after which the other server does (%(default)s)",
    )
    parser.add_argument(
        "--early",
        action="store_true",
        help="ask both servers at once: blocks come while the prompt is computed, and the request takes its place",
    )


def _run(arguments: argparse.Namespace) -> int:
    given = {name: [_url(name, one) for one in getattr(arguments, name)] for name in ("prefill", "decode")}
    if not arguments.timeout > 0:
        raise ConfigError(f"--timeout {arguments.timeout} is not allowed", fix="give a number above 0")
    with needs_extra():
        from slotline.server.route_run import run_router
    return run_router(
        given["prefill"],
        given["decode"],
        arguments.timeout,
        early=arguments.early,
        host=arguments.host,
        port=arguments.port,
        say=_say,
    )


def _url(name: str, text: str) -> str:
    """Return a server's URL without a slash at its end.

    Raises:
        ConfigError: if it is none.
    """
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise ConfigError(f"--{name} {text} is no URL of a server", fix="write one such as http://127.0.0.1:8100")
    return text.rstrip("/").removesuffix("/v1")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


COMMAND = Command(
    name="route",
    summary="send prompts to servers that prefill, and requests to servers that decode",
    examples=(
        "slotline route --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200",
        "slotline route --prefill http://a:8100 --prefill http://b:8100 --decode http://c:8200 --port 9000",
    ),
    configure=_configure,
    run=_run,
)
