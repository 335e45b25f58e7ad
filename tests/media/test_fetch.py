"""URLs: which hosts and addresses are reached, and how much is read of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Any

import pytest
from file_server import FileServer, file_server

from slotline.media.addresses import is_public
from slotline.media.fetch import fetch
from slotline.registry.config.schema import MultimodalConfig
from slotline.registry.errors import RequestError

LOCAL: dict[str, Any] = {"urls": ("127.0.0.1", "*.test"), "url_networks": ("127.0.0.0/8",)}


@pytest.fixture(scope="module")
def files() -> Iterator[FileServer]:
    moved = {
        "/moved": "/file",
        "/round": "/round",
        "/away": "http://other.example/file",
        "/scheme": "file:///etc/hostname",
        "/inside": "http://169.254.169.254/latest",
    }
    with file_server({"/file": b"12345678"}, moved) as server:
        yield server


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "239.1.1.1",
        "240.0.0.1",
        "255.255.255.255",
        "192.0.2.1",
        "::",
        "::1",
        "fe80::1",
        "fc00::1",
        "fec0::1",
        "ff02::1",
        "ff0e::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "2002:7f00:1::",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ],
)
def test_addresses_inside_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", ["93.184.216.34", "::ffff:93.184.216.34", "2606:2800:220:1::1", "64:ff9b::808:808"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ip_address(address))


def test_a_file_is_fetched_from_an_allowed_host_also_behind_a_redirect(files: FileServer) -> None:
    config = MultimodalConfig(**LOCAL)
    assert fetch(files.url("/file"), config, 8) == fetch(files.url("/moved"), config, 8) == b"12345678"


@pytest.mark.parametrize(
    ("settings", "url", "message"),
    [
        ({}, "http://127.0.0.1:{port}/file", "multimodal.urls allows no host"),
        ({"urls": ("example.com",)}, "http://127.0.0.1:{port}/file", "multimodal.urls allows example.com"),
        ({"urls": ("example.com",)}, "http://notexample.com/", "multimodal.urls allows example.com"),
        ({"urls": ("*",)}, "http://127.0.0.1:{port}/file", "an address that is not public"),
        ({"urls": ("*",)}, "http://2130706433:{port}/file", "an address that is not public"),
        ({"urls": ("*",)}, "http://localhost:{port}/file", "an address that is not public"),
        ({"urls": ("*",)}, "http://[::ffff:127.0.0.1]:{port}/file", "an address that is not public"),
        ({"urls": ("*",)}, "http://a:b@127.0.0.1:{port}/file", "is no URL to fetch"),
        ({"urls": ("*",)}, "ftp://127.0.0.1/file", "is no URL to fetch"),
        ({"urls": ("*",)}, "http://", "is no URL to fetch"),
        ({"urls": ("*",)}, "http://[::x/", "cannot be fetched"),
        (LOCAL, "http://127.0.0.1:{port}/none", "answers with status 404"),
        (LOCAL, "http://127.0.0.1:{port}/round", "redirects more than 3 times"),
        (LOCAL, "http://127.0.0.1:{port}/away", "multimodal.urls allows"),
        (LOCAL, "http://127.0.0.1:{port}/scheme", "is no URL to fetch"),
        ({**LOCAL, "urls": ("*",)}, "http://127.0.0.1:{port}/inside", "'169.254.169.254' has an address that is not"),
        (LOCAL, "http://127.0.0.1:1/file", "cannot be fetched"),
    ],
)
def test_what_is_not_allowed_is_not_asked(settings: dict[str, Any], url: str, message: str, files: FileServer) -> None:
    files.asked.clear()
    with pytest.raises(RequestError, match=message) as caught:
        fetch(url.format(port=files.port), MultimodalConfig(**settings), 100)
    assert caught.value.fix
    assert files.asked == [] or settings.get("url_networks")


def test_a_file_that_is_too_large_is_not_read_to_its_end(files: FileServer) -> None:
    config = MultimodalConfig(**LOCAL)
    for path in ("/file", "/endless"):
        with pytest.raises(RequestError, match=r"more than 7 bytes, which are left of multimodal.max_bytes"):
            fetch(files.url(path), config, 7)


def test_a_slow_answer_ends_at_the_time_limit_though_bytes_keep_coming(files: FileServer) -> None:
    begun = time.monotonic()
    with pytest.raises(RequestError, match=r"not read in multimodal.url_timeout = 0.2 seconds"):
        fetch(files.url("/slow"), MultimodalConfig(**LOCAL, url_timeout=0.2), 1000)
    assert time.monotonic() - begun < 5


def test_a_name_is_looked_up_once_and_the_checked_address_is_asked(
    files: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up, original = list[str](), socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **more: Any) -> Any:
        if host != "pictures.test":
            return original(host, *args, **more)
        looked_up.append(host)
        return original("127.0.0.1" if len(looked_up) == 1 else "127.0.0.2", *args, **more)  # where nobody answers

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    files.asked.clear()
    assert fetch(files.url("/file", "pictures.test"), MultimodalConfig(**LOCAL), 100) == b"12345678"
    assert looked_up == ["pictures.test"]
    assert files.asked == [(f"pictures.test:{files.port}", "/file")]
    with pytest.raises(RequestError, match=r"'pictures.test' has an address that is not public"):
        fetch(files.url("/file", "pictures.test"), MultimodalConfig(urls=("*",)), 100)
