"""A Hugging Face Hub on this machine: the addresses that its client asks for, over a folder of repositories."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from attrs import define, field


def commit_of(repo: str, branch: str) -> str:
    """The commit of a branch: 40 hexadecimal digits."""
    return hashlib.sha1(f"{repo}@{branch}".encode()).hexdigest()


@define
class Hub:
    """What the server serves, and what was asked of it.

    Attributes:
        repos: the folder of each branch, by repository and branch.
        tokens: the token that a repository needs.
        gated: repositories whose terms nobody accepted.
        sizes: sizes to claim for files, by name.
        requests: method, path and token of each request.
        fails: a status to answer with, 0 for none.
    """

    repos: dict[str, dict[str, Path]] = field(factory=dict)
    tokens: dict[str, str] = field(factory=dict)
    gated: set[str] = field(factory=set)
    sizes: dict[str, int] = field(factory=dict)
    requests: list[tuple[str, str, str]] = field(factory=list)
    fails: int = 0
    address: str = ""

    def downloads(self) -> set[str]:
        """Names of the files that were fetched."""
        return {path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path, token = unquote(urlsplit(self.path).path), self.headers.get("Authorization", "")
        self.hub.requests.append((self.command, path, token))
        parts = path.strip("/").split("/")
        if self.hub.fails:
            return self._send(self.hub.fails, {}, b"broken", body=body)
        api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if api else parts[:2])
        rest = parts[4:] if api else parts[2:]
        if error := self._refusal(repo, token):
            return self._send(*error, b"", body=body)
        if rest[:1] == ["refs"]:
            return self._refs(repo)
        revision = rest[1] if len(rest) > 1 else "main"
        found = next(((b, f) for b, f in self.hub.repos[repo].items() if revision in (b, commit_of(repo, b))), None)
        if found is None:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"", body=body)
        branch, folder = found
        commit = commit_of(repo, branch)
        if not api:
            return self._file(folder, "/".join(rest[2:]), commit, body=body)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        if rest[:1] == ["tree"]:
            return self._json([self._entry(folder, file) for file in files])
        blobs = "blobs" in parse_qs(urlsplit(self.path).query)
        siblings = [
            {"rfilename": str(f.relative_to(folder))} | ({"size": self._size(f)} if blobs else {}) for f in files
        ]
        self._json({"_id": "0", "id": repo, "modelId": repo, "sha": commit, "private": False, "siblings": siblings})
        return None

    def _refusal(self, repo: str, token: str) -> tuple[int, Mapping[str, str]] | None:
        if repo not in self.hub.repos:
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."}
        if repo in self.hub.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this model is restricted."}
        if repo in self.hub.tokens and token != f"Bearer {self.hub.tokens[repo]}":
            return 401, {"X-Error-Code": "RepoNotFound"}
        return None

    def _size(self, file: Path) -> int:
        return self.hub.sizes.get(file.name, file.stat().st_size)

    def _entry(self, folder: Path, file: Path) -> dict[str, Any]:
        oid = hashlib.sha1(file.read_bytes()).hexdigest()
        return {"type": "file", "path": str(file.relative_to(folder)), "size": self._size(file), "oid": oid}

    def _refs(self, repo: str) -> None:
        names = [
            {"name": b, "ref": f"refs/heads/{b}", "targetCommit": commit_of(repo, b)} for b in self.hub.repos[repo]
        ]
        self._json({"branches": names, "tags": [], "converts": []})

    def _file(self, folder: Path, name: str, commit: str, *, body: bool) -> None:
        file = folder / name
        if not file.is_file():
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"", body=body)
        content = file.read_bytes()
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start = self.headers.get("Range", "")
        if body and start.startswith("bytes=") and (first := int(start[6:].split("-")[0])):
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            return self._send(206, headers, content[first:], body=body)
        self._send(200, headers, content, body=body)
        return None

    def _json(self, value: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode(), body=True)

    def _send(self, status: int, headers: Mapping[str, str], content: bytes, *, body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve until the block ends."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
