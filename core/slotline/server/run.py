"""A server's life: build the engine, listen, serve, drain, end."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from slotline.llm.async_llm import AsyncLLM
from slotline.ranks.roles import follows_rank_0
from slotline.ranks.start import start_engine
from slotline.registry.config import LoadedConfig
from slotline.registry.config.schema import ServerConfig
from slotline.registry.errors import ConfigError
from slotline.server.app import build_app
from slotline.server.keys import Keys
from slotline.server.metrics import Metrics
from slotline.server.state import ServerState, model_names

if TYPE_CHECKING:
    from slotline.server.tracing import Tracing

_COLLECTOR = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_COLLECT_AFTER = 10_000
"""Objects from which on the youngest are collected. Requests leave few cycles."""


class DrainingServer(uvicorn.Server):
    """Uvicorn's server, which stops taking requests at the first signal and ends at once at the second."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM while the server runs, if this is the process's main thread."""
        if current_thread() is not main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain, or end at once if that has begun."""
        self.force_exit = self.should_exit
        self.should_exit = True
        tell_systemd("STOPPING=1")


class Server(DrainingServer):
    """The server of an engine, which refuses new requests while it drains."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See `DrainingServer`."""
        self._state.draining = True
        super().handle_exit(sig, frame)


def serve(loaded: LoadedConfig, say: Callable[[str], None]) -> int:
    """Serve until a signal ends it. Return the exit code.

    Args:
        loaded: the configuration.
        say: tells the person who started it where it listens, once it does.

    Raises:
        SlotlineError: if the address is in use, the keys cannot be read, traces cannot be sent, or the engine cannot be
            built.
    """
    keys = Keys.read(loaded.config.server)
    if follows_rank_0():
        start_engine(loaded)  # which ends the process
    with (  # before the weights are read, to report an address in use early
        listening(loaded.config.server) as listener,
        traced(loaded.config.server) as tracing,
    ):
        llm = AsyncLLM(loaded)
        try:
            state = build_state(llm)
            state.tracing = tracing
            say(_announcement(state, listener, keys))
            tell_systemd("READY=1")
            with _built_objects_frozen():
                Server(uvicorn_config(state, keys), state).run(sockets=[listener])
            return 0 if llm.error is None else 2
        finally:
            llm.close()


@contextmanager
def _built_objects_frozen() -> Iterator[None]:
    """Let no collection of garbage look at what lives as long as the server: it would stop all streams for it."""
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def build_state(llm: AsyncLLM) -> ServerState:
    """Return what the endpoints share, for an engine."""
    loaded = llm.loaded
    names = model_names(loaded.config.server, loaded.config.model)
    named = loaded.config.lora.adapters if loaded.config.lora.name else {}
    return ServerState(
        llm=llm,
        config=loaded.config.server,
        media=loaded.config.multimodal,
        names=names,
        metrics=Metrics(llm, names[0]),
        adapters={name: number for number, name in enumerate(named, 1)},
    )


@contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """Listen on the configured address or Unix socket. A Unix socket's file is removed at the end.

    Raises:
        ConfigError: if that is not possible.
    """
    place = config.socket or f"{config.host}:{config.port}"
    try:
        listener = _unix(Path(config.socket)) if config.socket else _tcp(config.host, config.port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"the server cannot listen on {place}: {reason}",
            fix="set server.host and server.port (0 for a free one), or end what uses them",
        ) from error
    try:
        yield listener
    finally:
        listener.close()
        if config.socket:
            Path(config.socket).unlink(missing_ok=True)


@contextmanager
def traced(config: ServerConfig, environ: Mapping[str, str] = os.environ) -> Iterator[Tracing | None]:
    """Trace requests if the configuration or an OTEL_ variable names a collector. The last spans are sent at the end.

    Raises:
        ConfigError: if the extra is missing, or traces cannot be sent there.
    """
    named = any(environ.get(name) for name in _COLLECTOR)
    off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if not config.otlp_endpoint and (off or not named):
        yield None
        return
    try:
        from slotline.server.tracing import open_tracing
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise ConfigError(
            f"traces need {error.name}, which is not installed",
            fix="pip install 'slotline[otel]', or leave out server.otlp_endpoint and OTEL_EXPORTER_OTLP_ENDPOINT",
        ) from error
    tracing = open_tracing(config.otlp_endpoint, environ)
    try:
        yield tracing
    finally:
        tracing.close()


def tell_systemd(state: str) -> None:
    """Tell systemd the state of the server, if it asks for that with Type=notify. See sd_notify(3)."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as messages:
        messages.connect(f"\0{place[1:]}" if place.startswith("@") else place)
        messages.send(state.encode())


def _tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except BaseException:
        listener.close()
        raise
    return listener


def _unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(2048)
    except BaseException:
        listener.close()
        raise
    return listener


def _announcement(state: ServerState, listener: socket.socket, keys: Keys) -> str:
    """Return where the server listens, and what it runs."""
    config = state.config
    if config.socket:
        place = f"unix:{config.socket}"
    else:
        host, port = listener.getsockname()[:2]
        place = f"{'https' if config.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    asked = "keys are asked for" if keys.users else "no key is asked for"
    return f"serving {', '.join(state.names)} on {place} ({asked})\n{state.llm.plan.summary()}"


def uvicorn_config(state: ServerState, keys: Keys) -> uvicorn.Config:
    """Return uvicorn's configuration of a server."""
    config = state.config
    if config.access_log:
        _log_to_stderr(logging.getLogger("slotline.access"))
    return uvicorn.Config(
        build_app(state, keys),
        access_log=False,
        log_config=None,
        server_header=False,
        lifespan="off",
        root_path=config.root_path,
        proxy_headers=bool(config.trusted_proxies),
        forwarded_allow_ips=list(config.trusted_proxies),
        timeout_graceful_shutdown=max(1, round(config.drain_timeout)),
        ssl_certfile=config.ssl_certfile or None,
        ssl_keyfile=config.ssl_keyfile or None,
        ws="none",
    )


def _log_to_stderr(logger: logging.Logger) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
