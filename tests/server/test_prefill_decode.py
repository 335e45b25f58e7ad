"""Two processes of `slotline serve` and one of `slotline route`: one computes prompts, another continues them."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from slotline.cli import main
from slotline.core import LLM, SamplingParams

pytestmark = pytest.mark.behaviour(89, 96)

PROGRAM = [sys.executable, "-c", "import sys; from slotline.cli import main; sys.exit(main())"]
TEXT = "def load(path):\n    '''Read a table of numbers from a file, line by line, and return its columns.'''\n" * 3
BODY: dict[str, Any] = {"prompt": TEXT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
KEY = "kv_connector.handoff"


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and the URL that it says."""
    process = subprocess.Popen([*PROGRAM, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = ""
        while (place := re.search(r" on (\S+) ", said)) is None:
            line = process.stderr.readline()
            assert line, said
            said += line
        yield process, place[1]
    finally:
        process.kill()
        process.communicate()


def serve(role: str, place: str, *more: str) -> tuple[str, ...]:
    key = "address" if role == "prefill" else "peers"
    value = place if role == "prefill" else json.dumps([place])
    settings = ["kv_connector.name=handoff", f"{KEY}.role={role}", f"{KEY}.{key}={value}", f"{KEY}.timeout=3", *more]
    return ("serve", "--port", "0", *(part for one in settings for part in ("--set", one)))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def loads(client: httpx.Client, url: str) -> tuple[int, int]:
    """Blocks whose load a server has started, and those of them that it could not load."""
    text = client.get(f"{url}/metrics").text
    counter = re.compile(r"^slotline:kv_connector_blocks_(\w+?)(?:_total)?(?:\{[^}]*\})? (\S+)$", re.M)
    found = {name: int(float(value)) for name, value in counter.findall(text)}
    return found["loads"], found["lost"]


def streamed(client: httpx.Client, url: str, body: dict[str, Any]) -> str:
    text = ""
    with client.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def one_engine() -> Callable[[str], str]:
    """What one engine answers."""
    llm = LLM(**{"observability.progress": False})
    params = SamplingParams(temperature=0, max_tokens=BODY["max_tokens"], ignore_eos=True)
    return lambda prompt: llm.generate([prompt], params)[0].outputs[0].text


@pytest.mark.exhaustive
def test_prompts_are_computed_by_one_process_and_continued_by_another(one_engine: Callable[[str], str]) -> None:
    place = f"127.0.0.1:{free_port()}"

    def answered(url: str, body: dict[str, Any]) -> str:
        answer = client.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == BODY["max_tokens"]
        assert "kv_transfer_params" not in answer.json()
        return str(answer.json()["choices"][0]["text"])

    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=120))
        prefill, first = stack.enter_context(started(*serve("prefill", place)))
        _, second = stack.enter_context(started(*serve("decode", place)))
        router, url = stack.enter_context(started("route", "--prefill", first, "--decode", second, "--port", "0"))
        _, at_once = stack.enter_context(
            started("route", "--prefill", first, "--decode", second, "--port", "0", "--early")
        )

        assert answered(url, BODY) == one_engine(TEXT)
        assert client.get(f"{url}/route").json() == {"prefilled": 1, "alone": 0, "passed": 0}
        started_loads, lost = loads(client, second)
        assert started_loads > 3
        assert lost == 0
        assert streamed(client, url, {**BODY, "prompt": "import os\n" + TEXT}) == one_engine("import os\n" + TEXT)
        assert loads(client, second)[0] > started_loads
        chat = {"messages": [{"role": "user", "content": TEXT}], "max_completion_tokens": 16, "temperature": 0}
        said = client.post(f"{url}/v1/chat/completions", json=chat)
        assert said.json() == client.post(f"{second}/v1/chat/completions", json=chat).json() or said.status_code == 200
        assert client.get(f"{url}/v1/models").json()["data"]
        assert client.post(f"{url}/v1/completions", json={"prompt": 3}).status_code == 400
        assert client.post(f"{url}/v1/completions", content=b"{").status_code == 400

        asked = {**BODY, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        transfer = client.post(f"{first}/v1/completions", json=asked).json()["kv_transfer_params"]
        assert f"{transfer['remote_host']}:{transfer['remote_port']}" == place
        assert (transfer["do_remote_prefill"], transfer["do_remote_decode"]) == (True, False)

        before = loads(client, second)
        for number in range(3):  # the first answer says where blocks are
            prompt = f"def table{number}(" + TEXT
            assert answered(at_once, {**BODY, "prompt": prompt}) == one_engine(prompt)
        assert streamed(client, at_once, {**BODY, "prompt": "import sys\n" + TEXT}) == one_engine("import sys\n" + TEXT)
        assert client.get(f"{at_once}/route").json() == {"prefilled": 4, "alone": 0, "passed": 0}
        after = loads(client, second)
        assert after[0] - before[0] > 12
        assert after[1] == before[1]
        assert client.post(f"{at_once}/v1/completions", json={"prompt": 3}).status_code == 400

        prefill.kill()  # between the two parts of a request
        prefill.wait()
        begun = time.monotonic()
        third, fourth = "class Table:\n" + TEXT, "class Row:\n" + TEXT
        assert answered(second, {**BODY, "prompt": third, "kv_transfer_params": transfer}) == one_engine(third)
        assert loads(client, second)[1] > 0
        assert answered(url, {**BODY, "prompt": fourth}) == one_engine(fourth)
        assert client.get(f"{url}/route").json()["alone"] >= 1
        fifth = "class Cell:\n" + TEXT
        assert answered(at_once, {**BODY, "prompt": fifth}) == one_engine(fifth)
        assert client.get(f"{at_once}/route").json()["alone"] >= 1
        assert time.monotonic() - begun < 60
        router.send_signal(signal.SIGTERM)
        assert router.wait(30) == 0


@pytest.mark.slow
def test_a_router_without_servers_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with started("route", "--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9", "--port", "0") as (
        _,
        url,
    ):
        answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=30)
        assert answer.status_code == 502
        assert "cannot be reached" in answer.json()["error"]["message"]
    for wrong in ("localhost:80", "ftp://x", "http://", "http://x:y"):
        assert main(["route", "--prefill", wrong, "--decode", "http://x"]) == 2
        assert f"--prefill {wrong} is no URL of a server" in capsys.readouterr().err
