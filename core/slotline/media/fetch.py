"""Files fetched from URLs, from allowed hosts at public addresses alone, within a time and a size."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from slotline.media.addresses import Address, resolved
from slotline.registry.config.schema import MultimodalConfig
from slotline.registry.errors import RequestError
from slotline.registry.loading import one_line
from slotline.registry.safe_repr import safe_repr

if TYPE_CHECKING:
    import httpx

MAX_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


def fetch(url: str, config: MultimodalConfig, most: int) -> bytes:
    """Return the bytes behind a URL.

    The host is looked up once for each redirect, and the connection goes to the address that was checked, whatever the
    name stands for later. Proxies of the environment are not used, since they would look names up themselves.

    Args:
        url: of http or https.
        config: says which hosts are allowed, and how long all of it may take.
        most: bytes that the file may have.

    Raises:
        RequestError: if the URL is not allowed, or the file cannot be had in time or is too large.
    """
    with ThreadPoolExecutor(1) as thread:  # the caller's may run an event loop already
        return thread.submit(asyncio.run, _in_time(url, config, most)).result()


async def _in_time(url: str, config: MultimodalConfig, most: int) -> bytes:
    try:
        import httpx
    except ImportError as error:
        raise RequestError("URLs need httpx", fix="install slotline[multimodal]") from error
    try:
        async with asyncio.timeout(config.url_timeout):
            return await _follow(url, config, most)
    except TimeoutError as error:
        raise RequestError(
            f"{safe_repr(url, 200)} was not read in multimodal.url_timeout = {config.url_timeout:g} seconds",
            fix="send the file itself as a data URI, or raise the limit",
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RequestError(
            f"{safe_repr(url, 200)} cannot be fetched: {one_line(error)}", fix="check the URL, or send a data URI"
        ) from error


async def _follow(url: str, config: MultimodalConfig, most: int) -> bytes:
    """Fetch a URL and those that it redirects to. Each is checked anew."""
    import httpx

    limits = httpx.Limits(max_keepalive_connections=0)  # the next host may lie at the same address
    async with httpx.AsyncClient(trust_env=False, timeout=None, limits=limits) as client:
        target = httpx.URL(url)
        for _ in range(MAX_REDIRECTS + 1):
            _check(target, config)
            host, port = _host(target), target.port or (443 if target.scheme == "https" else 80)
            answer = await _get(client, target, await resolved(host, port, config.url_networks), most)
            if isinstance(answer, bytes):
                return answer
            target = target.join(answer)
    raise RequestError(
        f"{safe_repr(url, 200)} redirects more than {MAX_REDIRECTS} times", fix="give the URL that it leads to"
    )


def _host(url: httpx.URL) -> str:
    return url.raw_host.decode().lower().rstrip(".")


def _check(url: httpx.URL, config: MultimodalConfig) -> None:
    """Refuse a URL whose scheme or host is not allowed."""
    shown = safe_repr(str(url), 200)
    if url.scheme not in ("http", "https") or not url.host or url.userinfo:
        raise RequestError(f"{shown} is no URL to fetch", fix="give http:// or https:// with a host, and no password")
    host = _host(url)
    if not any(
        allowed == "*" or host == allowed or (allowed.startswith("*.") and host.endswith(allowed[1:]))
        for allowed in map(str.lower, config.urls)
    ):
        raise RequestError(
            f"{shown} is not fetched: multimodal.urls allows {', '.join(config.urls) or 'no host'}",
            fix="send the file itself as a data URI, or add the host to multimodal.urls",
        )


async def _get(client: httpx.AsyncClient, url: httpx.URL, addresses: list[Address], most: int) -> bytes | str:
    """Return the file of a URL, or where it redirects to. The first address that takes a connection is asked."""
    import httpx

    for address in addresses:
        literal = f"[{address}]" if address.version == 6 else str(address)
        request = client.build_request(
            "GET",
            url.copy_with(host=literal),
            headers={"Host": url.netloc.decode(), "Accept-Encoding": "identity", "User-Agent": "slotline"},
            extensions={"sni_hostname": _host(url)},  # certificates are those of the name, not of the address
        )
        try:
            response = await client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            if address == addresses[-1]:
                raise
            continue
        try:
            return await _body(response, url, most)
        finally:
            await response.aclose()
    raise RequestError(f"the host {_host(url)!r} has no address", fix="check the URL")


async def _body(response: httpx.Response, url: httpx.URL, most: int) -> bytes | str:
    shown = safe_repr(str(url), 200)
    if response.status_code in _REDIRECTS and (to := response.headers.get("location")):
        return str(to)
    if response.status_code != 200:
        raise RequestError(f"{shown} answers with status {response.status_code}", fix="check the URL")
    body, told = bytearray(), response.headers.get("content-length", "")
    too_large = told.isdecimal() and int(told) > most
    if not too_large:
        async for piece in response.aiter_raw():  # not decompressed, so that the size is what was sent
            body += piece
            if too_large := len(body) > most:
                break
    if too_large:
        raise RequestError(
            f"{shown} has more than {most} bytes, which are left of multimodal.max_bytes",
            fix="give smaller or fewer files, or raise the limit",
        )
    return bytes(body)
