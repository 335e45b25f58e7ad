"""`GET /`: a page that chats and shows the engine. It is one file, and asks this server and no other for anything."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

from attrs import frozen
from starlette.requests import Request
from starlette.responses import Response

from slotline.server.state import ServerState


@frozen
class Page:
    """The page.

    Attributes:
        html: the file.
        headers: of its answer. The browser runs the file's own script and style, by their hashes, and nothing else.
    """

    html: bytes
    headers: dict[str, str]


@cache
def page() -> Page:
    """Read the page that ships."""
    html = files("slotline.server").joinpath("page.html").read_bytes()
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of(html, b"script"),
        "style-src": _hash_of(html, b"style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return Page(
        html,
        {
            "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-cache",
        },
    )


async def show_page(_state: ServerState, _request: Request) -> Response:
    """Answer with the page. It has no data, and asks for a key if the server does."""
    return Response(page().html, headers=page().headers, media_type="text/html")


def _hash_of(html: bytes, tag: bytes) -> str:
    """Return the source of the file's one element of a kind, for a content security policy."""
    (text,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(text).digest()).decode()}'"
