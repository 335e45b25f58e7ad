"""A server on a real socket in this process, and what must be left of a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

from attrs import define
from tiny_engines import everything_returned

from slotline.core import AsyncLLM
from slotline.registry.config import load_config
from slotline.server.keys import Keys
from slotline.server.run import Server, build_state, listening, uvicorn_config
from slotline.server.state import ServerState


@define(eq=False)
class RunningServer:
    """A server of this process.

    Attributes:
        url: without a path.
    """

    url: str
    state: ServerState
    server: Server

    def everything_returned(self) -> None:
        """No request, row, stream or block is left, at the latest after some seconds."""
        llm = self.state.llm
        for _ in range(500):
            if not llm.engine.requests and not llm.num_unfinished:
                break
            time.sleep(0.01)
        assert llm.num_unfinished == 0
        llm._thread.call(lambda: everything_returned(llm)).result(30)  # type: ignore[arg-type]


@contextmanager
def running_server(keys: Keys | None = None, **values: Any) -> Iterator[RunningServer]:
    """Run a server with settings by their dotted names."""
    loaded = load_config(values={"server.port": 0, "server.access_log": False, **values})
    with listening(loaded.config.server) as listener:
        llm = AsyncLLM(loaded)
        state = build_state(llm)
        server = Server(uvicorn_config(state, keys or Keys((), ())), state)
        thread = Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            host, port = listener.getsockname()[:2]
            yield RunningServer(f"http://{host}:{port}", state, server)
        finally:
            server.should_exit = True
            thread.join(30)
            llm.close()
        assert not thread.is_alive()
