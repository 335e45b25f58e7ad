"""API keys: who may call, and who may change the server."""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen
from starlette.requests import Request

from slotline.registry.config.schema import ServerConfig
from slotline.registry.errors import ConfigError
from slotline.server.errors import HttpError


@frozen
class Keys:
    """The keys of a server. They are compared in constant time and never shown.

    Attributes:
        users: keys of requests. Empty if none is asked for.
        admins: keys of requests that change the server. They serve for all others too.
    """

    users: tuple[bytes, ...]
    admins: tuple[bytes, ...]

    @classmethod
    def read(cls, config: ServerConfig, environ: Mapping[str, str] = os.environ) -> Keys:
        """Read the keys from files and variables.

        Raises:
            ConfigError: if a file cannot be read or has no key.
        """
        return cls(
            _read("server.api_keys", config.api_keys, environ.get("SLOTLINE_API_KEY", "")),
            _read("server.admin_keys", config.admin_keys, environ.get("SLOTLINE_ADMIN_KEY", "")),
        )

    def check(self, request: Request, *, admin: bool) -> None:
        """Check the key of a request.

        Raises:
            HttpError: with status 401 for a wrong or missing key, 403 if the server has no key that allows it.
        """
        if admin and not self.admins:
            raise HttpError(
                403, "this server has no admin key, so nobody may change it", "permission_error", code="no_admin_key"
            )
        if not admin and not self.users:
            return
        given = _given(request)
        allowed = self.admins if admin else (*self.users, *self.admins)
        if not sum(hmac.compare_digest(given, key) for key in allowed):
            raise HttpError(
                401,
                "the API key is wrong or missing; send it as 'Authorization: Bearer KEY'",
                "authentication_error",
                code="invalid_api_key",
                headers=(("www-authenticate", "Bearer"),),
            )


def _given(request: Request) -> bytes:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return (key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")).encode()


def _read(name: str, path: str, variable: str) -> tuple[bytes, ...]:
    lines = []
    if path:
        try:
            lines = Path(path).read_text().splitlines()
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"{name} = {path!r} cannot be read: {error}", fix="name a file with a key a line"
            ) from None
    keys = tuple(line.strip().encode() for line in (*lines, variable) if line.strip() and not line.startswith("#"))
    if path and not keys:
        raise ConfigError(f"{name} = {path!r} has no key", fix="write a key on a line of its own")
    return keys
