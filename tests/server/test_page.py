"""The page of `GET /` and `/v1/engine`, which it reads: headers, what runs now, and no texts."""

from __future__ import annotations

import asyncio
import json
import re
import time
from base64 import b64encode
from hashlib import sha256
from typing import Any

import httpx
import pytest
from attrs import evolve
from core_cases import cache_of
from running_server import RunningServer

from slotline.server.app import build_app
from slotline.server.engine_view import CELLS, cache_view
from slotline.server.keys import Keys

SECRET = "the quick brown fox jumps over the lazy dog and back again, as it has always done"
LONG = {"prompt": SECRET, "max_tokens": 1900, "temperature": 0, "ignore_eos": True, "stream": True}


def test_the_page_runs_its_own_script_and_style_only(server: RunningServer) -> None:
    answer = httpx.get(f"{server.url}/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-frame-options"] == "DENY"
    assert httpx.head(f"{server.url}/").status_code == 200


def test_the_page_is_one_file_that_makes_no_markup_of_texts(server: RunningServer) -> None:
    html = httpx.get(f"{server.url}/").text
    assert not re.search(r"https?:|src=|@import|url\(", html), "it asks no other server"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", html)
    assert not re.search(r"<[^>]+\s(style|on\w+)=", html), "the policy forbids it"


def test_the_page_can_be_left_out(server: RunningServer) -> None:
    state = evolve(server.state, config=evolve(server.state.config, page=False))

    async def status(path: str) -> int:
        transport = httpx.ASGITransport(build_app(state, Keys((), ())))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get(path)).status_code

    assert asyncio.run(status("/")) == 404
    assert asyncio.run(status("/v1/engine")) == 200


def test_the_engine_is_seen_while_requests_run_and_after(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.post("/v1/completions", json={**LONG, "stream": False, "max_tokens": 2})  # its prefix is cached
        before = seen(client)
        with client.stream("POST", "/v1/completions", json={**LONG, "n": 2}) as answer:
            lines = answer.iter_lines()
            next(lines)
            during = seen(client)
            while seen(client)["generated_tokens"] == during["generated_tokens"]:
                next(lines)
        server.everything_returned()
        after = seen(client)
    assert SECRET[:9] not in json.dumps(during)
    assert during["status"] == "ready"
    assert during["chat_template"] is True
    assert during["plan"] == server.state.llm.plan.digest
    assert during["requests"]["running"] == during["requests"]["prompts_unfinished"] + 1 == 2
    for one in during["requests"]["unfinished"]:
        assert (one["status"], one["preemptions"]) == ("running", 0)
        assert one["blocks"] * 16 >= one["prompt_tokens"] + one["output_tokens"] > one["prompt_tokens"] > 16
    cache = during["cache"]
    assert cache["shared"] >= 1, "both have the cached prefix"
    assert cache["used"] >= 1
    assert cache["free"] + cache["cached"] + cache["used"] + cache["shared"] == cache["blocks"]
    assert set(cache["groups"][0]["cells"]) >= {"."}
    assert after["seconds"] > during["seconds"] > before["seconds"]
    assert after["generated_tokens"] > during["generated_tokens"] > before["generated_tokens"]
    assert after["requests"]["unfinished"] == []
    assert (after["cache"]["used"], after["cache"]["shared"]) == (0, 0)
    assert after["cache"]["cached"] >= cache["shared"]


def seen(client: httpx.Client) -> Any:
    """The engine's state of now, and not one that was made a moment ago."""
    time.sleep(0.3)
    answer = client.get("/v1/engine")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    return answer.json()


def test_a_block_is_shown_in_its_group_and_state() -> None:
    cache = cache_of(12, block_size=(4, 8), kernel_block_size=4, max_model_len=64)
    first, second = cache.groups
    shared, used, cached, other = cache.pool.allocate(1), cache.pool.allocate(2), cache.pool.allocate(1), [5, 6]
    assert cache.pool.allocate(2) == other
    for row in (0, 1):
        first.extend(row, shared)
    cache.pool.share(shared)
    first.extend(0, used)
    second.extend(0, other)
    cache.pool.remember(1, cached, [b"x"])
    cache.pool.release(cached)
    view = cache_view(cache.pool, cache.groups, ["one", "two"])
    assert [group.cells for group in view.groups] == ["suu.........", "...cuu......"]
    assert (view.blocks, view.free, view.cached, view.used, view.shared) == (12, 6, 1, 4, 1)
    assert [(group.cached, group.used, group.shared) for group in view.groups] == [(0, 2, 1), (1, 2, 0)]
    assert [group.block_size for group in view.groups] == [4, 8]


@pytest.mark.parametrize("blocks", [1, CELLS, CELLS + 1, 5 * CELLS])
def test_a_large_pool_has_several_blocks_in_a_cell(blocks: int) -> None:
    cache = cache_of(blocks, max_model_len=64)
    cache.groups[0].extend(0, cache.pool.allocate(1))
    view = cache_view(cache.pool, cache.groups, ["one"])
    (cells,) = (group.cells for group in view.groups)
    assert len(cells) == -(-blocks // view.blocks_per_cell) <= CELLS
    assert cells == "u" + "." * (len(cells) - 1), "a cell is empty only if all of its blocks are"
