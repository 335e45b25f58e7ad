"""The life of a router: listen, serve, end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import uvicorn

from slotline.registry.config.schema import ServerConfig
from slotline.server.route import Router
from slotline.server.run import DrainingServer, listening, tell_systemd


def run_router(
    prefill: Sequence[str],
    decode: Sequence[str],
    timeout: float,
    *,
    early: bool,
    host: str,
    port: int,
    say: Callable[[str], None],
) -> int:
    """Route until a signal ends it. Return the exit code.

    Args:
        prefill, decode, timeout, early: see `Router`.
        say: tells where it listens, once it does.

    Raises:
        ConfigError: if the address is in use.
    """
    with listening(ServerConfig(host=host, port=port)) as listener:
        router = Router(prefill, decode, timeout, early=early)
        name, number = listener.getsockname()[:2]
        place = f"http://{f'[{name}]' if ':' in name else name}:{number}"
        say(f"routing on {place} (prompts to {', '.join(prefill)}; requests to {', '.join(decode)})")
        config = uvicorn.Config(
            router, access_log=False, log_config=None, server_header=False, lifespan="off", ws="none"
        )
        tell_systemd("READY=1")
        DrainingServer(config).run(sockets=[listener])
    return 0
