"""An HTTP server of this machine with files, redirects and slow answers, which counts what it was asked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

from attrs import define, field


@define(eq=False)
class FileServer:
    """A running server.

    Attributes:
        files: bytes by path.
        moved: location by path of redirects.
        asked: the Host header and path of each request.
        ends: set when slow answers may end.
    """

    files: Mapping[str, bytes]
    moved: Mapping[str, str]
    asked: list[tuple[str, str]] = field(factory=list)
    ends: Event = field(factory=Event)
    port: int = 0

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@contextmanager
def file_server(files: Mapping[str, bytes], moved: Mapping[str, str] | None = None) -> Iterator[FileServer]:
    """Serve files. ``/slow`` sends a byte now and then without end, ``/endless`` as much as is read."""
    found = FileServer(files, moved or {})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append((self.headers["Host"], self.path))
            if self.path in found.moved:
                self.send_response(302)
                self.send_header("Location", found.moved[self.path].format(port=found.port))
                self.end_headers()
            elif self.path in ("/slow", "/endless"):
                self.send_response(200)
                self.end_headers()
                while not found.ends.is_set():
                    self.wfile.write(b"x" if self.path == "/slow" else b"x" * 65536)
                    time.sleep(0.02 if self.path == "/slow" else 0)
            elif self.path in found.files:
                self.send_response(200)
                self.send_header("Content-Length", str(len(found.files[self.path])))
                self.end_headers()
                self.wfile.write(found.files[self.path])
            else:
                self.send_error(404)

        def handle(self) -> None:
            with suppress(ConnectionError):  # the reader had enough
                super().handle()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.port = server.server_port
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield found
    finally:
        found.ends.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
